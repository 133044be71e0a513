"""Every form of the table is computed as eager computes it, and becomes what the table says."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.capture import Capture
from tests.forms import contexts, cross_entropy, log_probs, training  # noqa: F401  fill the table
from tests.forms.form import FORMS, Form, assert_as_eager, largest, outcome_of, stepped


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
    assert outcome_of(capture) == form.outcome, str(capture.report)
    if form.graphs is not None:
        assert len(capture.before) == form.graphs
