"""Exits that lifted into the algebra, over one distribution or two, written as the specialised operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph.products import Product, value
from fuse_losses.graph.rows import SUMS, Rowed
from fuse_losses.head.algebra import Divergence, Functional, Side, WeightedLoss
from fuse_losses.head.sizes import sizes
from fuse_losses.rewrite.chunk_inputs import RowInput, WholeInput
from fuse_losses.rewrite.indexed import IndexedWriter
from fuse_losses.rewrite.writer import SYM_SIZE

aten = torch.ops.aten
MEANS = (aten.mean.default, aten.mean.dim)


class KernelWriter(IndexedWriter):
    """Writes functionals: what IndexedWriter does, and divergences between two distributions."""

    def _functional(self, node: fx.Node, functional: Functional) -> fx.Node:
        if isinstance(functional, Divergence):
            return self._divergence(node, functional)
        if isinstance(functional, WeightedLoss) and isinstance(functional.per_row, Divergence):
            return self._weighted_divergence(node, functional, functional.per_row)
        return super()._functional(node, functional)

    def _divergence(self, node: fx.Node, found: Divergence) -> fx.Node:
        if found.summed and self.plan.gradients == "forward":
            made = self._sum(found, None, [])
            if node.target in MEANS:
                made = self.call(aten.div.Tensor, made, self.numel(sizes(node.args[0])))
            return self.call(aten.to.dtype, made, node.meta["val"].dtype)
        tensors, how = self._operands(found)
        made = self.call(torch.ops.fuse_losses.divergence.default, *tensors, *how)
        weight = self._row_weight(found, tensors[0])
        made = self._scaled(made if weight is None else self.call(aten.mul.Tensor, made, weight), found.factor)
        if node.target in SUMS and not isinstance(self.analysis.values[node], Rowed):
            return self.sum_of_rows(node, made)
        if found.summed:
            made = self.call(aten.sum.default, made)
        else:
            made = self.call(aten.reshape.default, made, self.shape(sizes(node)))
        return self.call(aten.to.dtype, made, node.meta["val"].dtype)

    def _weighted_divergence(self, node: fx.Node, loss: WeightedLoss, found: Divergence) -> fx.Node:
        weights = self._weights(loss)
        made = self._sum(replace(found, factor=1.0), weights.by_row, [self._kept(*m) for m in weights.masks])
        return self.call(aten.to.dtype, self._times(made, weights, found.factor), node.meta["val"].dtype)

    def _sum(self, found: Divergence, weight: fx.Node | None, kept: list[fx.Node]) -> fx.Node:
        """factor * the sum over rows of weight * the divergence; rows that are not kept count for nothing."""
        tensors, how = self._operands(found)
        own = self._row_weight(found, tensors[0])
        weights = [w for w in (own, weight) if w is not None]
        weight = None if not weights else self.call(aten.mul.Tensor, *weights) if len(weights) > 1 else weights[0]
        for keep in kept:
            weight = self._where_kept(keep, weight, self._statistics(found))
        made = self.call(torch.ops.fuse_losses.divergence_sum.default, *tensors, weight, *how)
        return self._scaled(made, found.factor)

    def _operands(self, found: Divergence) -> tuple[list[Any], tuple[Any, ...]]:
        """The operators' tensors, and what says how they are read."""
        sides = [self._side(side) for side in (found.p, found.q)]
        forms = [f for _, form in sides for f in form]
        how = (found.name, found.parameter, found.masked, *forms, self.plan.chunk_rows, self.plan.accumulate)
        return [t for tensors, _ in sides for t in tensors], how

    def _scaled(self, node: fx.Node, factor: float) -> fx.Node:
        return node if factor == 1.0 else self.call(aten.mul.Tensor, node, factor)

    def _side(self, side: Side) -> tuple[list[Any], tuple[str, str, float, float]]:
        """(values or hidden states, weight, bias) and how they make a distribution."""
        if side.tensor is not None:
            rows = self.row_input(cast(RowInput, side.tensor))
            if not side.tensor.source.meta["val"].dtype.is_floating_point:  # a one-hot of integers
                rows = self.call(aten.to.dtype, rows, torch.float32)
            return [self._detached(side, rows), None, None], (side.form, "identity", 1.0, 1.0)
        product, how = cast(Product, side.logits.product), side.logits.map
        operands: list[Any] = [self.rows_of(product, side.logits.rows), None, None]
        if product.given:
            operands[0] = self._chosen(side.logits, operands[0], 1)
        else:
            operands[1:] = self._weight_and_bias(product, side.logits)
        operands = [o if o is None else self._detached(side, o) for o in operands]
        return operands, (side.form, how.squash, how.inner, how.outer)

    def _detached(self, side: Side, node: fx.Node) -> fx.Node:
        return self.call(aten.detach.default, node) if side.logits.detached else node

    def _row_weight(self, found: Divergence, like: fx.Node) -> fx.Node | None:
        """The product of the row weights [N], 0 for rows that a mask drops."""
        if not found.weights:
            return None
        statistics = self._statistics(found)
        weight: fx.Node | None = None
        for kind, spec in sorted(found.weights, key=lambda w: w[0] in ("kept", "dropped")):  # masks last
            each = self._weight_input(spec)
            if kind in ("kept", "dropped"):
                each = self.call(aten.logical_not.default, each) if kind == "dropped" else each
                weight = self._where_kept(each, weight, statistics)
                continue
            each = self.call(aten.to.dtype, each, statistics)
            if kind == "over":
                each = self.call(aten.reciprocal.default, each)
            weight = each if weight is None else self.call(aten.mul.Tensor, weight, each)
        return self.call(aten.expand.default, weight, [self.call(SYM_SIZE, like, 0)])

    def _where_kept(self, keep: fx.Node, weight: fx.Node | None, dtype: torch.dtype) -> fx.Node:
        """The weight, 1 if there is none, of rows that are kept, and 0 for the others."""
        if weight is None:
            return self.call(aten.to.dtype, keep, dtype)
        return self.call(aten.where.ScalarOther, keep, weight, 0.0)

    def _weight_input(self, spec: RowInput | WholeInput) -> fx.Node:
        if isinstance(spec, RowInput):
            return self.call(aten.reshape.default, self.row_input(spec), [-1])
        return self.call(aten.reshape.default, self.whole_input(spec), [])

    def _statistics(self, found: Divergence) -> torch.dtype:
        product = found.p.logits.product or found.q.logits.product
        return torch.float64 if value(cast(Product, product).node).dtype == torch.float64 else torch.float32
