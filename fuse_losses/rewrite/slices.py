"""What must be computed for one exit: the values that an operator makes, and the Dynamo nodes that are read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.products import Product, value
from fuse_losses.graph.region import Region
from fuse_losses.graph.rows import Lost, RowAnalysis, Rowed
from fuse_losses.graph.tail import Tail
from fuse_losses.head.algebra import PER_ROW, Functional, LogProb, NllLoss, WeightedLoss
from fuse_losses.head.sizes import SIZES
from fuse_losses.head.values import Lifted
from fuse_losses.head.weights import weighted_loss
from fuse_losses.report.decline import Declined
from fuse_losses.rewrite.chunk_graph import ChunkGraph

FUNCTIONALS = (*PER_ROW, NllLoss)


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
        steps = [f.logits.rows for f in self.functionals.values()]
        steps += [spec.steps for build in self.cuts.values() for spec in build.rows if isinstance(spec.source, Product)]
        return any(step.kind not in ("reshape", "unsqueeze") for taken in steps for step in taken)


@dataclass(frozen=True)
class Slicer:
    """Walks back from exits to what a kernel or the chunked region makes, and to values that exist already."""

    tail: Tail
    analysis: RowAnalysis
    values: dict[fx.Node, Lifted]
    cuts: set[fx.Node]

    def lifted(self, region: Region, exit: fx.Node) -> ExitSlice | None:
        """The exit over functionals of the algebra, or None if something in it has no form there."""
        found = ExitSlice(exit, self.tail.results[exit])
        formless: list[fx.Node] = []

        def visit(node: fx.Node) -> Iterable[fx.Node]:
            lifted = self.values.get(node)
            if isinstance(lifted, FUNCTIONALS):
                found.functionals[node] = cast(Functional, lifted)
                return refs(found.functionals[node])
            if lifted is not None or self._reads_wide(node):
                formless.append(node)
                return ()
            return _copied(node)

        self._walk(found, region, visit)
        return found if found.functionals and not formless else None

    def weighted(self, region: Region, part: ExitSlice) -> ExitSlice | None:
        """The scalar that the exit's log-probs are summed into with weights known before the loss, if it is so."""
        if len(part.functionals) != 1:
            return None
        ((node, functional),) = part.functionals.items()
        if not isinstance(functional, LogProb) or any(p.given for p in region.products):
            return None
        found = weighted_loss(functional, node, self.analysis.values, self.cuts)
        if found is None:
            return None
        scalar, loss = found
        between = self._between(part.exit, scalar)
        if between is None:
            return None
        whole = ExitSlice(between[-1], scalar, {scalar: loss}, dead=between[:-1])
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
        held = self._held_before(region, found.exit)
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

    def _held_before(self, region: Region, exit: fx.Node) -> dict[fx.Node, fx.Node]:
        """ATen values that some Dynamo node outside of the region holds before `exit`."""
        made = {p.node for p in self.tail.products}
        held = {aten: dynamo for aten, dynamo in self.tail.inputs.items() if dynamo not in made}
        inside = set(region.nodes)
        for node in self.tail.nodes:
            if node is exit:
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
    refs: list[Any] = [functional.logits.bias]
    if isinstance(functional, WeightedLoss):
        refs.extend(link.factor for link in functional.links)
    for step in functional.logits.rows:
        refs.extend(step.args)
    refs.append(getattr(functional, "target", None))
    return [r for r in refs if isinstance(r, fx.Node)]
