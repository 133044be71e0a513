"""Rows that a mask picks: how many they are is known when the graph runs, and may be none at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.capture import Capture, operators
from tests.forms.form import largest, stepped
from tests.head.spellings import VOCAB
from tests.oracle import assert_as_eager
from tests.rewrite.row_wise import row_args


@pytest.fixture(autouse=True)
def unbacked():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def kl(x, w, t):
    return F.kl_div(F.linear(x, w).log_softmax(-1), t.softmax(-1), reduction="none")


def over_the_rows_left(x, w, t, m):
    picked = kl(x, w, t)[m != 0]
    return picked.sum() / picked.size(0)


def teacher_picked_too(x, w, xT, wT, m):
    keep = m != 0
    student, teacher = F.linear(x, w)[keep], F.linear(xT, wT)[keep]
    return (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1)


def picked_twice(x, w, t, m, y):
    keep = m != 0
    later = y[keep] != -100
    return kl(x, w, t)[keep][later].sum(-1).square()


def by_numbers(x, w, t, m):
    return kl(x, w, t)[m.nonzero(as_tuple=True)].sum(-1)


def by_flat_numbers(x1, w, t1, m1):
    return kl(x1, w, t1).index_select(0, m1.nonzero().squeeze(1)).sum(-1)


def class_of_each(x, w, c, m):
    keep = m != 0
    p = F.linear(x, w).softmax(-1).square()
    return p[keep, c[keep]]


def picked_log_probs(log_probs, c, keep):
    return log_probs[keep].gather(-1, c[keep][:, None]).squeeze(-1)


def of_two_indices(log_probs, c, keep):
    return log_probs[keep, c[keep]]


def cross_entropy(logits, c, keep):
    return F.cross_entropy(logits[keep], c[keep])


def picked_logits(logits, c, keep):
    return logits[keep].log_softmax(-1).gather(-1, c[keep][:, None])


def one_is_written_to(x1, w, t1, m1):
    keep = m1 != 0
    picked = kl(x1.detach(), w.detach(), t1)[keep]
    keep.zero_()
    return picked.sum() + keep.sum()


def of_a_constant(x, w, t):
    return kl(x, w, t)[:, torch.arange(x.shape[1]) < 3].sum((0, 2))


BY_ROWS = {
    "divergence": lambda x, w, t, m: kl(x, w, t)[m != 0].sum() / (m != 0).sum(),
    "mean": lambda x, w, t, m: kl(x, w, t)[m != 0].mean(),
    "mean of rows": lambda x, w, t, m: kl(x, w, t)[m != 0].sum(-1).mean(),
    "over the rows left": over_the_rows_left,
    "flat mask": lambda x, w, t, m: kl(x, w, t).view(-1, VOCAB)[m.view(-1) != 0].sum(-1).square(),
    "sequences": lambda x, w, t, m: kl(x, w, t)[m[:, 1] != 0].sum(-1),
    "positions": lambda x, w, t, m: kl(x, w, t)[:, m[1] != 0].sum((0, 2)),
    "positions, classes first": lambda x, w, t, m: kl(x, w, t).mT[:, :, m[1] != 0].sum(1),
    "hidden dims added": lambda x, w, t, m: kl(x, w, t)[m != 0, None].sum(-1),
    "teacher picked too": teacher_picked_too,
    "smoothed": lambda x, w, y, m: F.cross_entropy(F.linear(x, w)[m != 0], y[m != 0], label_smoothing=0.1),
    "picked twice": picked_twice,
    "by numbers": by_numbers,
    "by flat numbers": by_flat_numbers,
    "class of each": class_of_each,
    "the mask is written to": one_is_written_to,
    "constant mask": of_a_constant,
    "entropy beside": lambda x, w, t, m: (
        kl(x, w, t)[m != 0].sum(),
        F.linear(x, w).softmax(-1)[m != 0].square().sum(-1),
    ),
    "draft vocabulary": lambda x, w, t, cw: (
        -(t[..., cw > 0.7].softmax(-1) * F.linear(x, w)[..., cw > 0.7].log_softmax(-1)).sum(-1).mean()
    ),
}
KERNELS = {
    "of one mask": lambda x, w, c, m: cross_entropy(F.linear(x, w), c, m != 0),
    "cross entropy": lambda x, w, y, m: F.cross_entropy(F.linear(x, w)[m != 0], y[m != 0]),
    "cross entropy, sum over a count": lambda x1, w, y1, m1: (
        F.cross_entropy(F.linear(x1, w)[m1 != 0], y1[m1 != 0], reduction="sum") / (m1 != 0).sum()
    ),
    "logits": lambda x, w, c, m: picked_logits(F.linear(x, w), c, m != 0),
    "log-probs": lambda x, w, c, m: picked_log_probs(F.linear(x, w).log_softmax(-1), c, m != 0),
    "log-probs of two indices": lambda x, w, c, m: of_two_indices(F.linear(x, w).log_softmax(-1), c, m != 0).mean(),
    "log-probs, then the mask": lambda x, w, c, m: F.linear(x, w).log_softmax(-1).gather(-1, c[..., None])[m != 0],
    "log-probs of all, then the mask": lambda x, w, c, m: (
        F.linear(x, w).log_softmax(-1).gather(-1, c[..., None]).squeeze(-1)[m != 0].sum() / 7
    ),
}
CASES = {f"rows: {name}": fn for name, fn in BY_ROWS.items()} | {f"kernels: {k}": fn for k, fn in KERNELS.items()}
every = pytest.mark.parametrize("name", CASES)


def check_fused(capture: Capture, name: str) -> None:
    assert capture.codes == [], str(capture.report)
    # what goes by rows where it is no divergence
    assert {h.details["executor"] for h in capture.report.fused} <= {name.split(":")[0], "kernels"}


@every
def test_fused_and_right(name: str) -> None:
    fn, capture = CASES[name], Capture(chunk_rows=3)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    check_fused(capture, name)


@every
@pytest.mark.parametrize("number", [0.0, 1.0])
def test_no_row_and_all_rows(name: str, number: float) -> None:
    fn, capture = CASES[name], Capture(chunk_rows=3)
    args = row_args(fn)
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    args = [torch.full_like(a, number) if n in ("m", "m1") else a for n, a in zip(names, args, strict=True)]
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, args)
    check_fused(capture, name)


@every
def test_symbolic_shapes(name: str) -> None:
    fn, capture = CASES[name], Capture(chunk_rows=4)
    compiled = capture.compile(fn, fullgraph=True, dynamic=True)
    assert_as_eager(compiled, fn, row_args(fn))
    assert_as_eager(compiled, fn, row_args(fn, rows=(3, 8)))
    check_fused(capture, name)
    assert len(capture.after) == 1


@pytest.mark.parametrize(
    "name", ["rows: divergence", "rows: over the rows left", "rows: mean of rows", "kernels: of one mask"]
)
def test_with_inductor(name: str) -> None:
    fn = CASES[name]
    compiled = torch.compile(fn, backend="fuse_losses", fullgraph=True, options={"fuse_losses.min_vocab": 1})
    for number in (None, 0.0):
        args = row_args(fn)
        if number is not None:
            args[-1] = torch.full_like(args[-1], number)
        assert_as_eager(compiled, fn, args)
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1}


def test_the_size_of_what_is_picked_keeps_no_logits_alive() -> None:
    capture = Capture()
    capture.compile(over_the_rows_left)(*row_args(over_the_rows_left))
    made = capture.after[0].graph
    assert operators(capture.after[0]) == ["divergence_sum"]
    assert not made.find_nodes(op="call_function", target=F.linear)
    assert len(made.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)) == 1


def test_nothing_as_large_as_the_logits() -> None:
    rows, vocab, hidden = (4, 64), 512, 16
    args = [torch.randn(*rows, hidden, requires_grad=True), torch.randn(vocab, hidden, requires_grad=True)]
    args += [torch.randint(0, vocab, rows), torch.rand(rows).round()]

    def fn(x, w, y, m):
        return F.cross_entropy(F.linear(x, w)[m != 0], y[m != 0], label_smoothing=0.1)

    compiled = Capture(chunk_rows=16).compile(fn)
    stepped(compiled, args)()
    assert largest(stepped(compiled, args))[0] <= rows[0] * rows[1] * vocab


# ------------------------------------------------------------------------------------------------------- near misses


def mask_from_the_logits(x, w, c):
    z = F.linear(x, w)
    return z.log_softmax(-1)[z.argmax(-1) != c].square().sum(-1)


def mask_of_classes(x1, w, t1):
    return F.linear(x1, w).log_softmax(-1)[t1 > 0.5].square().sum()


def other_rows_in_return(x, w, t, m):
    """As many rows, but not the same ones: their differences mix rows of one choice with rows of another."""
    p = F.linear(x, w).softmax(-1)
    return (p[m != 0] - p[m != 0].flip(0).mean(0)).square().sum(-1)


def rows_written_back(x1, w, m1):
    z = F.linear(x1, w).log_softmax(-1).clone()
    z[m1 != 0] = z[m1 != 0].cumsum(0)
    return z.square().sum(-1)


@pytest.mark.parametrize("fn", [mask_from_the_logits, mask_of_classes, other_rows_in_return, rows_written_back])
def test_declined_and_right(fn) -> None:
    capture = Capture(chunk_rows=3)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert capture.codes and set(capture.codes) <= {"rows_mix", "wrong_axis"}, str(capture.report)
    assert not capture.report.fused
    assert capture.after == capture.before
