"""From a Head to a Plan: which operator, how many rows at a time. Plain arithmetic; no graph, no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from fuse_losses.head.algebra import Divergence, Functional, Head, LogSumExp, NllLoss, WeightedLoss
from fuse_losses.options import Options
from fuse_losses.plan.chunk import default_chunk_rows
from fuse_losses.report.decline import Decline

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Context:
    """What surrounds the head: where it runs, and whether its forward will run twice."""

    device: str
    checkpointed: bool = False


@dataclass(frozen=True)
class Plan:
    """How a head is computed.

    executor: "kernels" (specialised operators) or "rows" (the region's own operations, chunk by chunk); gradients:
    "forward" (made with the loss, three products), "recompute" (logits made again in backward, four products) or
    "backward" (of given logits);
    compiled: the chunk's operations are compiled into kernels of their own; bytes_saved: logits, gradients and copies
    that eager would hold, less the chunk; None if the number of rows is not known.
    """

    executor: str
    gradients: str
    chunk_rows: int
    accumulate: str
    compiled: bool
    why: str
    bytes_saved: int | None


def choose(head: Head, context: Context, options: Options) -> Plan | Decline:
    """Decide how to compute the head, or why not to."""
    if head.vocab < options.min_vocab:
        return Decline("small_vocab", f"{head.vocab} classes, fewer than min_vocab={options.min_vocab}")
    if head.given and head.operations:
        return Decline("no_gain", "the logits are given to this graph, and this loss over them has no kernel")
    gpu = context.device == "cuda"
    itemsize = ITEMSIZE[head.dtype]
    # where there is no kernel, a chunk is worked on in float32; so are the logits of two distributions, side by side
    pairs = any(isinstance(_per_row(f), Divergence) for f in head.functionals)
    alive = max(itemsize, 4) * max(1, len(head.hidden)) if pairs else itemsize if gpu else max(itemsize, 4)
    chunk_rows = default_chunk_rows(head.vocab, alive, context.device)
    if head.operations:
        # the operations of a row and what their backward keeps are alive together
        chunk_rows = max(FEWEST_ROWS[gpu], chunk_rows // LIVE_VALUES)
        executor, gradients = "rows", "recompute"
        why = f"{head.operations} operations over the vocabulary have no kernel of their own"
    else:
        executor, (gradients, why) = "kernels", _gradients(head, context)
    chunk_rows = options.chunk_rows or chunk_rows
    saved = None
    if head.rows is not None and not head.given:
        # eager keeps the logits and log-probs for backward and makes their gradient; the chunk is what is left of them
        whole = head.rows * head.vocab * itemsize * len(head.hidden)
        chunk = min(chunk_rows, head.rows) * head.vocab * itemsize
        saved = max(0, whole * (1 if head.returned else 2) - chunk)
    # compiled, equal values may come out unequal in their last bit: a gradient that jumps at a tie would show it
    compiled = gpu and executor == "rows" and not head.kinks
    return Plan(executor, gradients, chunk_rows, options.accumulate, compiled, why, saved)


LIVE_VALUES = 8  # [chunk, V] values of a region that are alive at once, about
FEWEST_ROWS = {True: 128, False: 16}  # a chunk of fewer rows wastes a GPU's, a CPU's products


def _gradients(head: Head, context: Context) -> tuple[str, str]:
    if head.given:
        return "backward", "the logits are given to this graph, and their gradient is made from them in backward"
    if not all(_sums_rows(f) for f in head.functionals):
        kinds = "logsumexp" if any(isinstance(f, LogSumExp) for f in head.functionals) else "per-row values"
        return "recompute", f"{kinds} leave the head, so the row weights are known only in backward"
    picks = {
        (id(f.target), f.ignore_index, f.logits) for f in head.functionals if isinstance(f, (NllLoss, WeightedLoss))
    }
    if len(picks) > 1:
        return "recompute", "several losses read these logits"
    if context.checkpointed:
        return "recompute", "the head is checkpointed: its forward runs twice, its gradients must not"
    return "forward", "every row's weight is known before the loss"


def _per_row(functional: Functional) -> Functional:
    return functional.per_row if isinstance(functional, WeightedLoss) else functional


def _sums_rows(functional: Functional) -> bool:
    return isinstance(functional, (NllLoss, WeightedLoss)) or (isinstance(functional, Divergence) and functional.summed)
