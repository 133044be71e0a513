"""The road: region -> lift -> plan -> rewrite, for every head of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fuse_losses.graph import calls
from fuse_losses.graph.products import Anchor, Product, find_anchors, value
from fuse_losses.graph.region import Region, check_plain, check_writes, find_region, gradient_cuts
from fuse_losses.graph.tail import Tail, retrace
from fuse_losses.head.algebra import Functional, Head
from fuse_losses.head.lift import Lifted, Unlifted, Wide, lift
from fuse_losses.options import Options
from fuse_losses.plan.choose import Context, Plan, choose
from fuse_losses.report.decline import Decline, Declined, FusionError
from fuse_losses.report.report import HeadReport, Report, log
from fuse_losses.rewrite.slices import ExitSlice, slice_exit
from fuse_losses.rewrite.surgery import rewrite

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(frozen=True)
class Lifting:
    """A region with what was lifted from it, ready for plan and rewrite."""

    region: Region
    slices: tuple[ExitSlice, ...]
    head: Head


def fuse(gm: fx.GraphModule, options: Options) -> tuple[fx.GraphModule, Report]:
    """Return the graph with its heads fused (the graph itself if there is none) and the report.

    Raises FusionError for a decline under options.strict; otherwise nothing that goes wrong here leaves this function.
    """
    report = Report(graphs=1)
    try:
        fused = _fuse_module(gm, options, report, checkpointed=False)
    except Exception as error:
        log.exception("rewriting failed; the graph goes to Inductor as it came")
        heads = [
            _declined(Decline("failed", f"{type(error).__name__}: {error}"), h.summary, h.where) for h in report.fused
        ]
        report = Report(heads or [_declined(Decline("failed", f"{type(error).__name__}: {error}"))], graphs=1)
        fused = None
        if options.strict:
            raise FusionError(str(report)) from error
    if options.strict and any(h.decline and h.decline.code != "small_vocab" for h in report.declined):
        raise FusionError(str(report))
    return fused or gm, report


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
    for anchor in find_anchors(work.graph):
        changed |= _fuse_head(work, anchor, options, report, checkpointed)
    if not changed:
        return None
    work.recompile()
    return work


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapped)
    node = graph.output(output)
    node.meta.update(next(n for n in reversed(gm.graph.nodes) if n.op == "output").meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    return copy


def _fuse_head(gm: fx.GraphModule, anchor: Anchor, options: Options, report: Report, checkpointed: bool) -> bool:
    product = anchor.product
    where = calls.user_line(anchor.loss)
    vocab = _hint(product.vocab)
    if not anchor.hard and (vocab or 0) < options.min_vocab:
        return False  # a router's or an attention's softmax, not a head
    summary = f"{product.node.name} [*, {vocab}]"
    context = Context(value(product.node).device.type, checkpointed)
    try:
        lifting = _lift(gm, product)
        summary = lifting.head.summary
        plan = choose(lifting.head, context, options)
    except Declined as declined:
        plan = declined.decline
    except Exception as error:
        log.exception("reading the head at %s failed", where)
        plan = Decline("failed", f"{type(error).__name__}: {error}")
    if isinstance(plan, Decline):
        report.heads.append(_declined(plan, summary, where))
        return False
    report.heads.append(_fused(lifting, plan, where))
    rewrite(gm.graph, lifting.region, lifting.slices, plan)
    return True


def _lift(gm: fx.GraphModule, product: Product) -> Lifting:
    check_plain(gm.graph, product)
    tail = retrace(gm, product)
    cuts = [tail.logits if n is product.node else tail.results[n] for n in gradient_cuts(tail) if _known(tail, n)]
    values = lift(tail.graph, tail.logits, product.vocab_dim, cuts)
    alive = {n for n, a in tail.results.items() if isinstance(values.get(a), (Wide, Unlifted))}
    region = find_region(tail, alive)
    _check_returned(tail, region, values)
    slices = tuple(slice_exit(tail, region, values, exit) for exit in region.exits)
    slices = tuple(s for s in slices if s.exit.users)
    if not any(s.functionals for s in slices):
        raise Declined("unsupported_loss", "no loss is computed from these logits", calls.user_line(product.node))
    operands = [n for n in (product.x, product.weight, product.bias) if n is not None]
    for part in slices:
        check_writes(gm.graph, region, part.exit, [*operands, *part.reads])
    return Lifting(region, slices, _head(product, region, slices))


def _known(tail: Tail, node: fx.Node) -> bool:
    return node is tail.product.node or node in tail.results


def _check_returned(tail: Tail, region: Region, values: dict[fx.Node, Lifted]) -> None:
    for node in region.returned:
        lifted = values[tail.logits if node is region.product.node else tail.results[node]]
        if isinstance(lifted, Unlifted):
            raise Declined(lifted.code, lifted.reason, calls.user_line(node))
        if isinstance(lifted, Wide) and lifted.form != "logits":
            raise Declined("log_probs_returned", f"{node.name} is returned", calls.user_line(node))


def _head(product: Product, region: Region, slices: tuple[ExitSlice, ...]) -> Head:
    learned = [s for s in slices if s.differentiable] or list(slices)
    functionals: list[Functional] = []
    for part in learned:
        functionals.extend(f for f in part.functionals.values() if f not in functionals)
    tensor = value(product.node)
    rows: int | None = 1
    for dim, size in enumerate(tensor.shape):
        hinted = _hint(size)
        if dim != product.vocab_dim:
            rows = None if rows is None or hinted is None else rows * hinted
    return Head(
        tuple(functionals),
        vocab=_hint(product.vocab) or 0,
        hidden=_hint(value(product.x).shape[product.hidden_dim]) or 0,
        rows=rows,
        dtype=str(tensor.dtype).removeprefix("torch."),
        returned=bool(region.returned),
    )


def _hint(size: Any) -> int | None:
    """The size, or the size that a symbol had when it was captured; reading it adds no guard."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if isinstance(hint, int) else None


def _declined(decline: Decline, summary: str = "a head", where: str = "") -> HeadReport:
    return HeadReport("declined", summary, where, decline=decline)


def _fused(lifting: Lifting, plan: Plan, where: str) -> HeadReport:
    head = lifting.head
    details = {
        "rows": head.rows if head.rows is not None else "dynamic",
        "hidden": head.hidden,
        "vocab": head.vocab,
        "dtype": head.dtype,
        "chunk_rows": plan.chunk_rows,
        "gradients": plan.gradients,
        "because": plan.why,
    }
    if head.returned:
        details["logits"] = "kept (they are returned)"
    return HeadReport("fused", head.summary, where, details, plan.bytes_saved)
