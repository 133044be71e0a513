"""Pages with the parameters that tests try: the default, both ends that are included, and one in between."""

from __future__ import annotations

from fuse_losses.losses import DIVERGENCES
from fuse_losses.losses.divergence import Divergence


def parameters(page: Divergence) -> list[float]:
    candidates = [page.default, page.valid.low, page.valid.high, 0.3]
    return sorted({k for k in candidates if k in page.valid})


CASES = [(name, k) for name, page in DIVERGENCES.items() for k in parameters(page)]
