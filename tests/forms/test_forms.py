"""Every form of the table is computed as eager computes it, and becomes what the table says."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from tests.capture import Capture
from tests.forms import contexts, cross_entropy, distillation, log_probs, training  # noqa: F401  fill the table
from tests.forms.form import FORMS, Form, H, V, assert_as_eager, assert_outcome, largest, stepped, with_parameters
from tests.oracle import assert_close_to_oracle, run, run64


def marked(form: Form):
    marks = [pytest.mark.xfail(strict=True, reason=form.missing)] if form.missing else []
    return pytest.param(form, id=str(form), marks=marks)


@contextlib.contextmanager
def captured(form: Form):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=form.unbacked):
        yield


@pytest.mark.parametrize("form", [marked(f) for f in FORMS])
def test_form(form: Form) -> None:
    capture = Capture(**{"chunk_rows": 8, "min_vocab": 100, **form.options})
    fn, args = form.build()
    with captured(form):
        assert_as_eager(form.compile(capture, fn), fn, args)
    assert_outcome(capture, form)
    if form.graphs is not None:
        assert len(capture.before) == form.graphs


CHUNKED = {"eight chunks by hand, summed", "eight chunks by hand, in place, smoothed"}


@pytest.mark.parametrize("form", [pytest.param(f, id=str(f)) for f in FORMS if f.what in CHUNKED])
def test_chunks_by_hand_do_not_live_at_once(form: Form) -> None:
    """A chunk is an eighth of the logits; with what its backward keeps, three of them are alive at most."""
    fn, _ = form.build()
    x1, w = torch.randn(512, 16, requires_grad=True), torch.randn(2048, 16, requires_grad=True)
    args = [x1, w, torch.randint(0, 2048, (512,))]
    capture = Capture(chunk_rows=64)
    compiled = form.compile(capture, fn)
    assert_as_eager(compiled, fn, args)
    whole = 512 * 2048 * 4
    biggest, peak = largest(stepped(compiled, args))
    assert biggest <= whole / 8
    assert peak <= whole / 2
    assert largest(stepped(fn, args))[1] > whole  # eager keeps all of them


LEAN_IDS = ("C11", "C15", "C21", "L1", "L8", "D1", "D2", "D6")  # not D5: some teachers there are given
LEAN = [f for f in FORMS if f.outcome in ("kernels", "rows", "fused") and not f.missing and f.id in LEAN_IDS]


@pytest.mark.parametrize("form", [pytest.param(f, id=str(f)) for f in LEAN])
def test_nothing_as_large_as_the_logits(form: Form) -> None:
    rows = (4, 64)
    fn, args = form.build(rows)
    capture = Capture(chunk_rows=16, min_vocab=100)
    compiled = form.compile(capture, fn)
    stepped(compiled, args)()
    itemsize = 2 if form.dtype is torch.bfloat16 else 4
    biggest, _ = largest(stepped(compiled, args))
    assert biggest <= max(rows[0] * rows[1] * V * itemsize // 4, 3 * V * H * 4)


DYNAMIC = [
    f
    for f in FORMS
    if f.id in {"C1", "C9", "C15", "C16", "C17", "L3", "L4", "L6", "L7", "D3"}
    and not f.how
    and f.what != "log_softmax, indexed"  # where labels and rows have two symbols, they may be fewer
]


@pytest.mark.parametrize("form", [pytest.param(f, id=str(f)) for f in DYNAMIC])
def test_several_shapes(form: Form) -> None:
    """Fused in every graph, and no more graphs than Dynamo makes by itself."""
    shapes, alone = ((2, 16), (2, 24), (2, 31)), Capture(min_vocab=10**6)
    capture = Capture(chunk_rows=8, min_vocab=100)
    fn, _ = form.build()
    compiled = capture.compile(fn, fullgraph=True, dynamic=True)
    for rows in shapes:
        assert_as_eager(compiled, fn, form.build(rows)[1])
    assert_outcome(capture, form)
    torch._dynamo.reset()
    unfused = alone.compile(fn, fullgraph=True, dynamic=True)
    for rows in shapes:
        unfused(*form.build(rows)[1])
    assert len(capture.before) == len(alone.before)


@pytest.mark.parametrize("what", ["Hugging Face, mean, logits returned", "label_smoothing=", "shifted by a slice"])
def test_autocast_of_the_caller(what: str) -> None:
    form = next(f for f in FORMS if what in f.what)
    fn, args = form.build()
    capture = Capture(chunk_rows=8, min_vocab=100)
    compiled = form.compile(capture, fn)

    def around(inner):
        def call(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return inner(*args)

        return call

    eager = with_parameters(run, fn, around(fn), args)
    ours = with_parameters(run, fn, around(compiled), args)
    exact = copy.deepcopy(fn).double() if isinstance(fn, torch.nn.Module) else fn
    oracle = with_parameters(run64, exact, exact, args, eager)
    assert_close_to_oracle(ours, eager, oracle, computed_in=torch.bfloat16)
    assert_outcome(capture, form)
