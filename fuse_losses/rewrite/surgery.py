"""Put operators into a graph in place of a region's exits. Only ever called on a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from fuse_losses.graph.region import Region
from fuse_losses.rewrite.slices import ExitSlice
from fuse_losses.rewrite.writer import Writer

INHERITED = ("example_value", "stack_trace", "nn_module_stack", "source_fn_stack")


def replace_exits(
    graph: fx.Graph,
    slices: Sequence[ExitSlice],
    writer_for: Callable[[ExitSlice], Writer],
    replaced: dict[fx.Node, fx.Node],
) -> None:
    """Write each exit anew before it, with the writer made for it, and let the graph read that instead.

    replaced: exits that are gone, and what stands for them; what later slices read of them is found there.
    """
    for part in slices:
        for other in slices:  # a loop over rows reads what any of them reads
            other.leaves = {aten: replaced.get(dynamo, dynamo) for aten, dynamo in other.leaves.items()}
        with graph.inserting_before(part.exit):
            new = writer_for(part).ref(part.root)
        for key in INHERITED:
            if key in part.exit.meta:
                new.meta[key] = part.exit.meta[key]
        replaced[part.exit] = new
        part.exit.replace_all_uses_with(new)
        graph.erase_node(part.exit)
        for node in reversed(part.dead):
            graph.erase_node(node)


def erase_unused(graph: fx.Graph, region: Region) -> None:
    """Erase the nodes of a region that nobody reads any more."""
    # A write into the logits has no users; it may go only when nothing that remains reads the logits.
    members = set(region.nodes)
    if region.written and any(user not in members for node in region.nodes for user in node.users):
        return
    for node in reversed(region.nodes):
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)
