"""A Python loop over sequences is unrolled into an exit for each; one operator makes them all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.capture import Capture, operators
from tests.oracle import assert_as_eager

B, T, H, V = 3, 5, 8, 41


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    x, w = torch.randn(B, T, H).to(dtype), torch.randn(V, H).to(dtype)
    return [x.requires_grad_(), w.requires_grad_(), torch.randint(0, V, (B, T)), torch.rand(B, T).to(dtype)]


def trl(x, w, y, a):
    out = []
    for row, labels in zip(F.linear(x, w), y, strict=True):
        out.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(out)


def ragged(x, w, y, a):
    """Sequences of different lengths, each with its mean."""
    z = F.linear(x, w)
    losses = [F.cross_entropy(z[i, :n], y[i, :n], reduction="none").mean() for i, n in enumerate((5, 2, 3))]
    return torch.stack(losses).square().sum()


def backwards(x, w, y, a):
    z = F.linear(x, w)
    return torch.cat([z[i].log_softmax(-1).gather(-1, y[i][:, None]) * a[i][:, None] for i in (2, 0)])


def with_entropies(x, w, y, a):
    """A log-prob and the logsumexp of each row."""
    out = []
    for z, labels in zip(F.linear(x, w), y, strict=True):
        out.append(z.gather(-1, labels[:, None]).squeeze(-1) - 0.5 * z.logsumexp(-1))
    return torch.stack(out)


def focal(x, w, y, a):
    total = x.new_zeros(())
    for z, labels, weights in zip(F.linear(x, w), y, a, strict=True):
        p = z.softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        total = total - (weights * (1 - p).square() * p.log()).mean()
    return total


def entropies(x, w, y, a):
    z = F.linear(x, w)
    rows = [-(row.softmax(-1) * row.log_softmax(-1)).sum(-1) for row in z]
    return torch.stack(rows) * a


def ragged_entropies(x, w, y, a):
    z = F.linear(x, w)
    rows = [z[0], z[1, :2], z[2, 1:4]]
    return torch.cat([-(row.softmax(-1) * row.log_softmax(-1)).sum(-1) for row in rows])


KERNELS, ROWS = "linear_log_prob", "chunked_rows"
LOOPS = {
    "TRL": (trl, KERNELS),
    "of different lengths": (ragged, KERNELS),
    "backwards": (backwards, KERNELS),
    "two values each": (with_entropies, KERNELS),
    "focal": (focal, ROWS),
    "entropies": (entropies, ROWS),
    "entropies of different lengths": (ragged_entropies, ROWS),
}


@pytest.mark.parametrize(("fn", "operator"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_operator(fn, operator: str, dtype: torch.dtype) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True, dynamic=False), fn, tensors(dtype))
    assert operators(capture.after[0]) == [operator]


@pytest.mark.parametrize("fn", [trl, entropies])
def test_symbolic_lengths(fn) -> None:
    capture = Capture(chunk_rows=4)
    compiled = capture.compile(fn, fullgraph=True)
    for _ in range(3):
        args = tensors()
        torch._dynamo.mark_dynamic(args[0], 1)
        assert_as_eager(compiled, fn, args)
    assert not capture.codes
    if fn is trl:
        assert operators(capture.after[0]) == [KERNELS]


def soft_targets(x, w, y, a):
    """Targets as wide as the vocabulary: they are not copied to be one tensor."""
    targets = a[..., None] * torch.arange(V)
    return torch.stack([-(t * row.log_softmax(-1)).sum(-1) for t, row in zip(targets, F.linear(x, w), strict=True)])


def written_between(x, w, y, a):
    """The labels of a row are written to while the one before is worked on."""
    z, y, out = F.linear(x, w), y.clone(), []
    for i in range(B):
        y[i].add_(1).remainder_(V)
        out.append(z[i].log_softmax(-1).gather(-1, y[i][:, None].clone()))
    return torch.stack(out)


def made_between(x, w, y, a):
    """The labels of a row depend on the row before."""
    z, labels, out = F.linear(x, w), y[0], []
    for row in z:
        out.append(row.log_softmax(-1).gather(-1, labels[:, None]))
        labels = (labels + (out[-1].detach().squeeze(-1) < -3).long()) % V
    return torch.stack(out)


def different(x, w, y, a):
    """One function of each row, but not the same one."""
    z = F.linear(x, w)
    return torch.stack([-(z[i].softmax(-1).pow(i + 2)).sum(-1) for i in range(B)])


@pytest.mark.parametrize("fn", [written_between, made_between, different, soft_targets])
def test_what_cannot_be_joined_is_not(fn) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, tensors())
    assert len(operators(capture.after[0])) == B


def test_two_loops_over_the_same_sequences() -> None:
    """The second loop's indices move up behind those that the first has moved there."""

    def fn(x, w, c):
        scaled = F.linear(x, w) / (1 + torch.arange(len(x))[:, None, None])

        def loop():
            rows = zip(scaled, c, strict=True)
            return torch.stack([r.log_softmax(-1).gather(-1, i[:, None])[:, 0] for r, i in rows])

        return loop(), loop()

    x, w, y, _ = tensors()
    args = [x, w, y.clamp(min=0)]
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, args)
    assert capture.codes == [] and operators(capture.after[0]) == ["chunked_rows"]
