"""What must be computed for one exit: the functionals, the ATen nodes behind them, the Dynamo nodes they read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.products import value
from fuse_losses.graph.region import Region
from fuse_losses.graph.tail import Tail
from fuse_losses.head.algebra import PER_ROW, Functional, NllLoss
from fuse_losses.head.lift import Lifted, Unlifted, Wide
from fuse_losses.report.decline import Declined

FUNCTIONALS = (*PER_ROW, NllLoss)
SYM_SIZE = torch.ops.aten.sym_size.int


@dataclass
class ExitSlice:
    """exit: the Dynamo node to replace; root: its ATen value.

    functionals: ATen nodes whose value a fused operator makes; leaves: ATen nodes that a Dynamo node already holds.
    Everything between is copied.
    """

    exit: fx.Node
    root: fx.Node
    functionals: dict[fx.Node, Functional] = field(default_factory=dict)
    leaves: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        """The Dynamo nodes that the copy reads, in a fixed order (graphs are cache keys)."""
        return tuple(dict.fromkeys(self.leaves.values()))

    @property
    def differentiable(self) -> bool:
        return value(self.exit).requires_grad


def slice_exit(tail: Tail, region: Region, values: dict[fx.Node, Lifted], exit: fx.Node) -> ExitSlice:
    """Walk back from the exit to functionals and to values that exist already; raises Declined at anything else."""
    found = ExitSlice(exit, tail.results[exit])
    held = _held_before(tail, region, exit)
    seen: set[fx.Node] = set()
    stack = [found.root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        lifted = values.get(node)
        if isinstance(lifted, Unlifted):
            raise Declined(lifted.code, lifted.reason, calls.user_line(exit))
        if isinstance(lifted, FUNCTIONALS):
            functional = cast(Functional, lifted)
            found.functionals[node] = functional
            stack.extend(_refs(functional))
        elif node in held and node is not found.root:
            found.leaves[node] = held[node]
        elif isinstance(lifted, Wide) or node is tail.logits:
            raise Declined("logits_used", f"{exit.name} needs the logits themselves", calls.user_line(exit))
        elif node.op == "placeholder":
            raise Declined("failed", f"{node} stands for no node of the graph", calls.user_line(exit))
        elif node.target is not SYM_SIZE:  # a size is found anew, so that it does not keep the logits alive
            stack.extend(node.all_input_nodes)
    return found


def _held_before(tail: Tail, region: Region, exit: fx.Node) -> dict[fx.Node, fx.Node]:
    """ATen values that some Dynamo node outside of the region holds before `exit`."""
    held = {aten: dynamo for aten, dynamo in tail.inputs.items() if dynamo is not region.product.node}
    inside = set(region.nodes)
    for node in tail.nodes:
        if node is exit:
            break
        if node not in inside and node in tail.results:
            held.setdefault(tail.results[node], node)
    return held


def _refs(functional: Functional) -> list[fx.Node]:
    refs: list[Any] = [functional.logits.bias]
    for step in functional.logits.rows:
        refs.extend(step.args)
    refs.append(getattr(functional, "target", None))
    return [r for r in refs if isinstance(r, fx.Node)]
