"""Exits that lifted into the algebra, written as the specialised operators."""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from fuse_losses.graph.products import Product, value
from fuse_losses.head.algebra import Functional, Logits, LogSumExp, NllLoss, Selected
from fuse_losses.head.sizes import sizes
from fuse_losses.rewrite.writer import SYM_SIZE, Writer

aten = torch.ops.aten
NO_IGNORE = -(2**63)  # no valid target: where nothing is ignored, this value is out of range like any other


class IndexedWriter(Writer):
    """Writes functionals of one distribution: log-probs, logsumexps, cross entropies."""

    def made_by_operator(self, node: fx.Node) -> fx.Node | None:
        functional = self.part.functionals.get(node)
        return None if functional is None else self._functional(node, functional)

    def _functional(self, node: fx.Node, functional: Functional) -> fx.Node:
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

    def _fused(self, functional: Functional) -> dict[str, fx.Node]:
        """The operator that makes the functional: one already written, or a new one."""
        grad = self.part.differentiable
        if isinstance(functional, LogSumExp):
            for (logits, *_, state), outputs in self.made.items():
                if logits == functional.logits and state == grad and "lse" in outputs:
                    return outputs
            return self._write_fused(functional.logits, None, None, False, summed=False)
        ignore = getattr(functional, "ignore_index", None)
        wraps = getattr(functional, "wraps", False)
        summed = isinstance(functional, NllLoss) and (self.plan.gradients == "forward" or not grad)
        summed = summed and not cast(Product, functional.logits.product).given
        key = (functional.logits, functional.target, ignore, wraps, summed, grad)
        if key not in self.made:
            self.made[key] = self._write_fused(functional.logits, functional.target, ignore, wraps, summed)
        return self.made[key]

    def _write_fused(
        self, logits: Logits, target: fx.Node | None, ignore: int | None, wraps: bool, summed: bool
    ) -> dict[str, fx.Node]:
        product = cast(Product, logits.product)
        x = self.rows_of(product, logits.rows)
        ignore_index = NO_IGNORE if ignore is None else ignore
        if target is None:  # only the logsumexp is wanted: every row is ignored
            rows = self.call(SYM_SIZE, x, 0)
            device = value(product.node).device
            y = self.call(torch.full, (rows,), ignore_index, dtype=torch.int64, device=device)
        else:
            y = self.call(aten.reshape.default, self.ref(target), [-1])
            if wraps:
                from_end = self.call(aten.add.Tensor, y, self.size(product.vocab))
                y = self.call(aten.where.self, self.call(aten.lt.Scalar, y, 0), from_end, y)
        shape_of_map = (logits.map.squash, logits.map.inner, logits.map.outer, ignore_index)
        if product.given:
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
                total = self.call(torch.ops.fuse_losses.linear_nll_sum.default, x, weight, bias, y, None, made, *tail)
                return {"nll_sum": total, "target": y}
            both = self.call(torch.ops.fuse_losses.linear_log_prob.default, x, weight, bias, y, made, *tail)
        log_prob, lse = self.call(operator.getitem, both, 0), self.call(operator.getitem, both, 1)
        return {"log_prob": log_prob, "lse": lse, "target": y}

    def _weight_and_bias(self, product: Product, logits: Logits) -> tuple[fx.Node, fx.Node | None]:
        weight, bias = self.weight_of(product), self.bias_of(product)
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
        if not (kept and plain and last) or logits.bias is not None:
            return None
        whole = self.call(aten.detach.default, product.node)
        return self.call(aten.reshape.default, whole, [-1, self.size(product.vocab)])
