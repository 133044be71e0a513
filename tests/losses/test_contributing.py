"""The page that CONTRIBUTING.md adds is taken at its word: listed, it passes the tests of pages and operators."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fuse_losses.losses import DIVERGENCES
from tests.capture import Capture, operators
from tests.losses import test_pages as pages
from tests.losses.pages import parameters
from tests.ops.pair import graded, make_pair
from tests.oracle import assert_as_eager

ROOT = Path(__file__).parents[2]

IN_THE_INTERPRETER = """
import sys
import torch
import alpha
from fuse_losses.kernels.side import Side
from fuse_losses.kernels.squash import Squash
from fuse_losses.kernels.chunked import paired as in_torch
from fuse_losses.kernels.triton import paired as in_triton

torch.manual_seed(0)
p, q = (Side(torch.randn(3, 70), "logits", Squash("identity", 1.0, 1.0)) for _ in range(2))
results = []
for kernels in (in_torch, in_triton):
    d, out = torch.empty(3), torch.empty(2, 3, 70)
    kernels.paired_fwd_bwd(p, q, alpha.ALPHA, 0.3, torch.tensor([0.5, 0.0, 2.0]), d, out[0], out[1])
    results.append((d, out))
torch.testing.assert_close(*results)
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The example, in a file as pages are, on the list."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text[text.index("## Adding a divergence") :]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    file = tmp_path / "alpha.py"
    file.write_text(code, "utf-8")
    spec = importlib.util.spec_from_file_location("alpha", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(DIVERGENCES, "alpha", module.ALPHA)
    return module.ALPHA


def test_it_is_a_page(page):
    pages.test_names_and_parameters("alpha")
    for k in parameters(page):
        pages.test_spellings_and_phi_are_the_reference("alpha", k)
        pages.test_derivatives("alpha", k)
        pages.test_no_nan_where_a_probability_is_zero("alpha", k)
        pages.test_nan_is_not_hidden("alpha", k)
        for dtype in (torch.float32, torch.float64):
            pages.test_equal_distributions_give_exact_multiples("alpha", k, dtype)
        for distance in (1e-4, 1e-2, 1.0):
            pages.test_terms_keep_their_digits("alpha", k, distance)


def test_the_operators_run_it(page):
    pair = make_pair("alpha", 0.3, dtypes=(torch.float64, torch.float64), row_weight=True)
    upstream = torch.randn((), dtype=torch.float64)
    ours = graded(lambda leaves: pair.sum(leaves, 4), pair.leaves(), upstream)
    for a, b in zip(ours, graded(pair.eager_sum, pair.leaves(), upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_recognised(page):
    """In a user's own words, as they sum to what the page does, term by term different."""
    k = 0.3

    def fn(x, w, y, v):
        p, q = F.linear(x, w).softmax(-1), F.linear(y, v).softmax(-1)
        return (p - q**k * p ** (1 - k)).sum(-1) / (k * (1 - k))

    capture = Capture()
    args = [torch.randn(6, 8), torch.randn(40, 8), torch.randn(6, 5), torch.randn(40, 5)]
    assert_as_eager(capture.compile(fn), fn, [a.requires_grad_(i < 2) for i, a in enumerate(args)])
    assert "divergence" in operators(capture.after[0]), str(capture.report)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_runs_it(page, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", IN_THE_INTERPRETER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
