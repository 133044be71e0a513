"""A function of two log-probabilities is found out by its values and slopes, and only where it is that function."""

from __future__ import annotations

import pytest
import torch

from fuse_losses.head.identify import Match, holds_beyond, identify
from fuse_losses.losses import DIVERGENCES

PAGES = [(name, k) for name, page in DIVERGENCES.items() for k in {page.default, *((0.2,) if page.parameter else ())}]


@pytest.mark.parametrize(("name", "k"), PAGES)
@pytest.mark.parametrize("factor", [1.0, -0.37, 4.0])
def test_every_page_is_itself(name: str, k: float, factor: float) -> None:
    page = DIVERGENCES[name]
    found = identify(lambda lp, lq: factor * page.reference(lp[:, None], lq[:, None], k), [k])
    assert found is not None
    assert (found.name, found.masked, found.slopes) == (name, False, (True, True))
    assert (found.parameter, found.factor) == pytest.approx((k, factor), rel=1e-6)


def test_a_weight_is_found_in_the_constants() -> None:
    def jsd(lp, lq):  # as in log space, with the logarithms of float32 numbers
        mixed = torch.logaddexp(lp + float(torch.tensor(0.7).log()), lq + float(torch.tensor(0.3).log()))
        return 0.3 * lq.exp() * (lq - mixed) + 0.7 * lp.exp() * (lp - mixed)

    constants = [float(torch.tensor(0.7).log()), float(torch.tensor(0.3).log()), 0.3, 0.7]
    found = identify(jsd, constants)
    assert found is not None and found.name == "jsd"
    assert found.parameter == pytest.approx(0.3, abs=1e-6)
    assert identify(jsd, []) is None


def test_a_side_without_slope() -> None:
    found = identify(
        lambda lp, lq: (lq.exp() * (lq - lp)) if lq is None else lq.detach().exp() * (lq.detach() - lp), []
    )
    assert found == Match("kl", 0.0, 1.0, False, (True, False))


def test_classes_at_minus_infinity_may_be_left_out() -> None:
    def masked(lp, lq):
        return (-lq.exp() * lp).masked_fill(lp.isinf(), 0.0)

    assert identify(masked, []) == Match("soft_cross_entropy", 0.0, 1.0, True, (True, True))


NEARLY = {
    "an epsilon": lambda lp, lq: lq.exp() * (lq - (lp.exp() + 1e-8).log()),
    "a tiny epsilon": lambda lp, lq: lq.exp() * ((lq.exp() + 1e-20).log() - lp),
    "a clamp": lambda lp, lq: lq.exp() * (lq - lp.clamp(min=-50)),
    "a power": lambda lp, lq: 0.5 * (lp.exp() - lq.exp()).abs() ** 1.001,
    "a slope at ties": lambda lp, lq: 0.5 * torch.where(lp >= lq, lp.exp() - lq.exp(), lq.exp() - lp.exp()),
    "half a slope": lambda lp, lq: lp.exp().detach() * (lp - lq),
    "something at -inf": lambda lp, lq: (lq.exp() * (lq - lp)).masked_fill(lp.isinf(), 1.0),
    "zero": lambda lp, lq: 0.0 * lp * lq,
    "one side alone": lambda lp, lq: -lp.exp() * lp,
}


@pytest.mark.parametrize("f", NEARLY.values(), ids=NEARLY)
def test_near_misses(f) -> None:
    assert identify(f, [1e-8, 1e-20, 50.0, 0.5, 1.001]) is None


def test_given_values_may_be_anything() -> None:
    def distance(lp, lq):
        return (lp.exp().real - lq.exp().real).abs() if lp.is_complex() else (lp.exp() - lq.exp()).abs()

    def of_positive_part(lp, lq):
        p, q = (x.exp().real if x.is_complex() else x.exp() for x in (lp, lq))
        return (p.clamp(min=0) - q).abs()

    for f, holds in ((distance, True), (of_positive_part, False)):
        match = identify(f, [])
        assert match is not None and match.factor == pytest.approx(2.0)
        assert holds_beyond(match, f, ("probs", "probs")) is holds
        assert holds_beyond(match, f, ("logits", "logits"))
