"""The row kernels for two distributions: in PyTorch, and in Triton on a GPU or in the interpreter, small sizes."""

from __future__ import annotations

import importlib
import math
import os

import pytest
import torch

from fuse_losses.kernels.side import Side
from fuse_losses.kernels.squash import Squash
from fuse_losses.losses import DIVERGENCES
from tests.losses.pages import CASES
from tests.oracle import assert_close_to_oracle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"),
)
PLAIN, SCALED, CAPPED = Squash("identity", 1.0, 1.0), Squash("identity", 1.0, 0.3), Squash("tanh", 0.4, 2.5)
ROWS = 4


@pytest.fixture(params=["chunked", TRITON])
def kernels(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return importlib.import_module(f"fuse_losses.kernels.{request.param}.paired")


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def squashed(u, squash: Squash):
    return squash.outer * (torch.tanh(squash.inner * u) if squash.name == "tanh" else squash.inner * u)


def make_side(vocab: int, form: str, squash: Squash = PLAIN, dtype: torch.dtype = torch.float32) -> Side:
    z = 2 * torch.randn(ROWS, vocab)
    values = {"logits": z, "log_probs": z.log_softmax(-1), "probs": z.softmax(-1)}[form]
    return Side(values.to(dtype).to(DEVICE), form, squash)


def log_probs(side: Side, values: torch.Tensor) -> torch.Tensor:
    if side.form == "logits":
        return squashed(values, side.squash).log_softmax(-1)
    return values if side.form == "log_probs" else values.log()


def eager(p: Side, q: Side, name: str, k: float, weight: torch.Tensor, dtype: torch.dtype):
    """(divergence, gradients of its weighted sum), computed in `dtype`."""
    leaves = [side.values.detach().clone().to(dtype).requires_grad_() for side in (p, q)]
    d = DIVERGENCES[name].reference(log_probs(p, leaves[0]), log_probs(q, leaves[1]), k)
    grads = torch.autograd.grad(d, leaves, weight.to(dtype))
    return [
        d.detach(),
        *[g.to(s.values.dtype) if dtype != torch.float64 else g for g, s in zip(grads, (p, q), strict=True)],
    ]


def two_visits(kernels, p: Side, q: Side, name: str, k: float, weight: torch.Tensor):
    d, statistics = unwritten(ROWS), unwritten(6, ROWS)
    kernels.paired_fwd(p, q, DIVERGENCES[name], k, d, statistics, (True, True))
    outs = [unwritten(*side.values.shape, dtype=side.values.dtype) for side in (p, q)]
    kernels.paired_bwd(p, q, DIVERGENCES[name], k, weight, statistics, *outs)
    return [d, *outs]


def one_visit(kernels, p: Side, q: Side, name: str, k: float, weight: torch.Tensor, outs=None):
    d = unwritten(ROWS)
    outs = outs or [unwritten(*side.values.shape, dtype=side.values.dtype) for side in (p, q)]
    kernels.paired_fwd_bwd(p, q, DIVERGENCES[name], k, weight, d, *outs)
    return [d, *outs]


def weights() -> torch.Tensor:
    weight = torch.randn(ROWS)
    weight[1] = 0
    return weight.to(DEVICE)


@pytest.mark.parametrize(
    "forms, squashes, dtypes, vocab",
    [
        (("logits", "logits"), (CAPPED, SCALED), (torch.float32, torch.float32), 131),
        (("logits", "logits"), (PLAIN, PLAIN), (torch.float16, torch.float32), 4200),  # beyond two tiles
        (("log_probs", "probs"), (PLAIN, PLAIN), (torch.float32, torch.float32), 64),
        (("probs", "log_probs"), (PLAIN, PLAIN), (torch.float32, torch.float32), 131),
    ],
    ids=["logits", "large", "log_probs", "probs"],
)
@pytest.mark.parametrize("name, k", CASES)
def test_against_the_oracle(kernels, name, k, forms, squashes, dtypes, vocab):
    p, q = (make_side(vocab, *how) for how in zip(forms, squashes, dtypes, strict=True))
    before, weight = [p.values.clone(), q.values.clone()], weights()
    measure, oracle = eager(p, q, name, k, weight, torch.float32), eager(p, q, name, k, weight, torch.float64)
    ours = two_visits(kernels, p, q, name, k, weight)
    assert_close_to_oracle(ours, measure, oracle)
    assert torch.equal(p.values, before[0]) and torch.equal(q.values, before[1])
    both = one_visit(kernels, p, q, name, k, weight)
    assert both[0][1] == 0
    both[0][1] = ours[0][1]  # a row without weight is not read in one visit
    for a, b in zip(both, ours, strict=True):
        assert torch.equal(a, b)
    for grad in ours[1:]:
        assert torch.equal(grad[1], torch.zeros_like(grad[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_over_the_values(kernels, dtype):
    """Each over its own side's values, in their dtype or a narrower one, and one of them left out."""
    for vocab in (131, 4200):
        p, q = make_side(vocab, "logits", CAPPED), make_side(vocab, "logits", SCALED)
        weight = weights()
        apart = [unwritten(ROWS, vocab, dtype=dtype) for _ in range(2)]
        expected = one_visit(kernels, p, q, "jsd", 0.3, weight, apart)
        memory = [unwritten(ROWS, 4224) for _ in range(2)]
        shared = [Side(m[:, :vocab].copy_(s.values), s.form, s.squash) for m, s in zip(memory, (p, q), strict=True)]
        outs = [m.view(dtype)[:, :vocab] for m in memory]
        for a, b in zip(one_visit(kernels, *shared, "jsd", 0.3, weight, outs), expected, strict=True):
            assert torch.equal(a, b)
        d, alone = unwritten(ROWS), unwritten(ROWS, vocab, dtype=dtype)
        kernels.paired_fwd_bwd(p, q, DIVERGENCES["jsd"], 0.3, weight, d, None, alone)
        assert torch.equal(d, expected[0]) and torch.equal(alone, expected[2])
        kernels.paired_fwd_bwd(p, q, DIVERGENCES["jsd"], 0.3, weight, d, alone, None)
        assert torch.equal(d, expected[0]) and torch.equal(alone, expected[1])


@pytest.mark.parametrize("name, k", CASES)
def test_a_frozen_side_that_may_be_overwritten(kernels, name, k):
    """Values and gradients are the same to the last bit whether or not a kernel uses the teacher's memory."""
    p, q = make_side(4200, "logits", CAPPED), make_side(4200, "logits", SCALED)
    weight, results = weights(), []
    for scratch in (False, True):
        teacher = q._replace(values=q.values.clone(), scratch=scratch)
        d, out = unwritten(ROWS), unwritten(ROWS, 4200)
        kernels.paired_fwd_bwd(p, teacher, DIVERGENCES[name], k, weight, d, out, None)
        results.append((d, out))
        assert scratch or torch.equal(teacher.values, q.values)
    for plain, reused in zip(*results, strict=True):
        assert torch.equal(plain, reused)


@pytest.mark.parametrize("form", ["logits", "log_probs", "probs"])
@pytest.mark.parametrize("name, k", [case for case in CASES if case[0] != "soft_cross_entropy"])
def test_equal_sides_give_exact_zeros(kernels, name, k, form):
    side = make_side(301, form, CAPPED if form == "logits" else PLAIN)
    d, *grads = two_visits(kernels, side, side, name, k, weights())
    assert torch.equal(d.abs(), torch.zeros_like(d))
    for grad in grads if form == "logits" else ():
        assert torch.equal(grad.abs(), torch.zeros_like(grad))


@pytest.mark.parametrize("name, k", CASES)
def test_edges(kernels, name, k):
    """Classes masked for the teacher or for both, logits of 10000, a NaN, a row of nothing, a masked student."""
    p, q = make_side(300, "logits"), make_side(300, "logits")
    q.values[0, ::3] = -math.inf
    p.values[0, ::6] = -math.inf
    p.values[1] += 1e4
    q.values[1] -= 1e4
    p.values[2, 7] = math.nan
    p.values[3] = -math.inf
    weight = torch.randn(ROWS, device=DEVICE)
    d, p_grad, q_grad = two_visits(kernels, p, q, name, k, weight)
    assert not d[:2].isnan().any() and d[2:].isnan().all()
    unbounded = name == "symmetric_kl" or (name == "reverse_kl" and k == 0)  # the student has classes of its own
    assert d[1].isfinite() and d[0].isfinite() != unbounded
    exact = [Side(side.values[:2].double(), *side[1:]) for side in (p, q)]
    p_exact, q_exact = (s.values.log_softmax(1) for s in exact)
    both = (p_exact > -math.inf) & (q_exact > -math.inf)
    for row in range(unbounded, 2):
        # what a class adds that only the student has is known in closed form; a teacher's masked class adds nothing
        alone = {"jsd": -(1 - k) * math.log(1 - k), "reverse_kl": -math.log(k or 1), "tvd": 0.5}.get(name, 0.0)
        expected = term(name, k, p_exact[row, both[row]], q_exact[row, both[row]])
        expected += alone * p_exact[row, ~both[row]].exp().sum()
        torch.testing.assert_close(d[row].double(), expected, rtol=1e-4, atol=1e-5)
        assert p_grad[row].isfinite().all() and q_grad[row].isfinite().all()
        # a softmax does not see a shift of its logits
        torch.testing.assert_close(p_grad[row].sum(), torch.zeros_like(p_grad[row, 0]), rtol=0, atol=1e-5)


def term(name, k, lp, lq):
    page = DIVERGENCES[name]
    return page.phi(lp.exp(), lq.exp(), lp, lq, k).sum()


def test_strides(kernels):
    p, q = make_side(130, "logits", CAPPED), make_side(130, "log_probs")
    weight = weights()
    expected = two_visits(kernels, p, q, "jsd", 0.3, weight)
    transposed = Side(p.values.t().contiguous().t(), *p[1:])
    padded = Side(unwritten(ROWS, 200)[:, :130].copy_(q.values), *q[1:])
    d, statistics = unwritten(ROWS), unwritten(6, 2 * ROWS)[:, ROWS:]
    kernels.paired_fwd(transposed, padded, DIVERGENCES["jsd"], 0.3, d, statistics, (True, False))
    outs = unwritten(130, ROWS).t(), unwritten(ROWS, 200)[:, :130]
    kernels.paired_bwd(transposed, padded, DIVERGENCES["jsd"], 0.3, weight, statistics, *outs)
    for a, b in zip((d, *outs), expected, strict=True):
        assert torch.equal(a, b)
