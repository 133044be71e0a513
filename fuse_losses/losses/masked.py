"""A divergence without the classes that are -inf on either side: what `masked_fill(isinf(logits), 0)` makes of it."""

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

from fuse_losses.losses import scalar as m
from fuse_losses.losses.divergence import Divergence


def masked(page: Divergence) -> Divergence:
    """The page over functions that see no probability on either side of such a class."""
    return replace(
        page,
        phi=_over(phi, page.phi),
        phi1=_over(derivative, page.phi1),
        phi2=_over(derivative, page.phi2),
        slope1=_over(phi, page.slope1),
        slope2=_over(phi, page.slope2),
    )


def _over(template: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`template` with `page_function` for the function: as written below, so that Triton can read it too."""
    assert isinstance(template, FunctionType)
    namespace = {**template.__globals__, "page_function": function}
    return FunctionType(template.__code__, namespace, template.__name__, template.__defaults__)


def page_function(p, q, lp, lq, k, centred=0.0):
    """Stands for a function of a page."""
    raise NotImplementedError


def phi(p, q, lp, lq, k):
    gone = (lp == float("-inf")) | (lq == float("-inf"))
    possible_p, possible_q = m.where(gone, 0.0, p), m.where(gone, 0.0, q)
    return page_function(possible_p, possible_q, m.where(gone, float("-inf"), lp), m.where(gone, float("-inf"), lq), k)


def derivative(p, q, lp, lq, k, centred=0.0):
    # never centred: the multiple of p that a softmax does not see would have to hold for classes that are gone, too
    gone = (lp == float("-inf")) | (lq == float("-inf"))
    possible_p, possible_q = m.where(gone, 0.0, p), m.where(gone, 0.0, q)
    return page_function(
        possible_p, possible_q, m.where(gone, float("-inf"), lp), m.where(gone, float("-inf"), lq), k, 0.0
    )
