"""One of the two distributions of a paired kernel."""

from typing import NamedTuple

from torch import Tensor

from fuse_losses.kernels.squash import Squash

FORMS = ("logits", "log_probs", "probs")


class Side(NamedTuple):
    """Rows [C, V] in one of `FORMS`: raw products that `squash` turns into logits, or the distribution itself."""

    values: Tensor
    form: str
    squash: Squash
