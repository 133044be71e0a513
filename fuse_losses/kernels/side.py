"""One of the two distributions of a paired kernel."""

from typing import NamedTuple

from torch import Tensor

from fuse_losses.kernels.squash import Squash

FORMS = ("logits", "log_probs", "probs")


class Side(NamedTuple):
    """Rows [C, V] in one of `FORMS`: raw products that `squash` turns into logits, or the distribution itself.

    scratch: a float32 chunk that is the loop's own, and that a kernel which makes gradients may overwrite.
    """

    values: Tensor
    form: str
    squash: Squash
    scratch: bool = False
