"""Exits that lifted into the algebra, written as the specialised operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from fuse_losses.graph.products import Product, value
from fuse_losses.head.algebra import Functional, Link, Logits, LogProb, LogSumExp, NllLoss, Selected, WeightedLoss
from fuse_losses.head.sizes import same, shape_of, sizes
from fuse_losses.rewrite.joins import Join, leaves_of, row_count
from fuse_losses.rewrite.slices import refs
from fuse_losses.rewrite.writer import SYM_SIZE, Writer

aten = torch.ops.aten
NO_IGNORE = -(2**63)  # no valid target: where nothing is ignored, this value is out of range like any other


class Weights(NamedTuple):
    """What the rows of a sum are multiplied with: each its own [N], all a number and some of the graph; and masks."""

    by_row: fx.Node | None
    number: float
    scalars: list[tuple[Callable[..., Any], Any]]
    masks: list[tuple[fx.Node, Link]]


class IndexedWriter(Writer):
    """Writes functionals of one distribution: log-probs, logsumexps, cross entropies."""

    def __init__(self, *common: Any, joins: Sequence[Join] = ()) -> None:
        super().__init__(*common)
        self.joins = joins

    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        functional = self.part.functionals.get(node)
        return None if functional is None else self._functional(node, functional)

    def _functional(self, node: fx.Node, functional: Functional) -> fx.Node:
        if isinstance(functional, WeightedLoss):
            return self._weighted(node, functional)
        fused = self._fused(functional)
        if isinstance(functional, NllLoss):
            result = self._nll(functional, fused)
        elif isinstance(functional, LogSumExp):
            result = fused["lse"]
        elif isinstance(functional, Selected):
            result = self.call(aten.add.Tensor, fused["log_prob"], fused["lse"])
        else:
            result = fused["log_prob"]
        factor = getattr(functional, "factor", 1.0)
        if factor != 1.0:
            result = (
                self.call(aten.neg.default, result) if factor == -1.0 else self.call(aten.mul.Tensor, result, factor)
            )
        if not isinstance(functional, NllLoss):
            result = self.call(aten.reshape.default, result, self.shape(sizes(node)))
        product = cast(Product, functional.logits.product)
        statistics = torch.float64 if value(product.node).dtype == torch.float64 else torch.float32
        return self.as_dtype(result, node.meta["val"].dtype, statistics)

    def _nll(self, functional: NllLoss, fused: dict[str, fx.Node]) -> fx.Node:
        total = fused.get("nll_sum")
        if total is None:
            total = self.call(aten.neg.default, self.call(aten.sum.default, fused["log_prob"]))
        if not functional.mean:
            return total
        valid = self.call(aten.ne.Scalar, fused["target"], functional.ignore_index)
        return self.call(aten.div.Tensor, total, self.call(aten.sum.default, valid))

    def _weighted(self, node: fx.Node, loss: WeightedLoss) -> fx.Node:
        """sum_i w_i log_prob_i."""
        per_row = cast(LogProb, loss.per_row)
        weights = self._weights(loss)
        total = self._write_fused(
            loss.logits,
            per_row.target,
            per_row.ignore_index,
            per_row.wraps,
            summed=True,
            row_weight=weights.by_row,
            masks=weights.masks,
        )["nll_sum"]
        product = cast(Product, loss.logits.product)
        statistics = torch.float64 if value(product.node).dtype == torch.float64 else torch.float32
        return self.as_dtype(self._times(total, weights, -per_row.factor), node.meta["val"].dtype, statistics)

    def _times(self, total: fx.Node, weights: Weights, factor: float) -> fx.Node:
        """The sum with the factors that all rows share."""
        factor *= weights.number
        total = total if factor == 1.0 else self.call(aten.mul.Tensor, total, factor)
        for target, scalar in weights.scalars:
            total = self.call(target, total, scalar)
        return total

    def _weights(self, loss: WeightedLoss) -> Weights:
        """The gradient of the scalar for each row, found by going back over the links.

        What all rows share stays outside of the sum (no row at all is 0 / 0 there, as it is for eager), as long as no
        mask comes behind it: rows that are dropped are 0 whatever they were multiplied by.
        """
        weight: Any = 1.0
        masks: list[tuple[fx.Node, Link]] = []
        scalars: list[tuple[Callable[..., Any], Any]] = []
        for link in reversed(loss.links):
            target, scalar = self._scalar_of(link)
            if scalar is not None and not masks:
                scalars.append((target, scalar))
                link = replace(link, kind="sum") if link.kind == "mean" else None
            if link is not None:
                weight = self._pulled_back(weight, link, masks)
        if not isinstance(weight, fx.Node):
            return Weights(None, weight, scalars[::-1], masks)
        weight = self.call(aten.expand.default, weight, [self.size(s) for s in loss.links[0].before])
        return Weights(self.call(aten.reshape.default, weight, [-1]), 1.0, scalars[::-1], masks)

    def _scalar_of(self, link: Link) -> tuple[Callable[..., Any], Any]:
        """A number of the graph that the link multiplies all rows with, or divides them by, and None for any other."""
        if link.kind == "mean":
            count = self.numel([link.before[d] for d in link.dims])
            return aten.div.Tensor, count if isinstance(count, fx.Node) or count == 0 else None
        shared = isinstance(link.factor, fx.Node) and link.kind in ("times", "over") and not shape_of(link.factor)
        target = aten.mul.Tensor if link.kind == "times" else aten.div.Tensor
        return target, self.ref(cast(fx.Node, link.factor)) if shared else None

    def _pulled_back(self, weight: Any, link: Link, masks: list[tuple[fx.Node, Link]]) -> Any:
        """The cotangent before a link from that behind it; a number, or a tensor that broadcasts."""
        factor = self.ref(link.factor) if isinstance(link.factor, fx.Node) else link.factor
        if link.kind == "times":
            return self._product_of(weight, factor)
        if link.kind == "over":
            return self._product_of(weight, factor, divide=True)
        if link.kind in ("kept", "dropped"):
            assert isinstance(factor, fx.Node)
            masks.append((factor, link))  # the row's target is dropped: 0 even where its log-prob is infinite
            return weight
        if link.kind == "mean":
            weight = self._product_of(weight, self.numel([link.before[d] for d in link.dims]), divide=True)
        if not isinstance(weight, fx.Node):
            return weight
        if link.kind == "shape":
            weight = self.call(aten.expand.default, weight, [self.size(s) for s in link.after])
            return self.call(aten.reshape.default, weight, [self.size(s) for s in link.before])
        if not link.keepdim:
            weight = self.call(aten.expand.default, weight, [self.size(s) for s in link.after])
            for d in sorted(link.dims):
                weight = self.call(aten.unsqueeze.default, weight, d)
        return weight

    def _product_of(self, weight: Any, factor: Any, divide: bool = False) -> Any:
        if not isinstance(weight, fx.Node) and not isinstance(factor, fx.Node):
            return weight / factor if divide else weight * factor
        if not divide:
            tensor, other = (weight, factor) if isinstance(weight, fx.Node) else (factor, weight)
            return tensor if other == 1.0 else self.call(aten.mul.Tensor, tensor, other)
        if isinstance(weight, fx.Node):
            return self.call(aten.div.Tensor, weight, factor)
        return self.call(aten.mul.Tensor, self.call(aten.reciprocal.default, self._tensor(factor)), weight)

    def _tensor(self, number: fx.Node) -> fx.Node:
        """A size that is a node of the graph, as a tensor."""
        shape = number.meta.get("example_value")
        return number if isinstance(shape, torch.Tensor) else self.call(aten.scalar_tensor.default, number)

    def _kept(self, mask: fx.Node, link: Link) -> fx.Node:
        """[N] of a mask, true where the row is kept."""
        rows = self.call(aten.expand.default, mask, [self.size(s) for s in link.before])
        keep = self.call(aten.reshape.default, rows, [-1])
        return self.call(aten.logical_not.default, keep) if link.kind == "dropped" else keep

    def _without(self, y: fx.Node, masks: Sequence[tuple[fx.Node, Link]], ignore_index: int, logits: Logits) -> fx.Node:
        """Targets with those of dropped rows ignored; a target out of range stays, and raises."""
        for mask, link in masks:
            keep = self._kept(mask, link)
            beyond = self.call(aten.ge.Scalar, y, self._vocab(logits))
            wrong = self.call(aten.logical_or.default, self.call(aten.lt.Scalar, y, 0), beyond)
            y = self.call(aten.where.ScalarOther, self.call(aten.logical_or.default, keep, wrong), y, ignore_index)
        return y

    def _fused(self, functional: Functional) -> dict[str, fx.Node]:
        """The operator that makes the functional: one already written, or a new one."""
        grad = self.part.differentiable
        if isinstance(functional, LogSumExp):
            for (logits, *_, state), outputs in self.made.items():
                if state == grad and "lse" in outputs and (lse := self._lse_among(logits, outputs, functional.logits)):
                    return {"lse": lse}
            return self._write_fused(functional.logits, None, None, False, summed=False)
        ignore = getattr(functional, "ignore_index", None)
        wraps = getattr(functional, "wraps", False)
        summed = isinstance(functional, NllLoss) and (self.plan.gradients == "forward" or not grad)
        summed = summed and not cast(Product, functional.logits.product).given
        key = (functional.logits, functional.target, ignore, wraps, summed, grad)
        join = next((j for j in self.joins if functional in j.functionals), None)
        if key not in self.made and join is not None and not summed:
            self._write_join(join, ignore, wraps, grad)
        if key not in self.made:
            self.made[key] = self._write_fused(functional.logits, functional.target, ignore, wraps, summed)
        return self.made[key]

    def _write_join(self, join: Join, ignore: int | None, wraps: bool, grad: bool) -> None:
        """One operator over the rows of all the functionals, and which of its results are whose."""
        for f, part in zip(join.functionals, join.parts, strict=True):
            self.also_reads(part, leaves_of(part, refs(f)))
        members = list({(f.logits, f.target): None for f in join.functionals})
        counts = [row_count(logits) for logits, _ in members]
        alike = all(same(c, counts[0]) for c in counts)
        if not alike and not all(isinstance(c, int) for c in counts):
            return
        pairs = [self._rows_and_targets(logits, y, ignore, wraps) for logits, y in members]
        x, y = (self.call(aten.cat.default, list(column)) for column in zip(*pairs, strict=True))
        both = self._write_operator(members[0][0], x, y, ignore, summed=False)
        start = 0
        for i, ((logits, target), (_, own)) in enumerate(zip(members, pairs, strict=True)):
            result = {"target": own}
            for name in ("log_prob", "lse"):
                if alike:
                    rows = self.call(aten.reshape.default, both[name], [len(members), -1])
                    result[name] = self.call(aten.select.int, rows, 0, i)
                else:
                    result[name] = self.call(aten.slice.Tensor, both[name], 0, start, start + counts[i])
            start = start + counts[i]
            self.made[(logits, target, ignore, wraps, False, grad)] = result

    def _lse_among(self, made: Logits, outputs: dict[str, fx.Node], wanted: Logits) -> fx.Node | None:
        """The logsumexps that are wanted, if they are those of some rows of an operator that is there already."""
        taken = len(made.rows)
        if replace(wanted, rows=made.rows) != made or wanted.rows[:taken] != made.rows:
            return None
        left = wanted.rows[taken:]
        if not left:
            return outputs["lse"]
        product = cast(Product, made.product)
        whole = value(product.node).shape
        rows = made.rows[-1].shape if made.rows else (*whole[: product.vocab_dim], *whole[product.vocab_dim + 1 :])
        return self.flat_rows(self.call(aten.reshape.default, outputs["lse"], self.shape(rows)), left, [])

    def _write_fused(
        self,
        logits: Logits,
        target: fx.Node | None,
        ignore: int | None,
        wraps: bool,
        summed: bool,
        row_weight: fx.Node | None = None,
        masks: Sequence[tuple[fx.Node, Link]] = (),
    ) -> dict[str, fx.Node]:
        x, y = self._rows_and_targets(logits, target, ignore, wraps, masks)
        return self._write_operator(logits, x, y, ignore, summed, row_weight)

    def _rows_and_targets(
        self,
        logits: Logits,
        target: fx.Node | None,
        ignore: int | None,
        wraps: bool,
        masks: Sequence[tuple[fx.Node, Link]] = (),
    ) -> tuple[fx.Node, fx.Node]:
        """x [N, H] and targets [N]."""
        product = cast(Product, logits.product)
        x = self.rows_of(product, logits.rows)
        ignore_index = NO_IGNORE if ignore is None else ignore
        if target is None:  # only the logsumexp is wanted: every row is ignored
            rows = self.call(SYM_SIZE, x, 0)
            device = value(product.node).device
            return x, self.call(torch.full, (rows,), ignore_index, dtype=torch.int64, device=device)
        y = self.call(aten.reshape.default, self.ref(target), [-1])
        if wraps:
            from_end = self.call(aten.add.Tensor, y, self._vocab(logits))
            y = self.call(aten.where.self, self.call(aten.lt.Scalar, y, 0), from_end, y)
        return x, self._without(y, masks, ignore_index, logits)

    def _write_operator(
        self,
        logits: Logits,
        x: fx.Node,
        y: fx.Node,
        ignore: int | None,
        summed: bool,
        row_weight: fx.Node | None = None,
    ) -> dict[str, fx.Node]:
        product = cast(Product, logits.product)
        ignore_index = NO_IGNORE if ignore is None else ignore
        shape_of_map = (logits.map.squash, logits.map.inner, logits.map.outer, ignore_index)
        if product.given:
            x = self._chosen(logits, x, 1)
            x = self.call(aten.detach.default, x) if logits.detached else x
            both = self.call(torch.ops.fuse_losses.log_prob.default, x, y, *shape_of_map, self.plan.chunk_rows)
        else:
            weight, bias = self._weight_and_bias(product, logits)
            if logits.detached:
                x, weight = self.call(aten.detach.default, x), self.call(aten.detach.default, weight)
                bias = bias if bias is None else self.call(aten.detach.default, bias)
            made = self._given_logits(product, logits)
            tail = (*shape_of_map, self.plan.chunk_rows, self.plan.accumulate)
            if summed:
                total = self.call(
                    torch.ops.fuse_losses.linear_nll_sum.default, x, weight, bias, y, row_weight, made, *tail
                )
                return {"nll_sum": total, "target": y}
            both = self.call(torch.ops.fuse_losses.linear_log_prob.default, x, weight, bias, y, made, *tail)
        log_prob, lse = self.call(operator.getitem, both, 0), self.call(operator.getitem, both, 1)
        return {"log_prob": log_prob, "lse": lse, "target": y}

    def _vocab(self, logits: Logits) -> Any:
        """How many classes the logits have."""
        return (
            self.size(cast(Product, logits.product).vocab)
            if logits.classes is None
            else logits.classes[1] - logits.classes[0]
        )

    def _chosen(self, logits: Logits, node: fx.Node, dim: int) -> fx.Node:
        """The part of an operand that makes the classes that are kept."""
        return node if logits.classes is None else self.call(aten.slice.Tensor, node, dim, *logits.classes)

    def _weight_and_bias(self, product: Product, logits: Logits) -> tuple[fx.Node, fx.Node | None]:
        weight, bias = self._chosen(logits, self.weight_of(product), 0), self.bias_of(product)
        bias = bias if bias is None else self._chosen(logits, bias, 0)
        if logits.bias is not None:
            extra = self.call(aten.reshape.default, self.ref(logits.bias), [-1])
            extra = self.as_dtype(extra, value(product.node).dtype, logits.bias.meta["val"].dtype)
            bias = extra if bias is None else self.call(aten.add.Tensor, bias, extra)
        return weight, bias

    def _given_logits(self, product: Product, logits: Logits) -> fx.Node | None:
        """The product itself, if it exists anyhow and its rows are these rows: one product less."""
        plain = all(step.kind in ("reshape", "unsqueeze") for step in logits.rows)
        last = product.vocab_dim == value(product.node).dim() - 1
        kept = self.region.returned and len(self.region.products) == 1 and not self.region.written
        if not (kept and plain and last) or logits.bias is not None or logits.classes is not None:
            return None
        whole = self.call(aten.detach.default, product.node)
        return self.call(aten.reshape.default, whole, [-1, self.size(product.vocab)])
