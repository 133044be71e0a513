"""The road: region -> lift -> plan -> rewrite, for every head of a captured graph."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module

from fuse_losses.graph import calls
from fuse_losses.graph.masks import number_masks
from fuse_losses.graph.products import Anchor, Product, find_anchors, returned_logits, value
from fuse_losses.graph.region import (
    Region,
    check_product,
    check_writes,
    find_regions,
    gradient_cuts,
)
from fuse_losses.graph.rows import Lost, RowAnalysis, Rowed, analyse
from fuse_losses.graph.tail import retrace
from fuse_losses.graph.transforms import check_transforms, transformed
from fuse_losses.head.algebra import Divergence, Functional, Head
from fuse_losses.head.lift import lift
from fuse_losses.head.sizes import hint
from fuse_losses.ops import composite
from fuse_losses.ops.chunked_rows import register_region
from fuse_losses.options import Options
from fuse_losses.plan.choose import Context, Plan, choose
from fuse_losses.report.decline import Decline, Declined, FusionError
from fuse_losses.report.report import HeadReport, Report, log
from fuse_losses.rewrite.generic import GenericWriter, loops
from fuse_losses.rewrite.joins import joins
from fuse_losses.rewrite.paired import KernelWriter
from fuse_losses.rewrite.slices import ExitSlice, Slicer
from fuse_losses.rewrite.surgery import erase_unused, replace_exits
from fuse_losses.rewrite.writer import Written

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True)
class Part:
    """Exits of a region with one gradient state, how they were lifted, and the plan for them."""

    slices: tuple[ExitSlice, ...]
    head: Head
    plan: Plan


def fuse(gm: fx.GraphModule, options: Options) -> tuple[fx.GraphModule, Report]:
    """Return the graph with its heads fused (the graph itself if there is none) and the report.

    Raises FusionError for a decline under options.strict; otherwise nothing that goes wrong here leaves this function.
    """
    report = Report(graphs=1)
    try:
        fused = _fuse_module(gm, options, report, checkpointed=False)
        _report_lone_logits(gm, options, report)
    except Exception as error:
        log.exception("rewriting failed; the graph goes to Inductor as it came")
        report = failed(report, error)
        fused = None
        if options.strict:
            raise FusionError(str(report)) from error
    if options.strict and any(h.decline and h.decline.code != "small_vocab" for h in report.declined):
        raise FusionError(str(report))
    return fused or gm, report


def failed(report: Report, error: Exception) -> Report:
    """The report of a graph in which fusing went wrong after all."""
    decline = Decline("failed", f"{type(error).__name__}: {error}")
    heads = [HeadReport("declined", h.summary, h.where, decline=decline) for h in report.fused]
    return Report([*report.declined, *heads] or [HeadReport("declined", "a head", "", decline=decline)], graphs=1)


def _fuse_module(gm: fx.GraphModule, options: Options, report: Report, checkpointed: bool) -> fx.GraphModule | None:
    """A rewritten copy of the module, or None if nothing in it was fused."""
    bodies = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is CHECKPOINT]
    if not bodies and not find_anchors(gm.graph):
        return None
    work = _copy(gm)
    changed = False
    for node in work.graph.nodes:
        if node.op == "call_function" and node.target is CHECKPOINT:
            name = node.args[0].target
            body = _fuse_module(getattr(work, name), options, report, checkpointed=True)
            if body is not None:
                setattr(work, name, body)
                changed = True
    changed |= _fuse_heads(work, options, report, checkpointed)
    if not changed:
        return None
    work.graph.lint()
    work.recompile()
    return work


def _report_lone_logits(gm: fx.GraphModule, options: Options, report: Report) -> None:
    """Say so where a head's logits leave a graph that has no loss for them."""
    if report.heads:
        return
    for product in returned_logits(gm.graph):
        where = calls.user_line(product.node)
        if (hint(product.vocab) or 0) >= options.min_vocab:
            decline = Decline("loss_elsewhere", f"{product.node.name} is returned, and no loss reads it here", where)
            report.heads.append(_declined(decline, [product], where))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(gm.graph, mapped))
    output.meta.update(next(n for n in reversed(gm.graph.nodes) if n.op == "output").meta)
    copy = _make_graph_module(gm, graph)  # lazy, as Dynamo's own: its Python is written when somebody wants it
    copy.meta.update(gm.meta)
    return copy


def _fuse_heads(gm: fx.GraphModule, options: Options, report: Report, checkpointed: bool) -> bool:
    anchors = {a.product.node: a for a in find_anchors(gm.graph)}
    products = [a.product for a in anchors.values() if _is_head(gm, a, options, report)]
    if not products:
        return False
    try:
        number_masks(gm.graph, products)
        tail = retrace(gm, products)
        cuts = gradient_cuts(tail)
        analysis = analyse(tail.graph, {n: p.vocab_dim for n, p in tail.sources.items()})
        values = lift(tail.graph, {n: (p, p.vocab_dim) for n, p in tail.sources.items()}, cuts)
        regions = find_regions(tail, analysis)
    except Exception as error:
        _decline_all(products, anchors, error, report)
        return False
    slicer = Slicer(tail, analysis, values, cuts)
    replaced: dict[fx.Node, fx.Node] = {}
    changed = False
    for region in regions:
        anchor = anchors[region.products[0].node]
        context = Context(value(region.products[0].node).device.type, checkpointed)
        parts = _lift(gm, slicer, region, anchor, context, options, report)
        for part in parts:
            _rewrite(gm.graph, region, part, analysis, replaced)
            report.heads.append(_fused(part, calls.user_line(anchor.loss)))
        if parts:
            erase_unused(gm.graph, region)
            changed = True
    for node in transformed(gm.graph) if changed else ():
        node.target = composite(node.target)
    return changed


def _is_head(gm: fx.GraphModule, anchor: Anchor, options: Options, report: Report) -> bool:
    """Whether a product is worth a look; what is certainly not fused is reported here."""
    vocab = hint(anchor.product.vocab) or 0
    where = calls.user_line(anchor.loss)
    decline: Decline | None = None
    if vocab < options.min_vocab:
        if anchor.hard:  # elsewhere it is a router's or an attention's softmax, no head
            decline = Decline("small_vocab", f"{vocab} classes, fewer than min_vocab={options.min_vocab}")
        else:
            return False
    try:
        if decline is None:
            check_transforms(gm.graph, anchor.product, where)
            check_product(anchor.product)
    except Declined as declined:
        decline = declined.decline
    if decline is not None and not anchor.quiet:
        report.heads.append(_declined(decline, [anchor.product], where))
    return decline is None


def _decline_all(products: Sequence[Product], anchors: dict[fx.Node, Anchor], error: Exception, report: Report) -> None:
    if isinstance(error, Declined):
        decline = error.decline
    else:
        log.error("reading the heads failed", exc_info=error)
        decline = Decline("failed", f"{type(error).__name__}: {error}")
    for product in products:
        if not anchors[product.node].quiet:
            report.heads.append(_declined(decline, [product], calls.user_line(anchors[product.node].loss)))


def _lift(
    gm: fx.GraphModule,
    slicer: Slicer,
    region: Region,
    anchor: Anchor,
    context: Context,
    options: Options,
    report: Report,
) -> list[Part]:
    """The parts of a region with their plans; empty, and reported, if it must be left alone."""
    where = calls.user_line(anchor.loss)
    decline = region.problem
    parts: list[Part] = []
    try:
        if decline is None:
            _check_returned(slicer, region)
            exits = [e for e in region.exits if e.users]
            if not exits:
                raise Declined("unsupported_loss", "no loss is computed from these logits", where)
            for learned in (True, False):
                group = [e for e in exits if value(e).requires_grad == learned]
                if group:
                    slices = _slices(slicer, gm.graph, region, group, learned and not context.checkpointed)
                    parts.append(_plan(gm, region, slices, context, options))
    except Declined as declined:
        decline = declined.decline
    except Exception as error:
        log.exception("reading the head at %s failed", where)
        decline = Decline("failed", f"{type(error).__name__}: {error}")
    if decline is not None:
        if not anchor.quiet:
            report.heads.append(_declined(decline, region.products, where))
        return []
    return parts


def _weighted(slicer: Slicer, graph: fx.Graph, region: Region, part: ExitSlice) -> ExitSlice | None:
    """The weighted sum that the exit ends in, if its weights are not written to before it is taken."""
    found = slicer.weighted(region, part)
    if found is not None:
        try:
            check_writes(graph, region, found.exit, found.reads, found.dead)
        except Declined:
            return None
    return found


def _slices(slicer: Slicer, graph: fx.Graph, region: Region, exits: Sequence[fx.Node], sums: bool) -> list[ExitSlice]:
    """The exits over what kernels make, else over what the chunked region makes; `sums`: look for weighted sums."""
    combined = slicer.combined(region, exits)
    gone = {n for s in combined for n in s.dead}
    lifted = [slicer.lifted(region, e) for e in exits if e not in gone]
    slices = [*combined, *(s for s in lifted if s is not None)]
    if len(slices) < len(combined) + len(lifted):
        slices = [slicer.by_rows(region, e) for e in exits]
    elif sums:
        # log-probs that several exits read are better made once
        alone = [len(slices) == 1 or any(isinstance(f, Divergence) for f in s.functionals.values()) for s in slices]
        slices = [(_weighted(slicer, graph, region, s) if w else None) or s for s, w in zip(slices, alone, strict=True)]
    for part in slices:
        if all(p.given for p in region.products) and part.selects_rows:
            reason = "rows are selected or reordered of logits that are given to this graph"
            raise Declined("logits_sliced", reason, calls.user_line(part.exit))
    return slices


def _plan(gm: fx.GraphModule, region: Region, slices: Sequence[ExitSlice], context: Context, options: Options) -> Part:
    operands = [n for p in region.products for n in p.operands]
    for part in slices:
        check_writes(gm.graph, region, part.exit, [*operands, *part.reads], part.dead)
    head = _head(region, slices)
    plan = choose(head, context, options)
    if isinstance(plan, Decline):
        raise Declined(plan.code, plan.reason, plan.where)
    return Part(tuple(slices), head, plan)


def _check_returned(slicer: Slicer, region: Region) -> None:
    """Logits may leave, and are kept; what a softmax has made of them may not."""
    for node in region.returned:
        aten = slicer.tail.aten(node)
        known = slicer.analysis.values.get(aten) if aten is not None else None
        if isinstance(known, Lost):
            raise Declined(known.code, known.reason, calls.user_line(node))
        if aten is None or _normalised(slicer.analysis, aten):
            raise Declined("log_probs_returned", f"{node.name} is returned", calls.user_line(node))


def _normalised(analysis: RowAnalysis, node: fx.Node) -> bool:
    """True if the whole row went into each of the node's values."""
    stack, seen = [node], set[fx.Node]()
    pointwise = torch.Tag.pointwise
    while stack:
        node = stack.pop()
        known = analysis.values.get(node)
        if node in seen or not (isinstance(known, Rowed) and known.wide):
            continue
        seen.add(node)
        if node.target in (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default):
            return True
        if pointwise in getattr(node.target, "tags", ()) and any(
            isinstance(v := analysis.values.get(a), Rowed) and not v.wide for a in node.all_input_nodes
        ):
            return True
        stack.extend(node.all_input_nodes)
    return False


def _rewrite(
    graph: fx.Graph, region: Region, part: Part, analysis: RowAnalysis, replaced: dict[fx.Node, fx.Node]
) -> None:
    written = Written()
    if part.plan.executor == "kernels":
        writer = functools.partial(KernelWriter, joins=joins(part.slices, graph))
        replace_exits(graph, part.slices, lambda s: writer(graph, region, s, part.plan, written, analysis), replaced)
        return
    shared = {"loops": loops(part.slices, graph), "register": register_region}
    replace_exits(
        graph, part.slices, lambda s: GenericWriter(graph, region, s, part.plan, written, analysis, **shared), replaced
    )


def _head(region: Region, slices: Sequence[ExitSlice]) -> Head:
    functionals: list[Functional] = []
    for part in slices:
        functionals.extend(f for f in part.functionals.values() if f not in functionals)
    operations = max((b.wide for part in slices for b in part.cuts.values()), default=0)
    vocab = max(hint(p.vocab) or 0 for p in region.products)
    product = region.products[0]
    rows: int | None = 1
    for dim, size in enumerate(value(product.node).shape):
        hinted = hint(size)
        if dim != product.vocab_dim:
            rows = None if rows is None or hinted is None else rows * hinted
    hidden = tuple(hint(value(p.x).shape[p.hidden_dim]) or 0 for p in region.products if not p.given)
    dtype = str(value(product.node).dtype).removeprefix("torch.")
    given = all(p.given for p in region.products)
    kinks = any(b.has_kinks for part in slices for b in part.cuts.values())
    return Head(tuple(functionals), vocab, hidden, rows, dtype, bool(region.returned), operations, given, kinks)


def _declined(decline: Decline, products: Sequence[Product], where: str) -> HeadReport:
    summary = " and ".join(f"{p.node.name} [*, {hint(p.vocab)}]" for p in products)
    return HeadReport("declined", summary, where, decline=decline)


def _fused(part: Part, where: str) -> HeadReport:
    head, plan = part.head, part.plan
    details = {
        "rows": head.rows if head.rows is not None else "dynamic",
        "hidden": head.hidden[0] if len(head.hidden) == 1 else list(head.hidden) or "none: the logits are given",
        "vocab": head.vocab,
        "dtype": head.dtype,
        "executor": plan.executor,
        "chunk_rows": plan.chunk_rows,
        "gradients": plan.gradients if any(s.differentiable for s in part.slices) else "none are needed",
        "because": plan.why,
    }
    if head.returned:
        details["logits"] = "kept (they are returned)"
    return HeadReport("fused", head.summary, where, details, plan.bytes_saved)
