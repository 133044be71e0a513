"""The five tables of a public kernel index as workloads: losses of given logits or probabilities, and linear + JSD.

The functions are what a user would write; peers compile them, or bring a kernel of their own for the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuse_losses.bench.case import FULL, LOSS, BenchError, Case, NotApplicable, Workload
from fuse_losses.bench.losses import Data, Loss, linear_head, loss_case
from fuse_losses.bench.peers import OURS, Peer, plain_head

BETA = 0.5

# ---- the losses; `wide` is the dtype of the arithmetic, float64 for the reference


def megatron_cross_entropy(logits: Tensor, target: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """[S, B, V] -> [S, B]."""
    rows = F.cross_entropy(logits.to(wide).flatten(0, 1), target.flatten(), reduction="none")
    return rows.view(target.shape)


def cross_entropy(logits: Tensor, target: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    return F.cross_entropy(logits.to(wide), target)


def total_variation(p: Tensor, q: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    return (p.to(wide) - q.to(wide)).abs().sum(-1).mean() / 2


def jsd(student: Tensor, teacher: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities [T, V]; the mean over rows."""
    student, teacher = student.to(wide), teacher.to(wide)
    mixed = torch.log(BETA * teacher.exp() + (1 - BETA) * student.exp())
    of_teacher = F.kl_div(mixed, teacher, reduction="batchmean", log_target=True)
    return BETA * of_teacher + (1 - BETA) * F.kl_div(mixed, student, reduction="batchmean", log_target=True)


def linear_jsd(
    student: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, wide: torch.dtype = torch.float32
) -> Tensor:
    """Hidden states [T, H] of both sides, heads [V, H]."""
    ours = F.linear(student, weight).to(wide).log_softmax(-1)
    return jsd(ours, F.linear(teacher, teacher_weight).to(wide).log_softmax(-1), wide)


# ---- Liger's kernels for them; made once, outside of what is timed


def _liger(name: str, **options: Any) -> Callable[[], Loss]:
    def make() -> Loss:
        import liger_kernel.transformers as liger

        return getattr(liger, name)(**options)

    return make


def _liger_megatron() -> Loss:
    """Liger's cross entropy for this layout. The one for [N, V] returns losses in the dtype of the logits."""
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

    return LigerVocabParallelCrossEntropy()


def _liger_linear_jsd() -> Loss:
    loss = _liger("LigerFusedLinearJSD", jsd_beta=BETA)()
    return lambda *inputs: loss(*inputs, None)  # no labels: no row is ignored


# ---- the tables


@dataclass(frozen=True)
class Table:
    """`make(size, smoke, device)` is its data; `kernels` are those that a peer brings, made on demand."""

    name: str
    loss: Loss
    make: Callable[[int, bool, str], Data]
    sizes: tuple[int, ...]
    smoke_size: int
    kernels: Mapping[str, Callable[[], Loss]]


def _logits_by_sequence(vocab: int, smoke: bool, device: str) -> Data:
    shape = (6, 4) if smoke else (2048, 4)
    logits = torch.randn(*shape, vocab, dtype=torch.bfloat16, device=device)
    return Data((logits, torch.randint(vocab, shape, device=device)), loss_shape=shape)


def _logits(vocab: int, smoke: bool, device: str) -> Data:
    rows = 24 if smoke else 16384
    return Data((torch.randn(rows, vocab, device=device), torch.randint(vocab, (rows,), device=device)))


def _probabilities(vocab: int, smoke: bool, device: str) -> Data:
    rows = 24 if smoke else 16384
    return Data(tuple(torch.randn(rows, vocab, device=device).softmax(-1) for _ in range(2)))


def _log_probabilities(rows: int, smoke: bool, device: str) -> Data:
    vocab = 4096 if smoke else 128256
    return Data(tuple(torch.randn(rows, vocab, device=device).log_softmax(-1) for _ in range(2)))


def _heads(rows: int, smoke: bool, device: str) -> Data:
    """The student's hidden states and head learn, the teacher's are frozen."""
    vocab, hidden = (4096, 64) if smoke else (128256, 4096)
    student, teacher = (linear_head(rows, hidden, vocab, device) for _ in range(2))
    return Data((*student, *teacher), learns=(0, 1), shared=frozenset({1, 3}))


VOCABS = (4096, 32768, 131072)
TABLES: tuple[Table, ...] = (
    Table("megatron-ce", megatron_cross_entropy, _logits_by_sequence, VOCABS, 4096, {"liger": _liger_megatron}),
    Table("ce", cross_entropy, _logits, VOCABS, 4096, {"liger": _liger("LigerCrossEntropyLoss")}),
    Table("tvd", total_variation, _probabilities, VOCABS, 4096, {"liger": _liger("LigerTVDLoss")}),
    Table("jsd", jsd, _log_probabilities, (1024, 8192), 24, {"liger": _liger("LigerJSD", beta=BETA)}),
    Table("linear-jsd", linear_jsd, _heads, (1024, 4096, 8192), 24, {"liger": _liger_linear_jsd}),
)


def index(tables: tuple[Table, ...] = TABLES, tokens: int | None = None, smoke: bool = False) -> Workload:
    """`tables`, each at its sizes: vocabularies for losses of logits and probabilities, rows for the others."""
    if tokens is not None:
        raise BenchError("the tables have their own numbers of tokens; --sizes chooses among them")
    sizes = {table.name: (table.smoke_size,) if smoke else table.sizes for table in tables}
    cases = tuple(_case(table, size, smoke) for table in tables for size in sizes[table.name])
    name = tables[0].name if len(tables) == 1 else "index"
    parameters = {"sizes": sizes, "beta": BETA, "reference": "float64, every row"}
    return Workload(name, parameters, cases, repeats=20, peers=("eager", "inductor", "liger", OURS))


def _case(table: Table, size: int, smoke: bool) -> Case:
    def make(device: str) -> Data:
        return table.make(size, smoke, device)

    def kernel(peer: Peer) -> Loss:
        if peer.name in table.kernels:
            return table.kernels[peer.name]()
        if peer.head is not plain_head:
            raise NotApplicable("has no such loss")
        return table.loss

    return loss_case(table.name, size, make, table.loss, kernel, phases=(LOSS, FULL))


INDEX = {table.name: partial(index, (table,)) for table in TABLES} | {"index": index}
