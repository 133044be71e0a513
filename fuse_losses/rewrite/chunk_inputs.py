"""What a chunk's graph reads: tensors that are cut into chunks of rows, and tensors that every chunk reads whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from fuse_losses.graph.products import Product
from fuse_losses.head.algebra import RowStep
from fuse_losses.head.sizes import sizes

Steps = tuple[RowStep, ...]


@dataclass(frozen=True)
class RowInput:
    """A tensor cut into chunks: the hidden states of a product, or a plain ATen value laid out as [N, inner...].

    labels and shape: those of the value that it is combined with, aligned at the last dim; steps: views of the rows.
    """

    source: Product | fx.Node
    steps: Steps
    labels: str = ""
    shape: tuple[Any, ...] = ()

    @property
    def key(self) -> Any:
        return (self.source, self.steps, self.labels, len(self.shape))

    @property
    def held(self) -> tuple[Any, ...]:
        """The dtype and the sizes of a row of a plain value."""
        own = sizes(self.source)
        own = (*[1] * (len(self.shape) - len(own)), *own)
        rest = [s for s, label in zip(own, self.labels, strict=True) if label != "r"]
        return (cast(fx.Node, self.source).meta["val"].dtype, *rest)


@dataclass(frozen=True)
class WholeInput:
    """A tensor that every chunk reads whole: a product's weight or bias, a vector over the vocabulary, a number.

    squeezed: dims of size one that stand where rows are, dropped inside.
    """

    source: Product | fx.Node
    part: str = ""
    squeezed: tuple[int, ...] = ()
