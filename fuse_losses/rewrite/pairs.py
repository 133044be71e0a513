"""A chunk's graph read as a divergence: row weights * sum over the vocabulary of a function of two log-probabilities.

The graph of one chunk has every spelling of rows behind it already (views, slices, masks are inputs). What is left is
read in two steps: the steps around the sum, which must be linear, and the function under it, which is identified by
its values on a grid (head.identify).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from fuse_losses.graph.products import Product
from fuse_losses.graph.rows import RowAnalysis
from fuse_losses.head.algebra import Divergence, Logits, Side
from fuse_losses.head.identify import Match, holds_beyond, identify
from fuse_losses.head.sizes import same, shape_of, sizes
from fuse_losses.head.values import Lifted, Wide
from fuse_losses.rewrite.chunk_graph import ChunkGraph
from fuse_losses.rewrite.chunk_inputs import RowInput, Steps, WholeInput

aten = torch.ops.aten
SHAPED = (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.reshape.default, aten.view.default)
SAME = (aten._to_copy.default, aten.clone.default, aten.alias.default, *SHAPED)
# what keeps every class apart, beside the elementwise operators; a stack of both sides is reduced over its own dim
APART = {
    *SAME,
    aten.detach.default,
    aten.stack.default,
    aten.cat.default,
    aten.select.int,
    aten.permute.default,
    aten.expand.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.masked_fill.Scalar,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.logsumexp.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
}
Weights = tuple[tuple[str, Any], ...]
Forms = dict[fx.Node, tuple[int, str]]  # an input: which distribution it is of, and in which form


@dataclass(frozen=True)
class Term:
    """coefficient * weights * sum over the vocabulary of `core`."""

    coefficient: float
    weights: Weights
    core: fx.Node


class PairGraph(ChunkGraph):
    """The chunk's graph from the distributions on: log-probs, probs and raw logits are its inputs."""

    def __init__(
        self,
        analysis: RowAnalysis,
        sources: dict[fx.Node, Product],
        cuts: set[fx.Node],
        lifted: Mapping[fx.Node, Lifted],
    ) -> None:
        super().__init__(analysis, sources, cuts)
        self.lifted = lifted
        self.sides: dict[fx.Node, Side] = {}
        self.wide_values: dict[fx.Node, bool] = {}  # whether the vocabulary is alive in what a node was written as

    def emit(self, node: fx.Node, steps: Steps = ()) -> fx.Node:
        made = super().emit(node, steps)
        self.wide_values[made] = "v" in self.labels(node)
        return made

    def add_output(self, node: fx.Node) -> None:
        super().add_output(node)
        self.wide_values[self.outputs[node]] = False

    def _emit(self, node: fx.Node, steps: Steps) -> fx.Node:
        wide = self.lifted.get(node)
        if not isinstance(wide, Wide) or (wide.form == "logits" and cast(Product, wide.logits.product).given):
            return super()._emit(node, steps)
        rows = (*wide.logits.rows, *steps)
        made = self._side(Side(wide.form, replace(wide.logits, detached=False, rows=rows)))
        if wide.factor != 1.0:
            made = self.call(aten.mul.Tensor, made, wide.factor)
        if wide.logits.detached:
            made = self.call(aten.detach.default, made)
        inner = self.labels(node).replace("r", "")
        for at, label in enumerate(inner):
            if label != "v":
                made = self.call(aten.unsqueeze.default, made, at + 1)
        return made

    def _product(self, product: Product, steps: Steps) -> fx.Node:
        return self._side(Side("logits", Logits(product=product, rows=steps)))

    def _side(self, side: Side) -> fx.Node:
        known = next((n for n, s in self.sides.items() if s == side), None)
        if known is None:
            known = self.graph.placeholder(f"side_{len(self.sides)}")
            self.sides[known] = side
        return known


def read_divergence(
    build: PairGraph, outputs: Sequence[tuple[float, fx.Node]], constant: Callable[[fx.Node], float | None]
) -> Divergence | None:
    """The divergence that a sum of factors times outputs of the chunk's graph is, or None.

    constant: the number that an input holds, if it is always the same.
    """
    return _Reader(build, constant).read(outputs)


class _Reader:
    def __init__(self, build: PairGraph, constant: Callable[[fx.Node], float | None]) -> None:
        self.build, self.inputs = build, build.specs
        self.numbers: dict[fx.Node, float] = {}
        for node, spec in build.specs.items():
            if isinstance(spec, WholeInput) and isinstance(spec.source, fx.Node):
                number = constant(spec.source)
                if number is not None:
                    self.numbers[node] = number
        self.wide: dict[fx.Node, bool] = {}
        for node in build.graph.nodes:
            self.wide[node] = self._is_wide(node)

    def read(self, outputs: Sequence[tuple[float, fx.Node]]) -> Divergence | None:
        terms: list[Term] = []
        for factor, output in outputs:
            found = _times(self._rows(output), factor)
            if not found:
                return None
            terms += found
        if any(t.weights != terms[0].weights for t in terms):
            return None
        nodes = self._ancestors([t.core for t in terms])
        if nodes is None:
            return None
        constants = [a for n in nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, (int, float))]
        constants += [abs(t.coefficient) for t in terms] + [self.numbers[n] for n in nodes if n in self.numbers]
        for p, q, forms in self._choices(nodes):
            match = self._identified(terms, nodes, (p, q), forms, constants)
            if match is not None:
                return self._divergence(match, p, q, terms[0].weights)
        return None

    # ------------------------------------------------------------------------------------------- around the sum

    def _is_wide(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            spec = self.inputs.get(node)
            return node in self.build.sides if spec is None else isinstance(spec, RowInput) and _over_vocabulary(spec)
        known = self.build.wide_values.get(node)  # what stands between two values of the region removes nothing
        return any(self.wide[a] for a in node.all_input_nodes) if known is None else known

    def _rows(self, node: fx.Node) -> list[Term] | None:
        """The node, a value per row, as a linear combination of sums over the vocabulary."""
        if node.op != "call_function":
            return None
        first = node.args[0] if node.args else None
        if node.target is aten.sum.dim_IntList and isinstance(first, fx.Node) and self.wide[first]:
            return self._classes(first) if not self.wide[node] else None
        if node.target is aten.linalg_vector_norm.default and node.args[1] == 1 and isinstance(first, fx.Node):
            distance = self.build.call(aten.abs.default, first)  # the sum of these is the norm
            self.wide[distance] = self.wide[first]
            return self._classes(distance) if self.wide[first] and not self.wide[node] else None
        return self._linear(node, self._rows)

    def _classes(self, node: fx.Node) -> list[Term]:
        """The node, a value per class, as terms whose weights are taken out."""
        return self._linear(node, self._classes) or [Term(1.0, (), node)]

    def _linear(self, node: fx.Node, inside: Callable[[fx.Node], list[Term] | None]) -> list[Term] | None:
        if node.op != "call_function" or not node.args:
            return None
        first, *rest = cast("list[Any]", list(node.args))
        other = rest[0] if rest else None
        if node.target in SAME and isinstance(first, fx.Node):
            dtype = node.kwargs.get("dtype")
            whole = isinstance(dtype, torch.dtype) and not dtype.is_floating_point  # cuts off the rest
            return None if whole else inside(first)
        if node.target is aten.neg.default:
            return _times(inside(first), -1.0)
        if node.target in (aten.mul.Tensor, aten.mul.Scalar):
            for a, b in ((first, other), (other, first)):
                factor = self._factor("times", b)
                if isinstance(a, fx.Node) and factor is not None:
                    return _times(inside(a), *factor)
        if node.target in (aten.div.Tensor, aten.div.Scalar):
            factor = self._factor("over", other)
            return None if factor is None else _times(inside(first), *factor)
        if node.target in (aten.masked_fill.Scalar, aten.where.ScalarOther, aten.where.self):
            fills = node.target is aten.masked_fill.Scalar
            mask, source, kind = (other, first, "dropped") if fills else (first, other, "kept")
            zero = self.numbers.get(rest[1], rest[1]) == 0
            assert isinstance(mask, fx.Node) and isinstance(source, fx.Node)
            return _times(inside(source), 1.0, ((kind, self.inputs[mask]),)) if zero and self._is_row(mask) else None
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs and inside == self._rows:
            left, right = (inside(a) if isinstance(a, fx.Node) else None for a in (first, other))
            if left and right:
                return [*left, *(_times(right, -1.0 if node.target is aten.sub.Tensor else 1.0) or [])]
        return None

    def _factor(self, kind: str, value: Any) -> tuple[float, Weights] | None:
        """A number, or a value per row, that multiplies (or divides) a term."""
        value = self.numbers.get(value, value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if kind == "over":
                return None if value == 0 else (1.0 / value, ())
            return float(value), ()
        row = value if isinstance(value, fx.Node) and self._is_row(value) else None
        return None if row is None else (1.0, ((kind, self.inputs[row]),))

    def _is_row(self, node: fx.Node) -> bool:
        """True for an input with one value per row (or a number whose value is not known)."""
        return node in self.inputs and not self.wide[node] and self._is_scalar(node)

    def _is_scalar(self, node: fx.Node) -> bool:
        spec = self.inputs[node]
        if not isinstance(spec.source, fx.Node):
            return False
        if isinstance(spec, WholeInput):
            return all(same(s, 1) for s in shape_of(spec.source))
        own = shape_of(spec.source)
        offset = len(spec.labels) - len(own)
        return all(spec.labels[k + offset] == "r" or same(size, 1) for k, size in enumerate(own))

    # ------------------------------------------------------------------------------------------- under the sum

    def _ancestors(self, cores: list[fx.Node]) -> list[fx.Node] | None:
        """All that the cores are computed from, in order; None if that is more than two distributions and numbers."""
        stack, seen = list(cores), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                if not self.wide[node] and node not in self.numbers:
                    return None
            elif node.target not in APART and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
                return None
            stack.extend(node.all_input_nodes)
        return [n for n in self.build.graph.nodes if n in seen]

    def _choices(self, nodes: list[fx.Node]) -> list[tuple[Side, Side, Forms]]:
        """Ways to read the wide inputs as two distributions p and q: (p, q, input -> which of them, in which form)."""
        found: dict[Any, Side] = {}
        inputs = [n for n in nodes if n.op == "placeholder" and self.wide[n]]
        raw: dict[fx.Node, Any] = {}
        for node in inputs:
            side = self.build.sides.get(node)
            if side is None:
                spec = cast(RowInput, self.inputs[node])
                key: Any = ("tensor", *spec.key)
                found[key] = Side("", Logits(), tensor=spec)
            elif side.form == "logits":
                raw[node] = side
                continue
            else:
                key = side.logits
                found[key] = Side("logits", side.logits)
            raw[node] = key
        for node in inputs:
            side = raw[node]
            if not isinstance(side, Side):
                continue
            product = cast(Product, side.logits.product)
            owners = [k for k in found if isinstance(k, Logits) and _is_map_of(k, side.logits)]
            if len(owners) == 1:
                raw[node] = owners[0]  # the logits of a distribution that is here: only an isinf may read them
            elif product.given:
                found[side.logits] = Side("", side.logits)
                raw[node] = side.logits
            else:
                return []
        if len(found) != 2:
            return []
        keys = list(found)
        if self._learns(found[keys[1]]) and not self._learns(found[keys[0]]):
            keys.reverse()
        choices = []
        for order in (keys, keys[::-1]):
            for forms in _forms([found[k] for k in order]):
                given = {}
                for node in inputs:
                    at = order.index(raw[node])
                    side = self.build.sides.get(node)
                    form = side.form if side is not None and found[raw[node]].form else forms[at]
                    given[node] = (at, form)
                p, q = (replace(found[k], form=forms[i]) for i, k in enumerate(order))
                choices.append((p, q, given))
        return choices

    def _learns(self, side: Side) -> bool:
        if side.tensor is not None:
            source = side.tensor.source.meta.get("val")
            return isinstance(source, Tensor) and source.requires_grad
        return bool(cast(Product, side.logits.product).node.meta["example_value"].requires_grad)

    def _identified(
        self,
        terms: list[Term],
        nodes: list[fx.Node],
        sides: tuple[Side, Side],
        forms: Forms,
        constants: Sequence[float],
    ) -> Match | None:
        # the raw logits of a distribution are its log-probs and a number per row, which must not matter
        shifts = (3.25, -1.5) if any(form == "logits" for _, form in forms.values()) else (0.0,)
        run = functools.partial(self._run, terms, nodes, forms)
        normalised = all(side.form == "logits" for side in sides)
        try:
            with torch.inference_mode(False), _disable_current_modes():
                readings = [functools.partial(_of_log_probs, run, shift) for shift in shifts]
                first, *others = [identify(f, constants, normalised) for f in readings]
                if first is None or any(f != first for f in others):
                    return None
                beyond = holds_beyond(first, functools.partial(_of_log_probs, run, 0.0), (sides[0].form, sides[1].form))
                return first if beyond else None
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None  # it cannot run on a grid: not a function of two numbers

    def _run(
        self, terms: list[Term], nodes: list[fx.Node], forms: Forms, values: Callable[[int, str], Tensor]
    ) -> Tensor:
        """The function under the sum [K] in float64, of the values [1, K] of two distributions in their forms."""
        env: dict[fx.Node, Any] = {}
        for node in nodes:
            if node in forms:
                env[node] = values(*forms[node])
            elif node in self.numbers:
                env[node] = torch.tensor(self.numbers[node], dtype=torch.float64)
            else:
                args = map_arg(node.args, lambda a: env[a])
                kwargs = map_arg({k: v for k, v in node.kwargs.items() if k != "device"}, lambda a: env[a])
                env[node] = _in_float64(node, args, kwargs)
        parts = [t.coefficient * env[t.core] for t in terms]
        made = functools.reduce(operator.add, parts)
        if made.numel() != values(0, "log_probs").numel():
            raise ValueError("not a value per class")
        return made.flatten()

    def _divergence(self, match: Match, p: Side, q: Side, weights: Weights) -> Divergence:
        sides = []
        for side, slope in zip((p, q), match.slopes, strict=True):
            sides.append(side if slope else replace(side, logits=replace(side.logits, detached=True)))
        return Divergence(match.name, match.parameter, match.masked, *sides, factor=match.factor, weights=weights)


def _of_log_probs(run: Callable[[Any], Tensor], shift: float, lp: Tensor, lq: Tensor) -> Tensor:
    """The function of two log-probabilities [K]; logits are these and a shift. A complex one is a negative number's."""

    def values(at: int, form: str) -> Tensor:
        x = (lp, lq)[at].unsqueeze(0)
        if form == "logits":
            return x.detach() + shift
        x = x.exp() if form == "probs" else x
        return x.real if x.is_complex() else x

    return run(values)


def _in_float64(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The node's value; casts between float dtypes are left out, and what is made is made in float64."""
    if node.target is aten._to_copy.default and args[0].is_floating_point():
        dtype = kwargs.get("dtype")
        if dtype is None or dtype.is_floating_point:
            return args[0]
    if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float64}
    return cast("Callable[..., Any]", node.target)(*args, **kwargs)


def _times(terms: list[Term] | None, coefficient: float, weights: Weights = ()) -> list[Term] | None:
    if terms is None:
        return None
    return [Term(t.coefficient * coefficient, (*t.weights, *weights), t.core) for t in terms]


def _over_vocabulary(spec: RowInput) -> bool:
    own = sizes(cast(fx.Node, spec.source))
    offset = len(spec.labels) - len(own)
    return any(spec.labels[k + offset] == "v" and not same(size, 1) for k, size in enumerate(own))


def _is_map_of(logits: Logits, raw: Logits) -> bool:
    """True if `logits` are the raw products, scaled at most: infinite where those are."""
    plain = logits.map.squash == raw.map.squash == "identity" and (logits.bias is None or logits.bias is raw.bias)
    return logits.product is raw.product and logits.classes == raw.classes and plain


def _forms(sides: list[Side]) -> list[tuple[str, str]]:
    """Readings of two sides: those that are given as they are may be log-probs or probs."""
    options = [(s.form,) if s.form else ("log_probs", "probs") for s in sides]
    return [(a, b) for a in options[0] for b in options[1]]
