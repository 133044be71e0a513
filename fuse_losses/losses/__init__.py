"""One page per divergence between two distributions. To add one, write its page and its line in `DIVERGENCES`."""

import functools

from fuse_losses.losses.divergence import Divergence
from fuse_losses.losses.jsd import JSD
from fuse_losses.losses.kl import KL
from fuse_losses.losses.masked import masked as masked_page
from fuse_losses.losses.reverse_kl import REVERSE_KL
from fuse_losses.losses.soft_cross_entropy import SOFT_CROSS_ENTROPY
from fuse_losses.losses.symmetric_kl import SYMMETRIC_KL
from fuse_losses.losses.tvd import TVD

DIVERGENCES: dict[str, Divergence] = {
    "kl": KL,
    "reverse_kl": REVERSE_KL,
    "soft_cross_entropy": SOFT_CROSS_ENTROPY,
    "symmetric_kl": SYMMETRIC_KL,
    "jsd": JSD,
    "tvd": TVD,
}


@functools.cache
def page(name: str, masked: bool = False) -> Divergence:
    """A page of `DIVERGENCES`; `masked`: with classes at -inf on either side left out."""
    return masked_page(DIVERGENCES[name]) if masked else DIVERGENCES[name]
