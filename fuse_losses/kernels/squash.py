"""The elementwise map from raw products to logits."""

from typing import NamedTuple


class Squash(NamedTuple):
    """`z = outer * f(inner * u)` for the function `f` called `name`.

    `identity` with `inner=1, outer=s` is a scale; `tanh` with `inner=1/c, outer=c` is a softcap.
    """

    name: str
    inner: float
    outer: float
