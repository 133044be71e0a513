"""`divergence` and `divergence_sum` against a float64 oracle: values, gradients, and what happens at the edges."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

import fuse_losses.ops.divergence_sum  # noqa: F401
from fuse_losses.losses import DIVERGENCES
from tests.losses.pages import CASES
from tests.ops.pair import OPS, graded, make_pair, three

sum_module = sys.modules["fuse_losses.ops.divergence_sum"]  # the package has the operator under this name
F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PROPER = [case for case in CASES if case[0] != "soft_cross_entropy"]  # 0 for equal distributions


@pytest.fixture
def check(assert_as_good_as_eager):
    def check(pair, chunk_rows=4) -> None:
        device = pair.tensors[0].device
        scalar = torch.randn((), dtype=F64, device=device)
        by_row = torch.randn(pair.tensors[0].shape[0], dtype=F64, device=device)
        assert_as_good_as_eager(*three(pair, lambda x: pair.rows(x, chunk_rows), pair.eager_rows, by_row))
        assert_as_good_as_eager(*three(pair, lambda x: pair.sum(x, chunk_rows), pair.eager_sum, scalar))

    return check


@pytest.mark.parametrize("dtypes", [(F32, F32), (B16, F32), (B16, B16), (F16, F16), (F64, F64)], ids=str)
@pytest.mark.parametrize("name, k", CASES)
def test_projected(check, name, k, dtypes):
    check(make_pair(name, k, dtypes=dtypes, squashes=("tanh", "scale"), row_weight=True))


@pytest.mark.parametrize(
    "given",
    [("logits", "logits"), ("log_probs", "probs"), ("probs", "log_probs"), (None, "probs"), ("log_probs", None)],
    ids=str,
)
@pytest.mark.parametrize("name, k", CASES)
def test_given(check, name, k, given):
    check(make_pair(name, k, given=given, row_weight=True))


@pytest.mark.parametrize("dtypes", [(F32, F32), (B16, B16), (B16, F32), (F64, F64)], ids=str)
@pytest.mark.parametrize("name, k", CASES)
def test_few_rows_of_wide_hidden_states(check, monkeypatch, name, k, dtypes):
    """The gradients for the logits wait for the upstream gradient, and those for the weights are made in backward."""
    kept = []
    keep = sum_module.paired_fwd_keep
    monkeypatch.setattr(sum_module, "paired_fwd_keep", lambda *args: kept.append(args) or keep(*args))
    check(make_pair(name, k, rows=9, hidden=(64, 40), dtypes=dtypes, squashes=("tanh", "scale"), row_weight=True), 2)
    assert kept


@pytest.mark.parametrize("vocab", [2, 3, 127, 128, 1009])
@pytest.mark.parametrize("rows, chunk_rows", [(1, 1), (8, 8), (17, 5), (17, 64)])
def test_odd_and_round_sizes(check, vocab, rows, chunk_rows):
    check(make_pair(rows=rows, vocab=vocab, bias=False), chunk_rows)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("name, k", CASES)
def test_temperatures(assert_as_good_as_eager, name, k, temperature):
    pair = make_pair(name, k)

    def ours(leaves):
        how = (name, k, False, *("logits", "identity", 1.0, 1 / temperature) * 2, 4, "float32")
        return OPS.divergence(*leaves, *how)

    def eager(leaves):
        lp, lq = ((F.linear(*side) / temperature).log_softmax(1) for side in (leaves[:3], leaves[3:]))
        return DIVERGENCES[name].reference(lp, lq, k)

    assert_as_good_as_eager(*three(pair, ours, eager, torch.randn(11, dtype=F64)))


@pytest.mark.parametrize("name, k", CASES)
def test_logits_of_ten_thousand(check, name, k):
    pair = make_pair(name, k)
    pair.tensors[2] += 1e4
    pair.tensors[5] -= 1e4
    check(pair)


@pytest.mark.parametrize("name, k", [case for case in PROPER if case[0] in ("jsd", "tvd")])
def test_close_distributions(check, name, k):
    """Where a difference of large numbers would show; given, because the roundings of a product would hide it. The
    value of a KL is not judged: it inherits the rounding of a row's log_sum, as eager's does, and which is luck.
    """
    pair = make_pair(name, k, rows=64, vocab=1009, given=("logits", "logits"))
    pair.tensors[3] = pair.tensors[0] + 1e-3 * torch.randn_like(pair.tensors[0])
    check(pair)


@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.parametrize("squash", ["identity", "scale", "tanh"])
@pytest.mark.parametrize("name, k", PROPER)
def test_equal_distributions_give_exact_zeros(name, k, squash, dtype):
    pair = make_pair(name, k, hidden=(16, 16), dtypes=(dtype, dtype), squashes=(squash, squash), row_weight=True)
    pair.tensors[3:] = pair.tensors[:3]
    for run, upstream in ((pair.rows, torch.randn(11)), (pair.sum, torch.randn(()))):
        value, *grads = graded(lambda leaves, run=run: run(leaves, 4), pair.leaves(), upstream)
        for result in (value, *grads):
            assert torch.equal(result.abs(), torch.zeros_like(result))


def test_ties_of_the_total_variation_have_no_gradient():
    lp = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    q = torch.tensor([[0.5, 0.125, 0.25, 0.125]])
    leaves = [lp.clone().requires_grad_(), q.clone().requires_grad_()]
    how = ("tvd", 0.0, False, *("probs", "identity", 1.0, 1.0) * 2, 4, "float32")
    d = OPS.divergence(leaves[0], None, None, leaves[1], None, None, *how)
    assert d.item() == 0.125
    grads = torch.autograd.grad(d.sum(), leaves)
    assert grads[0].tolist() == [[0.0, 0.5, -0.5, 0.0]] and grads[1].tolist() == [[0.0, -0.5, 0.5, 0.0]]


@pytest.mark.parametrize("name, k", CASES)
def test_masked_classes(name, k):
    """A class that both sides mask adds nothing, and takes no gradient; the others have eager's of what is left."""
    pair = make_pair(name, k, vocab=40, dtypes=(F64, F64))
    masked = torch.arange(40) % 3 == 0
    expected = make_pair(name, k, vocab=int((~masked).sum()), dtypes=(F64, F64))
    expected.tensors = [t if i in (0, 3) else t[~masked] for i, t in enumerate(pair.tensors)]
    upstream = torch.randn(11, dtype=F64)
    kept = graded(lambda leaves: expected.rows(leaves, 4), expected.leaves(), upstream)
    for bias in (pair.tensors[2], pair.tensors[5]):
        bias[masked] = -math.inf
    ours = graded(lambda leaves: pair.rows(leaves, 4), pair.leaves(), upstream)
    for a, b in zip(ours, kept, strict=True):
        if a.shape[0] == 40:
            assert torch.equal(a[masked], torch.zeros_like(a[masked]))
            a = a[~masked]
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name, k", CASES)
def test_classes_that_one_side_alone_excludes_may_be_left_out(check, name, k):
    """`masked`: such a class adds nothing, though a divergence would be infinite or a difference of probabilities."""
    pair = make_pair(name, k, vocab=40, row_weight=True)
    pair.masked = True
    pair.tensors[2][::7] = -math.inf
    pair.tensors[5][3::5] = -math.inf
    check(pair)


@pytest.mark.parametrize("name, k", CASES)
def test_zero_probabilities_are_never_nan(name, k):
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 0.75, 0.25], [0.0, 0.0, 0.0, 1.0]])
    for forms in (("probs", "probs"), ("log_probs", "log_probs"), ("probs", "log_probs"), ("logits", "probs")):
        leaves = [v if form == "probs" else v.log() for v, form in zip((p, q), forms, strict=True)]
        leaves = [v.clone().requires_grad_() for v in leaves]
        how = (name, k, False, forms[0], "identity", 1.0, 1.0, forms[1], "identity", 1.0, 1.0, 4, "float32")
        d = OPS.divergence(leaves[0], None, None, leaves[1], None, None, *how)
        grads = torch.autograd.grad(d, leaves, torch.tensor([0.7, -1.3]))
        assert not d.isnan().any()
        if "logits" not in forms or d.isfinite().all():
            assert not any(g.isnan().any() for g in grads)


@pytest.mark.parametrize("upstream", [math.inf, math.nan, 2.0])
@pytest.mark.parametrize("rows, hidden", [(0, 16), (5, 16), (5, 64)])
def test_no_weighted_row_gives_exact_zero_gradients(rows, hidden, upstream):
    pair = make_pair(rows=rows, hidden=(hidden, hidden))
    pair.row_weight = torch.zeros(rows)
    value, *grads = graded(lambda leaves: pair.sum(leaves, 2), pair.leaves(), torch.tensor(upstream))
    assert value.item() == 0.0
    for grad in grads:
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("given", [(None, None), ("logits", "log_probs")], ids=str)
def test_rows_without_weight_may_hold_anything(given):
    pair = make_pair(rows=6, given=given)
    pair.row_weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0])
    clean = graded(lambda leaves: pair.sum(leaves, 4), pair.leaves(), torch.tensor(1.7))
    pair.tensors[0][2] = math.nan
    pair.tensors[3][5] = math.inf
    dirty = graded(lambda leaves: pair.sum(leaves, 4), pair.leaves(), torch.tensor(1.7))
    if given[0]:  # of a projected side x itself is dirty: 0 * NaN reaches the weight's product, as in eager
        for a, b in zip(dirty, clean, strict=True):
            assert torch.equal(a, b)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])


def test_nan_row_poisons_only_itself():
    pair = make_pair(rows=6)
    pair.tensors[0][3, 0] = math.nan
    value, *grads = graded(lambda leaves: pair.rows(leaves, 4), pair.leaves(), torch.randn(6))
    others = [0, 1, 2, 4, 5]
    assert value[3].isnan() and value[others].isfinite().all()
    assert grads[0][3].isnan().all() and grads[0][others].isfinite().all()


def test_gradient_of_the_row_weights():
    pair = make_pair(row_weight=True)
    leaves, weight = pair.leaves(), pair.row_weight.clone().requires_grad_()
    pair.row_weight = weight
    d = pair.eager_rows(pair.leaves())
    value, *grads = graded(lambda leaves: pair.sum(leaves[:-1], 4), [*leaves, weight], torch.tensor(1.3))
    torch.testing.assert_close(grads[-1], 1.3 * d)
    expected = graded(pair.eager_sum, pair.leaves(), torch.tensor(1.3))
    for a, b in zip((value, *grads[:-1]), expected, strict=True):
        torch.testing.assert_close(a, b)
    weight = pair.row_weight.detach().double().requires_grad_()
    pair.row_weight = weight
    (grad,) = torch.autograd.grad(pair.sum([t.detach() for t in leaves], 4), weight)
    torch.testing.assert_close(grad, d.detach().double())


def test_one_weight_for_both_sides():
    pair = make_pair(hidden=(16, 16), bias=False)
    for run in (lambda t: pair.rows(t, 4).square().sum(), lambda t: pair.sum(t, 4)):
        x, weight, y, _ = pair.leaves()
        ours = torch.autograd.grad(run([x, weight, y, weight]), (x, weight, y))
        first, second = weight.detach().requires_grad_(), weight.detach().clone().requires_grad_()
        apart = torch.autograd.grad(run([x, first, y, second]), (x, first, y, second))
        torch.testing.assert_close(ours[0], apart[0])
        torch.testing.assert_close(ours[1], apart[1] + apart[3])
        torch.testing.assert_close(ours[2], apart[2])


@pytest.mark.parametrize("accumulate", ["float32", "native"])
def test_bfloat16_weight_gradient_over_many_chunks(assert_as_good_as_eager, accumulate):
    pair = make_pair(rows=512, vocab=64, dtypes=(B16, B16))
    upstream = torch.tensor(0.7, dtype=F64)
    ours, eager, oracle = three(pair, lambda x: pair.sum(x, 8, accumulate), pair.eager_sum, upstream)
    if accumulate == "float32":
        assert_as_good_as_eager(ours, eager, oracle, strict=True)
    else:
        worse = (ours[2].double() - oracle[2]).norm() / oracle[2].norm()
        best = (graded(lambda x: pair.sum(x, 8), pair.leaves(), upstream)[2].double() - oracle[2]).norm()
        assert best / oracle[2].norm() < worse < 0.1


def test_float16_survives_small_row_weights_and_a_loss_scale(assert_as_good_as_eager):
    """Row weights 1/N underflow float16 until the loss scale arrives, which is in the backward."""
    pair = make_pair("kl", 0.0, rows=64, vocab=1009, dtypes=(F16, F16))
    pair.row_weight = torch.full((64,), 1e-6)
    upstream = torch.tensor(65536.0, dtype=F64)
    assert_as_good_as_eager(*three(pair, lambda x: pair.sum(x, 16), pair.eager_sum, upstream))


def test_any_strides():
    pair = make_pair(bias=True, row_weight=True)
    expected = graded(lambda leaves: pair.sum(leaves, 4), pair.leaves(), torch.tensor(1.3))
    strided = [t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(3)[::3] for t in pair.tensors]
    assert not any(t.is_contiguous() for t in strided)
    pair.row_weight = pair.row_weight.double().repeat_interleave(2)[::2]
    ours = graded(lambda leaves: pair.sum(leaves, 4), [t.detach().requires_grad_() for t in strided], torch.tensor(1.3))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_two_backwards_and_in_place_changes_of_the_result():
    pair = make_pair(row_weight=True)
    for run, upstream in ((pair.sum, torch.tensor(1.5)), (pair.rows, torch.randn(11))):
        leaves = pair.leaves()
        value = run(leaves, 4)
        value += 1.0
        first = torch.autograd.grad(value, leaves, upstream, retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(value, leaves, -2 * upstream)
        for a, b, c in zip(first, kept, second, strict=True):
            assert torch.equal(a, b) and torch.equal(c, -2 * a)


def test_double_backward_raises():
    pair = make_pair()
    for run in (pair.rows, pair.sum):
        leaves = pair.leaves()
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(run(leaves, 4).sum(), leaves, create_graph=True)


def test_bitwise_repeatable():
    pair = make_pair(rows=64, vocab=1009, dtypes=(B16, F32), row_weight=True)
    runs = [graded(lambda leaves: pair.sum(leaves, 16), pair.leaves(), torch.tensor(1.3)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_bad_arguments():
    pair = make_pair()
    t, how = pair.tensors, pair.how()
    rows, plain = torch.randn(11, 127), ("logits", "identity", 1.0, 1.0)

    def call(tensors=t, name=how[0], k=how[1], p=how[3:7], q=how[7:], chunk_rows=4, accumulate="float32"):
        return OPS.divergence(*tensors, name, k, False, *p, *q, chunk_rows, accumulate)

    for error, match, wrong in (
        (ValueError, "must be one of", {"name": "wasserstein"}),
        (ValueError, r"beta of jsd must be in \(0, 1\), got 1.0", {"k": 1.0}),
        (ValueError, "there is none", {"name": "tvd", "k": 0.5}),
        (ValueError, "p_form", {"p": ("odds", *plain[1:])}),
        (ValueError, "takes no weight", {"q": ("probs", *plain[1:])}),
        (ValueError, "no squash", {"tensors": [rows, None, None, *t[3:]], "p": ("probs", "identity", 1.0, 2.0)}),
        (ValueError, "squash must be", {"p": ("logits", "cube", 1.0, 1.0)}),
        (ValueError, "as many rows", {"tensors": [t[0][1:], *t[1:]]}),
        (ValueError, "as many classes", {"tensors": [t[0], t[1][1:], t[2][1:], *t[3:]]}),
        (ValueError, "p_bias needs", {"tensors": [rows, None, t[2], *t[3:]]}),
        (ValueError, r"must be \[N, V\]", {"tensors": [rows[0], None, None, *t[3:]]}),
        (TypeError, "float tensor", {"tensors": [rows.long(), None, None, *t[3:]]}),
        (TypeError, "one dtype", {"tensors": [t[0].double(), *t[1:]]}),
        (ValueError, "accumulate", {"accumulate": "double"}),
        (ValueError, "chunk_rows", {"chunk_rows": 0}),
    ):
        with pytest.raises(error, match=match):
            call(**wrong)
    with pytest.raises(ValueError, match="row_weight must be"):
        OPS.divergence_sum(*t, torch.ones(3), *how, 4, "float32")
