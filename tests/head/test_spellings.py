"""Every spelling is fused, says what it is, and is as right as eager: values, gradients, dtypes, shapes."""

import pytest
import torch
import torch.nn.functional as F

from tests.capture import Capture
from tests.head.spellings import SPELLINGS, Spelling, tensors
from tests.oracle import assert_as_eager

BY_NAME = {s.name: s for s in SPELLINGS}
# spellings whose rounding differs, or whose sizes do: run in bfloat16, and with symbolic shapes
ROUNDED = [
    *(s for s in SPELLINGS if s.name.startswith("transforms: ")),
    *map(
        BY_NAME.__getitem__,
        [
            "cross entropy: defaults",
            "cross entropy: sum",
            "cross entropy: none",
            "log-probs: gather",
            "log-probs: F.log_softmax in float32",
            "log-probs: gather less logsumexp",
            "log-probs: z loss",
            "views: labels padded",
            "products: einsum hv",
            "products: addmm",
        ],
    ),
]
DYNAMIC = [
    s
    for s in SPELLINGS
    if s.name
    in {
        "cross entropy: defaults",
        "cross entropy: over a count",
        "cross entropy: none",
        "log-probs: gather",
        "log-probs: arange of len",
        "log-probs: cross entropy, none, negated",
        "log-probs: z loss",
        "transforms: softcap",
        "transforms: bias [1, V]",
        "views: view(-1, size)",
        "views: flatten",
        "views: transpose(1, 2)",
        "views: logits[..., :-1, :]",
        "views: labels padded",
        "views: last rows",
        "views: hidden sliced",
        "views: rows rolled",
        "views: a position of each sequence",
        "products: einsum hv",
        "products: matmul of w.T",
    }
]
INDUCTOR = [
    BY_NAME[name]
    for name in (
        "cross entropy: module in forward",
        "cross entropy: none",
        "log-probs: gather",
        "log-probs: arange index",
        "log-probs: z loss",
        "transforms: softcap",
        "views: labels padded",
        "products: einsum to classes in dim 1",
    )
]
name_of = lambda s: s.name  # noqa: E731


def assert_fused(capture: Capture, spelling: Spelling) -> None:
    assert capture.codes == [], str(capture.report)
    assert capture.summaries == [f"linear + {spelling.summary}"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=name_of)
def test_float32(spelling: Spelling) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(spelling.fn, fullgraph=True), spelling.fn, spelling.args())
    assert_fused(capture, spelling)


@pytest.mark.parametrize("spelling", ROUNDED, ids=name_of)
def test_bfloat16(spelling: Spelling) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(spelling.fn, fullgraph=True), spelling.fn, spelling.args(torch.bfloat16))
    assert_fused(capture, spelling)


@pytest.mark.parametrize("spelling", DYNAMIC, ids=name_of)
def test_symbolic_shapes(spelling: Spelling) -> None:
    capture = Capture()
    compiled = capture.compile(spelling.fn, fullgraph=True, dynamic=True)
    for rows in ((2, 5), (3, 8), (4, 7)):
        assert_as_eager(compiled, spelling.fn, spelling.args(rows=rows))
    assert_fused(capture, spelling)  # one graph for the three


@pytest.mark.parametrize("spelling", INDUCTOR, ids=name_of)
def test_with_inductor(spelling: Spelling) -> None:
    compiled = torch.compile(spelling.fn, backend="fuse_losses", fullgraph=True, options={"fuse_losses.min_vocab": 1})
    assert_as_eager(compiled, spelling.fn, spelling.args())
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1}


def test_all_ignored_mean_is_nan_and_has_no_gradient() -> None:
    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w), torch.full_like(y1, -100))

    capture = Capture()
    spelling = Spelling("all ignored", fn, "cross entropy (mean)")
    assert_as_eager(capture.compile(fn), fn, spelling.args())
    assert_fused(capture, spelling)


@pytest.mark.parametrize("name", ["views: transpose(1, 2)", "views: rows swapped", "log-probs: gather"])
def test_the_vocabulary_is_followed_by_its_dim_not_by_its_size(name: str) -> None:
    """Rows, hidden and vocabulary of one size."""
    size = 5

    def args():
        x, w = torch.randn(size, size, size), torch.randn(size, size)
        return [x.requires_grad_(), w.requires_grad_(), torch.randint(0, size, (size, size))]

    fns = {
        "views: transpose(1, 2)": lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(1, 2), y),
        "views: rows swapped": lambda x, w, y: F.cross_entropy(
            F.linear(x, w).transpose(0, 1).reshape(-1, size), y.t().flatten()
        ),
        "log-probs: gather": lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c[..., None]),
    }
    capture = Capture()
    assert_as_eager(capture.compile(fns[name]), fns[name], args())
    assert len(capture.report.fused) == 1, str(capture.report)


def test_a_target_out_of_range_raises_as_in_eager() -> None:
    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w), y1)

    named = tensors()
    args = [named["x1"], named["w"], named["y1"].clone().fill_(37)]
    with pytest.raises(IndexError):
        fn(*args)
    with pytest.raises(IndexError, match="Target 37 is out of bounds"):
        Capture().compile(fn)(*args)


def test_large_logits() -> None:
    """The log-prob of a confident row is not the difference of two large numbers."""

    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w) * 1000, y1, reduction="none")

    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, Spelling("large", fn, "").args())
    assert len(capture.report.fused) == 1


def test_infinite_logits() -> None:
    """A bias of -inf takes a class away, as sampling code does."""

    def fn(x1, w, b, c1):
        return F.cross_entropy(F.linear(x1, w, b), c1 % 30)

    args = Spelling("infinite", fn, "").args()
    with torch.no_grad():
        args[2][30:] = float("-inf")
    args[2].requires_grad_(False)
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, args)
    assert len(capture.report.fused) == 1
