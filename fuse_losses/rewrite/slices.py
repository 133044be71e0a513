"""What must be computed for one exit: the values that an operator makes, and the Dynamo nodes that are read."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.constants import constant
from fuse_losses.graph.products import Product, value
from fuse_losses.graph.region import Region
from fuse_losses.graph.rows import SUMS, Loose, Lost, RowAnalysis, Rowed
from fuse_losses.graph.tail import Tail
from fuse_losses.head.algebra import PER_ROW, Divergence, Functional, LogProb, NllLoss, WeightedLoss, all_logits
from fuse_losses.head.sizes import SIZES, sizes
from fuse_losses.head.values import Lifted, Unlifted, Wide
from fuse_losses.head.weights import weighted_loss
from fuse_losses.report.decline import Declined
from fuse_losses.rewrite.chunk_graph import ChunkGraph, row_sum_dims
from fuse_losses.rewrite.pairs import PairGraph, read_divergence

aten = torch.ops.aten
FUNCTIONALS = (*PER_ROW, NllLoss)
MOST_COMBINED = 8  # exits that may be parts of one divergence; a loop over sequences has any number of its own


@dataclass
class ExitSlice:
    """exit: the Dynamo node to replace; root: its ATen value.

    functionals: ATen nodes whose value a kernel makes; cuts: ATen nodes that the chunked region makes, each with the
    region's graph for it alone; leaves: ATen nodes that a Dynamo node already holds. Everything between is copied.
    """

    exit: fx.Node
    root: fx.Node
    functionals: dict[fx.Node, Functional] = field(default_factory=dict)
    cuts: dict[fx.Node, ChunkGraph] = field(default_factory=dict)
    leaves: dict[fx.Node, fx.Node] = field(default_factory=dict)
    dead: list[fx.Node] = field(default_factory=list)  # what nobody reads once the exit is replaced

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The Dynamo nodes that the copy reads, in a fixed order (graphs are cache keys)."""
        return tuple(dict.fromkeys(self.leaves.values()))

    @property
    def differentiable(self) -> bool:
        return value(self.exit).requires_grad

    @property
    def selects_rows(self) -> bool:
        """True if some rows of the logits are left out or moved."""
        steps = [logits.rows for f in self.functionals.values() for logits in all_logits(f)]
        steps += [spec.steps for build in self.cuts.values() for spec in build.rows if isinstance(spec.source, Product)]
        return any(step.kind not in ("reshape", "unsqueeze") for taken in steps for step in taken)


@dataclass(frozen=True)
class Slicer:
    """Walks back from exits to what a kernel or the chunked region makes, and to values that exist already."""

    tail: Tail
    analysis: RowAnalysis
    values: dict[fx.Node, Lifted]
    cuts: set[fx.Node]

    def lifted(self, region: Region, exit: fx.Node, dead: Sequence[fx.Node] = ()) -> ExitSlice | None:
        """The exit over functionals of the algebra, or None if something in it has no form there.

        dead: nodes before the exit that go with it, and whose values are made anew.
        """
        found = ExitSlice(exit, self.tail.results[exit], dead=list(dead))
        formless: list[fx.Node] = []

        def visit(node: fx.Node) -> Iterable[fx.Node]:
            lifted = self.values.get(node)
            if isinstance(lifted, FUNCTIONALS) and not _biased_input(lifted):
                found.functionals[node] = cast(Functional, lifted)
                return refs(found.functionals[node])
            divergence = self._divergence(node) if isinstance(lifted, Unlifted) else None
            if divergence is not None:
                found.functionals[node] = divergence
                return refs(divergence)
            if self._reads_wide(node) or isinstance(lifted, Wide):
                formless.append(node)
                return ()
            return _copied(node)

        self._walk(found, region, visit)
        return found if found.functionals and not formless else None

    def _divergence(self, node: fx.Node) -> Divergence | None:
        """The divergence between two distributions that the node is, per row or summed over all of them."""
        if node not in self._divergences:
            self._divergences[node] = self._read_divergence(node)
        return self._divergences[node]

    @functools.cached_property
    def _divergences(self) -> dict[fx.Node, Divergence | None]:
        return {}

    def _read_divergence(self, node: fx.Node) -> Divergence | None:
        known = self.analysis.values.get(node)
        if isinstance(known, Loose):
            parts = self._sums(node)
            if not parts:
                return None
        elif isinstance(known, Rowed) and not known.wide:
            parts = [(1.0, node)]
        else:
            return None
        build = PairGraph(self.analysis, self.tail.sources, self.cuts, self.values)
        try:
            for _, part in parts:
                build.add_output(part)
        except Declined:
            return None
        outputs = [(factor, build.outputs[part]) for factor, part in parts]
        found = read_divergence(build, outputs, lambda n: constant(self.tail, n))
        return found and replace(found, summed=isinstance(known, Loose) and not sizes(node))

    def _sums(self, node: fx.Node) -> list[tuple[float, fx.Node]]:
        """The sums over rows that the node is, or is combined from with constant factors; none if it is neither."""
        if node.target in SUMS:
            source = self.analysis.values.get(cast(fx.Node, node.args[0]))
            return [(1.0, node)] if isinstance(source, Rowed) and row_sum_dims(self.analysis, node)[1] else []
        found: list[tuple[float, fx.Node]] = []
        stack: list[tuple[float, Any]] = [(1.0, node)]
        while stack:
            factor, at = stack.pop()
            if not isinstance(at, fx.Node) or sizes(at) or not isinstance(self.analysis.values.get(at), Loose):
                return []
            left, right = (*at.args, None)[:2]
            if at.target is aten.sum.default:
                found.append((factor, at))
            elif at.target in (aten.add.Tensor, aten.sub.Tensor) and not at.kwargs:
                stack += [(factor, left), (-factor if at.target is aten.sub.Tensor else factor, right)]
            elif at.target is aten.mul.Tensor and isinstance(right, (int, float)):
                stack.append((factor * right, left))
            elif at.target is aten.div.Tensor and isinstance(right, (int, float)) and right:
                stack.append((factor / right, left))
            else:
                return []
        return found if len(found) > 1 and all(self._sums(part) for _, part in found) else []

    def combined(self, region: Region, exits: Sequence[fx.Node]) -> list[ExitSlice]:
        """Nodes that make one divergence of several exits (`0.5 * kl_1.sum(-1) + 0.5 * kl_2.sum(-1)`), lifted."""
        members, wanted = set(region.nodes), set(exits)
        found: list[ExitSlice] = []
        if len(exits) > MOST_COMBINED:
            return found
        for node in self.tail.nodes:
            if len(wanted) < 2 or node in members or node in wanted or node not in self.tail.results:
                continue
            between = self._behind(node, members)
            inside = wanted & set(between)
            if len(inside) < 2 or any(u not in between and u is not node for b in between for u in b.users):
                continue
            if any(calls.writes_to(b) for b in between) or self._divergence(self.tail.results[node]) is None:
                continue
            part = self.lifted(region, node, between)
            if part is not None:
                wanted -= inside
                found.append(part)
        return found

    def _behind(self, node: fx.Node, members: set[fx.Node]) -> list[fx.Node]:
        """What the node is computed from behind the region, in order."""
        stack, seen = [node], set[fx.Node]()
        while stack:
            for a in stack.pop().all_input_nodes:
                if a in self._position and a not in members and a not in seen:
                    seen.add(a)
                    stack.append(a)
        return sorted(seen, key=self._position.__getitem__)

    @functools.cached_property
    def _position(self) -> dict[fx.Node, int]:
        return {n: i for i, n in enumerate(self.tail.nodes)}

    def weighted(self, region: Region, part: ExitSlice) -> ExitSlice | None:
        """The scalar that the exit's log-probs are summed into with weights known before the loss, if it is so."""
        if len(part.functionals) != 1:
            return None
        ((node, functional),) = part.functionals.items()
        if not isinstance(functional, (LogProb, Divergence)) or all(p.given for p in _products(functional)):
            return None
        found = weighted_loss(functional, node, self.analysis.values, self.cuts)
        if found is None:
            return None
        scalar, loss = found
        between = self._between(part.exit, scalar)
        if between is None:
            return None
        whole = ExitSlice(between[-1], scalar, {scalar: loss}, dead=[*part.dead, *between[:-1]])
        self._walk(whole, region, lambda n: refs(loss) if n is scalar else _copied(n))
        return whole

    def _between(self, exit: fx.Node, scalar: fx.Node) -> list[fx.Node] | None:
        """The Dynamo nodes from the exit to the one that holds the scalar, if nothing else reads them or writes."""
        found = [exit]
        while self.tail.results.get(found[-1]) is not scalar:
            users = list(found[-1].users)
            if len(users) != 1 or users[0] not in self.tail.results or calls.writes_to(users[0]):
                return None
            found.append(users[0])
        return found

    def by_rows(self, region: Region, exit: fx.Node) -> ExitSlice:
        """The exit over values that the region computes a chunk of rows at a time; raises Declined."""
        found = ExitSlice(exit, self.tail.results[exit])

        def visit(node: fx.Node) -> Iterable[fx.Node]:
            known = self.analysis.values.get(node)
            if isinstance(known, Lost):
                raise Declined(known.code, known.reason, calls.user_line(exit))
            if isinstance(known, Rowed) and known.wide:
                raise Declined("logits_used", f"{exit.name} needs the logits whole", calls.user_line(exit))
            if not self._reads_wide(node):
                return _copied(node)
            build = ChunkGraph(self.analysis, self.tail.sources, self.cuts)
            build.add_output(node)
            found.cuts[node] = build
            return build.reads

        self._walk(found, region, visit)
        return found

    def _walk(self, found: ExitSlice, region: Region, visit: Callable[[fx.Node], Iterable[fx.Node]]) -> None:
        held = self._held_before(region, found)
        stack, seen = [found.root], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in held and node is not found.root:
                found.leaves[node] = held[node]
            else:
                stack.extend(visit(node))

    def _held_before(self, region: Region, found: ExitSlice) -> dict[fx.Node, fx.Node]:
        """ATen values that some Dynamo node outside of the region holds before the exit."""
        made = {p.node for p in self.tail.products}
        held = {aten: dynamo for aten, dynamo in self.tail.inputs.items() if dynamo not in made}
        inside = {*region.nodes, *found.dead}
        for node in self.tail.nodes:
            if node is found.exit:
                break
            if node not in inside and node in self.tail.results:
                held.setdefault(self.tail.results[node], node)
        return held

    def _reads_wide(self, node: fx.Node) -> bool:
        """True if the vocabulary is alive in what the node reads (through the tuple of a sort, a max, an nll_loss)."""
        if node.target in SIZES:
            return False
        if node.target is operator.getitem and not _is_wide(self.analysis, node):
            return self._reads_wide(cast(fx.Node, node.args[0]))
        return any(_is_wide(self.analysis, a) for a in node.all_input_nodes)


def _products(functional: Functional) -> list[Product]:
    return [logits.product for logits in all_logits(functional) if logits.product is not None]


def _biased_input(functional: Functional) -> bool:
    """True if a bias is added to logits that are given: their operator takes none."""
    return functional.logits.bias is not None and cast(Product, functional.logits.product).given


def _is_wide(analysis: RowAnalysis, node: fx.Node) -> bool:
    found = analysis.values.get(node)
    return isinstance(found, Rowed) and found.wide


def _copied(node: fx.Node) -> Iterable[fx.Node]:
    if node.op != "call_function":
        raise LookupError(f"{node} stands for no node of the graph")
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Declined("rows_mix", f"{node.target} draws random numbers for the logits, and would draw them again")
    # a size is found anew, so that it does not keep the logits alive
    return () if node.target in SIZES else node.all_input_nodes


def refs(functional: Functional) -> list[fx.Node]:
    """The ATen values outside of the region that a functional reads."""
    if isinstance(functional, Divergence):
        return [n for n in _divergence_refs(functional) if isinstance(n, fx.Node)]
    found: list[Any] = [functional.logits.bias]
    if isinstance(functional, WeightedLoss):
        found.extend(refs(functional.per_row))
        found.extend(link.factor for link in functional.links)
    for step in functional.logits.rows:
        found.extend(step.args)
    found.append(getattr(functional, "target", None))
    return [r for r in found if isinstance(r, fx.Node)]


def _divergence_refs(divergence: Divergence) -> Iterator[Any]:
    specs = [s.tensor for s in (divergence.p, divergence.q) if s.tensor is not None]
    for spec in (*specs, *(w for _, w in divergence.weights)):
        yield spec.source
        for step in getattr(spec, "steps", ()):
            yield from step.args
    for side in (divergence.p, divergence.q):
        yield side.logits.bias
        for step in side.logits.rows:
            yield from step.args
