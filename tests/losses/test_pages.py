"""What a page says of a divergence holds together: functions, reference, spellings, parameter."""

from __future__ import annotations

import math

import pytest
import torch

from fuse_losses.losses import DIVERGENCES
from fuse_losses.losses.divergence import Divergence
from tests.losses.pages import CASES


def log_probs(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (2 * torch.randn(*shape, dtype=dtype)).log_softmax(-1)


def row(lp, lq, k):
    return lp.exp(), lq.exp(), lp, lq, k


@pytest.mark.parametrize("name", DIVERGENCES)
def test_names_and_parameters(name: str) -> None:
    page = DIVERGENCES[name]
    assert page.name == name and page.formula and page.spellings
    page.check(page.default)
    outside = [page.valid.low - 1e-6, page.valid.high + 1e-6, math.nan, math.inf]
    outside += [page.valid.low] * (page.valid.ends[0] == "(") + [page.valid.high] * (page.valid.ends[1] == ")")
    for k in outside:
        with pytest.raises(ValueError, match=name):
            page.check(k)


@pytest.mark.parametrize("name, k", CASES)
def test_spellings_and_phi_are_the_reference(name: str, k: float) -> None:
    page = DIVERGENCES[name]
    student, teacher = 3 * torch.randn(2, 3, 5, 17, dtype=torch.float64)
    lp, lq = student.log_softmax(-1), teacher.log_softmax(-1)
    expected = page.reference(lp, lq, k)
    assert expected.shape == (3, 5)
    torch.testing.assert_close(page.phi(*row(lp, lq, k)).sum(-1), expected, rtol=1e-12, atol=1e-13)
    for spelling in page.spellings.values():
        torch.testing.assert_close(spelling(student, teacher, k), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name, k", CASES)
def test_derivatives(name: str, k: float) -> None:
    page = DIVERGENCES[name]
    lp, lq = log_probs(4, 9).requires_grad_(), log_probs(4, 9).requires_grad_()
    by_log_prob = torch.autograd.grad(page.phi(*row(lp, lq, k)).sum(), (lp, lq), allow_unused=True)
    p, q, lp, lq, k = row(lp.detach(), lq.detach(), k)
    for phi, slope, a, c, prob, expected in zip(
        (page.phi1, page.phi2), (page.slope1, page.slope2), page.scale(k), page.centre(k), (p, q), by_log_prob,
        strict=True,
    ):  # fmt: skip
        close = {"rtol": 1e-11, "atol": 1e-12}
        torch.testing.assert_close(a * phi(p, q, lp, lq, k), expected, **close)
        torch.testing.assert_close(a * slope(p, q, lp, lq, k), expected / prob, **close)
        torch.testing.assert_close(phi(p, q, lp, lq, k, 1.0), expected / a + c * prob, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name, k", CASES)
def test_equal_distributions_give_exact_multiples(name: str, k: float, dtype: torch.dtype) -> None:
    page = DIVERGENCES[name]
    lp = log_probs(4, 501, dtype=dtype)
    lp[:, ::3] = -math.inf
    p, *_ = equal = row(lp, lp, k)
    if name != "soft_cross_entropy":
        assert torch.equal(page.phi(*equal).abs(), torch.zeros_like(lp))
    for side, phi in enumerate((page.phi1, page.phi2)):
        if (name, side) != ("soft_cross_entropy", 1):  # for its teacher equality is nothing special
            value = phi(*equal, 1.0)
            assert any(torch.equal(value.abs(), abs(r) * p) and torch.equal(value, r * p) for r in (-1.0, 0.0, 1.0))


@pytest.mark.parametrize("name, k", CASES)
def test_no_nan_where_a_probability_is_zero(name: str, k: float) -> None:
    page = DIVERGENCES[name]
    none, some, deep = -math.inf, -1.5, -150.0  # the last is 0 in float32, and its logarithm is not
    lp = torch.tensor([none, none, some, none, deep, some, deep, deep])
    lq = torch.tensor([none, some, none, deep, none, deep, some, deep])
    for function in (page.phi, page.phi1, page.phi2, page.slope1, page.slope2):
        value = function(*row(lp, lq, k))
        assert not value.isnan().any(), (function.__name__, value)
    for function in (page.phi1, page.phi2):
        assert not function(*row(lp, lq, k), 1.0).isnan().any()
    contributions = page.phi(*row(lp, lq, k))
    assert contributions[0] == 0 and contributions[7] == 0
    if page.name in ("jsd", "tvd") or (k and page.name != "symmetric_kl"):  # bounded
        assert contributions.isfinite().all()


@pytest.mark.parametrize("name, k", CASES)
def test_nan_is_not_hidden(name: str, k: float) -> None:
    """The gradient need not show it: its sum over the row does not matter where the loss is NaN."""
    page = DIVERGENCES[name]
    lp, lq = torch.full((3,), math.nan), log_probs(3, dtype=torch.float32)
    assert page.phi(*row(lp, lq, k)).isnan().all() and page.phi(*row(lq, lp, k)).isnan().all()


@pytest.mark.parametrize("distance", [1e-4, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("name, k", [(name, k) for name, k in CASES if name in ("jsd", "kl", "reverse_kl") and k])
def test_terms_keep_their_digits(name: str, k: float, distance: float) -> None:
    """Differences of log-probabilities are exact to roundings, near and far: no difference of large numbers."""
    page: Divergence = DIVERGENCES[name]
    lp = log_probs(1, 1000, dtype=torch.float32)
    lq = lp + distance * torch.randn(1, 1000)
    for function in (page.phi, page.phi1, page.phi2):
        value = function(*row(lp, lq, k))
        exact = function(*row(lp.double(), lq.double(), k))
        # log p - log q is of the size of the distance, and so are its roundings: those of log p do not matter
        scale = exact.abs() + (lp.exp() + lq.exp()) * min(distance, 1.0)
        assert ((value - exact).abs() / scale).max() < 16 * 2**-24
