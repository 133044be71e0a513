"""Losses that have no kernel and keep their rows apart: the table that the tests of the generic executor run over.

A function takes what it names, of tests/head/spellings.py's tensors or of these: m [2, 5] and m1 [10] masks of zeros
and ones, t [2, 5, V] and t1 [10, V] logits of a teacher, wT [V, H] and xT [2, 5, H] the teacher's head and hidden
states, cw [V] class weights (all without gradients); r [2, 5, 1] and r1 [10, 1] a number per row, s [2, 1, 1] one per
sequence, q [] one for all (with gradients).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.head.spellings import HIDDEN, ROWS, VOCAB, tensors
from tests.rewrite.distributions import DISTRIBUTIONS
from tests.rewrite.picks import OF_CLASSES, OF_ROWS, WITH_PRODUCTS

INF = float("inf")


def row_tensors(dtype: torch.dtype = torch.float32, rows: tuple[int, int] = ROWS) -> dict[str, Tensor]:
    """All that a function may name, from the current seed."""
    named = tensors(dtype, rows)
    t, r = torch.randn(*rows, VOCAB), torch.randn(*rows, 1)
    m = (torch.rand(rows) < 0.7).float()
    m[0, 0] = 1
    floats = {"t": t, "t1": t.flatten(0, 1), "m": m, "m1": m.flatten(), "cw": torch.rand(VOCAB) + 0.5}
    floats |= {"wT": torch.randn(VOCAB, HIDDEN), "xT": torch.randn(*rows, HIDDEN)}
    learned = {"r": r, "r1": r.flatten(0, 1), "s": torch.rand(rows[0], 1, 1) + 0.5, "q": torch.tensor(0.7)}
    named |= {name: value.to(dtype) for name, value in floats.items()}
    return named | {name: value.to(dtype).clone().requires_grad_() for name, value in learned.items()}


def row_args(fn: Callable[..., Any], dtype: torch.dtype = torch.float32, rows: tuple[int, int] = ROWS) -> list[Tensor]:
    named = row_tensors(dtype, rows)
    return [named[name] for name in inspect.signature(fn).parameters]


# ------------------------------------------------------------------------------------------------- targets and weights


def smoothing_by_hand(x1, w, c1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    return -(0.9 * log_probs.gather(1, c1[:, None]).squeeze(1) + 0.1 * log_probs.mean(-1)).mean()


def smoothing_of_ignored_rows(x, w, y):
    log_probs = F.linear(x, w).log_softmax(-1)
    valid = y != -100
    picked = log_probs.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    per_row = 0.9 * picked + 0.1 * log_probs.sum(-1) / VOCAB
    return -(per_row * valid).sum() / valid.sum()


def one_hot_targets(x1, w, c1):
    return -(F.one_hot(c1, VOCAB).to(x1.dtype) * F.linear(x1, w).log_softmax(-1)).sum(-1).mean()


def scattered_targets(x1, w, c1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    smooth = torch.full_like(log_probs, 0.01).scatter(1, c1[:, None], 0.9)
    return -(smooth * log_probs).sum(-1)


TARGETS = {
    "label smoothing": lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, label_smoothing=0.1),
    "label smoothing, sum": lambda x1, w, y1: F.cross_entropy(
        F.linear(x1, w), y1, label_smoothing=0.1, reduction="sum"
    ),
    "label smoothing, none": lambda x1, w, y1: F.cross_entropy(
        F.linear(x1, w), y1, label_smoothing=0.1, reduction="none"
    ),
    "label smoothing, classes in dim 1": lambda x, w, y: F.cross_entropy(F.linear(x, w).mT, y, label_smoothing=0.1),
    "label smoothing and weights": lambda x1, w, y1, cw: F.cross_entropy(F.linear(x1, w), y1, cw, label_smoothing=0.1),
    "smoothing by hand": smoothing_by_hand,
    "smoothing of ignored rows": smoothing_of_ignored_rows,
    "class weights": lambda x1, w, y1, cw: F.cross_entropy(F.linear(x1, w), y1, cw),
    "class weights, sum": lambda x1, w, y1, cw: F.cross_entropy(F.linear(x1, w), y1, cw, reduction="sum"),
    "class weights, none": lambda x1, w, y1, cw: F.cross_entropy(F.linear(x1, w), y1, cw, reduction="none"),
    "class weights, nll_loss": lambda x1, w, c1, cw: F.nll_loss(F.linear(x1, w).log_softmax(-1), c1, weight=cw),
    "class weights, classes in dim 1": lambda x, w, y, cw: F.cross_entropy(F.linear(x, w).transpose(1, 2), y, cw),
    "soft targets": lambda x1, w, t1: F.cross_entropy(F.linear(x1, w), t1.softmax(-1)),
    "soft targets, sum": lambda x1, w, t1: F.cross_entropy(F.linear(x1, w), t1.softmax(-1), reduction="sum"),
    "soft targets, none": lambda x1, w, t1: F.cross_entropy(F.linear(x1, w), t1.softmax(-1), reduction="none"),
    "soft targets, weights": lambda x1, w, t1, cw: F.cross_entropy(F.linear(x1, w), t1.softmax(-1), cw),
    "soft targets, classes in dim 1": lambda x, w, t: F.cross_entropy(F.linear(x, w).mT, t.softmax(-1).mT),
    "one-hot targets": one_hot_targets,
    "scattered targets": scattered_targets,
    "one class for all": lambda x1, w: F.linear(x1, w).log_softmax(-1)[:, 3],
    "several classes": lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c[..., None].repeat(1, 1, 3)),
    "candidate classes": lambda x, w, c: (
        F.linear(x, w).log_softmax(-1).gather(-1, torch.stack([c, c.flip(0), c.flip(1)], -1)).logsumexp(-1).mean()
    ),
}


# ------------------------------------------------------------------------------------------------- transforms of logits


def masked_fill_inf(x1, w, c1):
    z = F.linear(x1, w)
    taken = torch.arange(VOCAB) > 30
    return F.cross_entropy(z.masked_fill(taken, -INF), c1.clamp(max=30))


def masked_per_row(x, w, c, t):
    z = F.linear(x, w).masked_fill(t > 1.5, -1e9)
    return F.cross_entropy(z.flatten(0, 1), c.flatten(), reduction="none")


def where_inf(x1, w, c1):
    z = F.linear(x1, w)
    return F.cross_entropy(torch.where(torch.arange(VOCAB) < 31, z, -INF), c1.clamp(max=30))


def set_slice(x, w, c):
    z = F.linear(x, w)
    z[..., 31:] = -1e9
    return F.cross_entropy(z.view(-1, VOCAB), c.flatten().clamp(max=30))


def set_slice_of_float(x, w, y):
    z = F.linear(x, w).float()
    z[:, :, :3] = -INF
    return F.cross_entropy(z.view(-1, VOCAB), y.flatten().clamp(max=30).where(y.flatten() < 0, y.flatten() % 31 + 3))


def masked_in_place(x1, w, b, y1):
    z = F.linear(x1, w)
    z.masked_fill_(b > 3, -1e9)
    return F.cross_entropy(z, y1)


def rsqrt_softcap(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z * torch.rsqrt(1 + (z / 5).square()), y1)


def per_sequence_temperature(x, w, c, s):
    return (F.linear(x, w) / s).log_softmax(-1).gather(-1, c.unsqueeze(-1)).squeeze(-1)


def entropy_temperature(x, w, c):
    """A temperature from the row's own logits."""
    z = F.linear(x, w)
    z = z / z.std(-1, keepdim=True)
    return z.log_softmax(-1).gather(-1, c[..., None]).mean()


TRANSFORMS = {
    "masked_fill by class": lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w).masked_fill(b > 3, -1e9), y1),
    "masked_fill with -inf": masked_fill_inf,
    "masked_fill by row and class": masked_per_row,
    "masked_fill_ in place": masked_in_place,
    "where with -inf": where_inf,
    "where of a tensor": lambda x1, w, y1, t1: F.cross_entropy(torch.where(t1 > 2, t1, F.linear(x1, w)), y1),
    "slice set to -1e9": set_slice,
    "slice set to -inf": set_slice_of_float,
    "part of the vocabulary": lambda x1, w, y1: F.cross_entropy(F.linear(x1, w)[:, :31], y1.clamp(max=30)),
    "part of the vocabulary, 3-D": lambda x, w, c: (
        F.linear(x, w)[..., 2:33].log_softmax(-1).gather(-1, c.clamp(max=30)[..., None])
    ),
    "subset by index": lambda x, w, c: (
        F.linear(x, w)[..., torch.tensor([1, 5, 9, 30])].log_softmax(-1).gather(-1, (c % 4)[..., None])
    ),
    "logits and a null class": lambda x1, w, c1, r1: F.cross_entropy(torch.cat([F.linear(x1, w), r1], -1), c1),
    "subset by list": lambda x, w, c: F.linear(x, w)[..., [1, 5, 9, 30]].logsumexp(-1) - F.linear(x, w).logsumexp(-1),
    "over a size": lambda x, w, y: F.cross_entropy((F.linear(x, w) / x.shape[1]).mT, y, label_smoothing=0.1),
    "LoRA": lambda x1, w, wt, y1: F.cross_entropy(F.linear(x1, w) + 0.5 * (x1 @ wt), y1),
    "LoRA of low rank": lambda x1, w, y1: F.cross_entropy(
        F.linear(x1, w) + 0.5 * ((x1 @ w[:4].t()) @ w[:, :4].t()), y1
    ),
    "two heads multiplied": lambda x, w, wt, c: F.cross_entropy(
        (F.linear(x, w) * torch.sigmoid(x.tanh() @ wt)).flatten(0, 1), c.flatten()
    ),
    "learned temperature": lambda x1, w, y1, q: F.cross_entropy(F.linear(x1, w) * q.exp(), y1),
    "learned temperature, divisor": lambda x1, w, y1, q: F.cross_entropy(F.linear(x1, w) / q, y1),
    "temperature of a vector": lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w) * b[0].exp(), y1),
    "temperature per sequence": per_sequence_temperature,
    "temperature from the row": entropy_temperature,
    "bias per row": lambda x1, w, r1, y1: F.cross_entropy(F.linear(x1, w) * r1 + r1, y1),
    "scale per class": lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w) * b, y1),
    "bias after a softcap": lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w).tanh() + b, y1),
    "teacher's logits added": lambda x1, w, y1, t1: F.cross_entropy(F.linear(x1, w) + t1, y1),
    "less a number": lambda x1, w, y1: F.cross_entropy((F.linear(x1, w) - 1).tanh(), y1),
    "relu": lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).relu(), y1),
    "sigmoid softcap": lambda x1, w, y1: F.cross_entropy(10 * torch.sigmoid(F.linear(x1, w) / 5), y1),
    "rsqrt softcap": rsqrt_softcap,
    "clamped": lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).clamp(-2, 2), y1),
}


# ------------------------------------------------------------------------------------------------- several values


def logits_in_another_term(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + z.square().mean()


def topk_beside(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1), z.topk(3).values


def topk_indices_beside(x, w, y):
    z = F.linear(x, w)
    top = z.topk(3, dim=-1)
    return F.cross_entropy(z.view(-1, VOCAB), y.view(-1)), top.values, top.indices


def accuracy_beside(x1, w, c1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, c1), (z.argmax(-1) == c1).float().mean()


def max_beside(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1), z.max(-1).values.mean()


def max_indices_beside(x1, w, y1):
    z = F.linear(x1, w)
    top = z.max(-1)
    return F.cross_entropy(z, y1) + top.values.sum(), top.indices


def entropy_without_gradients(x1, w, y1):
    z = F.linear(x1, w)
    loss = F.cross_entropy(z, y1, label_smoothing=0.1)
    with torch.no_grad():
        p = z.softmax(-1)
        entropy = -(p * p.log()).sum(-1)
    return loss, entropy


def loss_under_no_grad(x1, w, c1):
    z = F.linear(x1, w)
    with torch.no_grad():
        weight = focal_weight(z, c1)
    return (weight * F.cross_entropy(z, c1, reduction="none")).mean()


def focal_weight(z, c1):
    return 1 - z.softmax(-1).gather(1, c1[:, None]).squeeze(1)


def detached_probs(x, w):
    log_probs = F.linear(x, w).log_softmax(-1)
    return (log_probs.exp().sqrt().detach() * log_probs).sum(-1)


def detached_logits(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + (z.detach().softmax(-1) * z).sum(-1).mean()


def two_exits_of_one_loop(x, w, t):
    student = F.linear(x, w).log_softmax(-1)
    return -(t.softmax(-1) * student).sum(-1).mean(), (student.exp() * student).sum(-1)


def two_exits_with_different_rows(x, w, c):
    z = F.linear(x, w)
    first = z[:, :-1].log_softmax(-1)
    return (first.exp() * first).sum(-1).mean() + (z[:, 1:].softmax(-1) ** 2).sum(-1).sum()


def row_weights_from_the_first(x1, w, c1):
    z = F.linear(x1, w)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return F.cross_entropy(z / (1 + entropy[:, None]), c1, reduction="none")


def rows_compared(x1, w):
    """Each row with the next one: two products, of two choices of rows."""
    p = F.linear(x1, w).softmax(-1)
    return (p[:-1] - p[1:]).abs().sum(-1)


def logits_returned(x, w, t):
    z = F.linear(x, w)
    return -(t.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(), z


def checkpointed(x, w, t):
    def body(x, w, t):
        return -(t.softmax(-1) * F.linear(x.tanh(), w).log_softmax(-1)).sum(-1).mean()

    return checkpoint(body, x, w, t, use_reentrant=False)


def loop_over_sequences(x, w, t):
    z = F.linear(x, w)
    return sum(-(b.softmax(-1) * a.log_softmax(-1)).sum(-1).mean() for a, b in zip(z, t, strict=True))


def autocast(x, w, t, m):
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x, w)
    return ((z.float().log_softmax(-1) * t.softmax(-1)).sum(-1) * m).sum()


def tied(w, c):
    z = F.linear(F.embedding(c, w).tanh(), w)
    return F.cross_entropy(z.mT, c.roll(1), label_smoothing=0.2)


def with_a_body(x, w, y, b):
    return F.cross_entropy((F.linear(x.tanh() * 2, w * 0.5) + b).sigmoid().mT, y) * x.sum()


VALUES = {
    "logits in another term": logits_in_another_term,
    "top-k beside the loss": topk_beside,
    "top-k and its indices": topk_indices_beside,
    "accuracy beside the loss": accuracy_beside,
    "max beside the loss": max_beside,
    "max and its indices": max_indices_beside,
    "entropy without gradients": entropy_without_gradients,
    "row weights without gradients": loss_under_no_grad,
    "detached probs": detached_probs,
    "detached logits": detached_logits,
    "two exits of one loop": two_exits_of_one_loop,
    "two exits with different rows": two_exits_with_different_rows,
    "row weights from the first": row_weights_from_the_first,
    "rows compared": rows_compared,
    "logits returned": logits_returned,
    "checkpointed": checkpointed,
    "loop over sequences": loop_over_sequences,
    "tied": tied,
    "with a body": with_a_body,
    "frozen head": lambda x1, w, y1: F.cross_entropy(F.linear(x1.tanh(), w.detach()), y1, label_smoothing=0.1),
    "frozen body": lambda x1, w, y1: F.cross_entropy(F.linear(x1.detach(), w), y1, label_smoothing=0.1),
    "bias of the product": lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w, b), y1, label_smoothing=0.1),
    "addmm": lambda x1, wt, b, y1: F.cross_entropy(torch.addmm(b, x1, wt), y1, label_smoothing=0.1),
    "einsum to classes in dim 1": lambda x, w, y: F.cross_entropy(
        torch.einsum("bth,vh->bvt", x, w), y, label_smoothing=0.1
    ),
    "four dims": lambda x, w, y: F.cross_entropy(F.linear(x, w).permute(2, 0, 1)[None], y[None], label_smoothing=0.1),
    "four dims, one row each": lambda x, w, y, cw: F.cross_entropy(
        F.linear(x, w).flatten(0, 1)[..., None, None], y.reshape(-1, 1, 1), cw, label_smoothing=0.1
    ),
    "four dims, soft targets": lambda x, w, t: F.cross_entropy(
        F.linear(x, w).mT[:, :, None], t.softmax(-1).mT[:, :, None], reduction="none"
    ),
    "rows swapped": lambda x, w, t: (
        -(t.transpose(0, 1).softmax(-1) * F.linear(x, w).transpose(0, 1).log_softmax(-1)).sum(-1).flatten()
    ),
    "one row, several classes": lambda x1, w, c1: F.linear(x1[:1], w).log_softmax(-1).gather(-1, c1[None, :3]),
    "one row, scattered": lambda x1, w, c1: F.linear(x1[:1], w).softmax(-1).scatter(-1, c1[None, :1], 0.5).sum(-1),
    "one row, smoothed": lambda x1, w, y1: F.cross_entropy(F.linear(x1[:1], w), y1[:1], label_smoothing=0.1),
    "one row": lambda x1, w, t1: -(t1[0].softmax(-1) * F.linear(x1[:1], w).log_softmax(-1)).sum(-1),
    "a row of one dim": lambda x1, w, t1: -(t1[0].softmax(-1) * F.linear(x1[0], w).log_softmax(-1)).sum(),
    "last position": lambda x, w, t: -(t[:, -1].softmax(-1) * F.linear(x, w)[:, -1].log_softmax(-1)).sum(-1),
}

GROUPS = {"targets": TARGETS, "transforms": TRANSFORMS, "distributions": DISTRIBUTIONS, "values": VALUES}
GROUPS |= {"rows": OF_ROWS, "classes": OF_CLASSES, "products": WITH_PRODUCTS}
ROW_WISE = [(f"{group}: {name}", fn) for group, table in GROUPS.items() for name, fn in table.items()]
