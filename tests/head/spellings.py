"""How people write one head: the table that the tests of values and of summaries run over.

A function takes what it names: x [2, 5, H], x1 [10, H], w [V, H], wt [H, V], b [V], b2 [1, V], y [2, 5] (some -100),
y1 [10] (the same), c [2, 5] and c1 [10] (none ignored).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, HIDDEN, VOCAB = (2, 5), 6, 37
IGNORE = -100


def tensors(dtype: torch.dtype = torch.float32, rows: tuple[int, int] = ROWS) -> dict[str, Tensor]:
    """The tensors that a spelling may ask for, from the current seed."""
    x = torch.randn(*rows, HIDDEN)
    w, b = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    c = torch.randint(0, VOCAB, rows)
    y = c.clone()
    y[0, 1] = y[1, -1] = IGNORE
    floats = {"x": x, "x1": x.flatten(0, 1), "w": w, "wt": w.t().contiguous(), "b": b, "b2": b[None]}
    named = {name: t.to(dtype).clone().requires_grad_() for name, t in floats.items()}
    return {**named, "y": y, "y1": y.flatten(), "c": c, "c1": c.flatten()}


@dataclass(frozen=True)
class Spelling:
    """`summary`: of the head's report; for most, what is behind "linear + "."""

    name: str
    fn: Callable[..., Tensor]
    summary: str

    def args(self, dtype: torch.dtype = torch.float32, rows: tuple[int, int] = ROWS) -> list[Tensor]:
        available = tensors(dtype, rows)
        return [available[name] for name in inspect.signature(self.fn).parameters]


MEAN, SUM, LOG_PROB = "cross entropy (mean)", "cross entropy (sum)", "log-prob"
WEIGHTED = "weighted sum of log-probs"


# ------------------------------------------------------------------------------------------------- cross entropy

CROSS_ENTROPY = {
    "defaults": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1), MEAN),
    "sum": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, reduction="sum"), SUM),
    "none": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, reduction="none"), LOG_PROB),
    "keywords": (lambda x1, w, y1: F.cross_entropy(input=F.linear(x1, w), target=y1, ignore_index=-100), MEAN),
    "positional": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, None, None, -100, None, "sum", 0.0),
        SUM,
    ),
    "module in forward": (lambda x1, w, y1: nn.CrossEntropyLoss()(F.linear(x1, w), y1), MEAN),
    "module in forward, sum": (
        lambda x1, w, y1: nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")(F.linear(x1, w), y1),
        SUM,
    ),
    "module in forward, none": (
        lambda x1, w, y1: nn.CrossEntropyLoss(reduction="none")(F.linear(x1, w), y1),
        LOG_PROB,
    ),
    "size_average=False": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, size_average=False), SUM),
    "reduce=False": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, reduce=False), LOG_PROB),
    "size_average=True": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, size_average=True), MEAN),
    "zero smoothing": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, label_smoothing=0.0), MEAN),
    "ignore_index=-1": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1.clamp(min=-1), ignore_index=-1),
        MEAN,
    ),
    "ignore_index=0": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1.clamp(min=0), ignore_index=0, reduction="sum"),
        SUM,
    ),
    "ignore_index is a class": (lambda x1, w, c1: F.cross_entropy(F.linear(x1, w), c1, ignore_index=3), MEAN),
    "all ignored, sum": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), torch.full_like(y1, -100), reduction="sum"),
        SUM,
    ),
    "nll_loss of log_softmax": (lambda x1, w, y1: F.nll_loss(F.linear(x1, w).log_softmax(-1), y1), MEAN),
    "nll_loss, sum": (
        lambda x1, w, y1: F.nll_loss(F.log_softmax(F.linear(x1, w), dim=1), y1, reduction="sum"),
        SUM,
    ),
    "NLLLoss of LogSoftmax": (
        lambda x1, w, y1: nn.NLLLoss()(nn.LogSoftmax(dim=-1)(F.linear(x1, w)), y1),
        MEAN,
    ),
    "nll_loss of log of softmax": (lambda x1, w, c1: F.nll_loss(F.linear(x1, w).softmax(-1).log(), c1), MEAN),
    "linear_cross_entropy": (lambda x1, w, y1: F.linear_cross_entropy(x1, w, y1), MEAN),
    "one row": (lambda x1, w, y1: F.cross_entropy(F.linear(x1[0], w), y1[0]), MEAN),
    "times a number": (lambda x1, w, y1: 0.5 * F.cross_entropy(F.linear(x1, w), y1), MEAN),
    "over a count": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, reduction="sum") / (y1 != -100).sum(),
        SUM,
    ),
    "over a clamped count": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, reduction="sum") / (y1 > 0).sum().clamp(min=1),
        SUM,
    ),
    "plus a number, in place": (lambda x1, w, y1: _plus_(F.cross_entropy(F.linear(x1, w), y1), 1.5), MEAN),
    "plus another loss, in place": (
        lambda x1, w, y1: _plus_(F.cross_entropy(F.linear(x1, w), y1), x1.square().mean()),
        MEAN,
    ),
    "masked mean of none": (
        lambda x1, w, y1: (F.cross_entropy(F.linear(x1, w), y1, reduction="none") * (y1 > 9)).sum() / 7,
        WEIGHTED,
    ),
}


def _plus_(loss, other):
    loss += other
    return loss


# ------------------------------------------------------------------------------------------------- log-probabilities

LOG_PROBS = {
    "gather": (lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c.unsqueeze(-1)).squeeze(-1), LOG_PROB),
    "gather, keywords": (
        lambda x, w, c: torch.gather(F.linear(x, w).log_softmax(dim=-1), dim=2, index=c[..., None]),
        LOG_PROB,
    ),
    "torch.gather": (
        lambda x1, w, c1: torch.gather(torch.log_softmax(F.linear(x1, w), 1), 1, c1[:, None])[:, 0],
        LOG_PROB,
    ),
    "F.log_softmax in float32": (
        lambda x, w, c: F.log_softmax(F.linear(x, w), dim=-1, dtype=torch.float32).gather(2, c[:, :, None]),
        LOG_PROB,
    ),
    "take_along_dim": (
        lambda x, w, c: torch.take_along_dim(F.linear(x, w).log_softmax(-1), c[..., None], dim=-1).squeeze(-1),
        LOG_PROB,
    ),
    "arange index": (lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(10), c1], LOG_PROB),
    "arange of len": (
        lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(c1.shape[0]), c1].mean(),
        WEIGHTED,
    ),
    "two aranges": (
        lambda x, w, c: F.linear(x, w).log_softmax(-1)[torch.arange(2)[:, None], torch.arange(5)[None], c],
        LOG_PROB,
    ),
    "negative index": (
        lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(10), c1 - VOCAB],
        LOG_PROB,
    ),
    "gather less logsumexp": (
        lambda x, w, c: _selected_less_lse(F.linear(x, w), c),
        "selected logit + logsumexp",
    ),
    "less logsumexp, then gather": (
        lambda x, w, c: _normalised(F.linear(x, w)).gather(-1, c[..., None]),
        "logsumexp + log-prob",
    ),
    "less logsumexp, then index": (
        lambda x1, w, c1: _normalised(F.linear(x1, w))[torch.arange(10), c1].sum(),
        "logsumexp + log-prob",
    ),
    "cross entropy, none, negated": (
        lambda x, w, y: -F.cross_entropy(F.linear(x, w).flatten(0, 1), y.view(-1), reduction="none").view_as(y),
        LOG_PROB,
    ),
    "selected and logsumexp": (lambda x1, w, c1: _selected_and_lse(F.linear(x1, w), c1), "selected logit + logsumexp"),
    "z loss": (lambda x1, w, y1: _z_loss(F.linear(x1, w), y1), f"{MEAN} + logsumexp"),
    "logsumexp alone": (lambda x, w: F.linear(x, w).logsumexp(-1), "logsumexp"),
    "logsumexp, keepdim": (lambda x, w: torch.logsumexp(F.linear(x, w), dim=2, keepdim=True), "logsumexp"),
    "negative log-prob": (lambda x1, w, c1: (-F.linear(x1, w).log_softmax(1)).gather(1, c1[:, None]), LOG_PROB),
    "exp of log-prob": (
        lambda x1, w, c1: F.linear(x1, w).log_softmax(1).gather(1, c1[:, None]).exp().sum(),
        LOG_PROB,
    ),
    "setitem on rows": (lambda x, w, c: _masked(F.linear(x, w), c), LOG_PROB),
    "rows times a number, in place": (lambda x, w, c: _tripled(F.linear(x, w), c), LOG_PROB),
}


def _selected_less_lse(z, c):
    return z.gather(-1, c[..., None]).squeeze(-1) - torch.logsumexp(z, dim=-1)


def _normalised(z):
    return z - torch.logsumexp(z, dim=-1, keepdim=True)


def _selected_and_lse(z, c):
    return z[torch.arange(10), c] * 0.3 + z.logsumexp(-1).square()


def _z_loss(z, y):
    return F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).square().mean()


def _masked(z, c):
    log_prob = z.log_softmax(-1).gather(-1, c[..., None]).squeeze(-1)
    log_prob[c < 9] = 0
    return log_prob.sum(1)


def _tripled(z, c):
    log_prob = z.log_softmax(-1).gather(-1, c[..., None]).squeeze(-1)
    log_prob *= 3
    return log_prob


# ------------------------------------------------------------------------------------------------- transforms

TRANSFORMS = {
    "float": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).float(), y1), MEAN),
    "to float32": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).to(torch.float32), y1), MEAN),
    "float twice": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).float().float(), y1), MEAN),
    "type_as": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).type_as(x1), y1), MEAN),
    "times": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w) * 0.25, y1), f"{MEAN} (scale 0.25)"),
    "times from the left": (lambda x1, w, y1: F.cross_entropy(3 * F.linear(x1, w), y1), f"{MEAN} (scale 3)"),
    "over": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).float() / 4, y1), f"{MEAN} (scale 0.25)"),
    "torch.div": (lambda x1, w, y1: F.cross_entropy(torch.div(F.linear(x1, w), 0.5), y1), f"{MEAN} (scale 2)"),
    "negated": (lambda x1, w, y1: F.cross_entropy(-F.linear(x1, w), y1), f"{MEAN} (scale -1)"),
    "scale twice": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w) * 3 / 2, y1), f"{MEAN} (scale 1.5)"),
    "div_ in place": (lambda x1, w, y1: F.cross_entropy(_div_(F.linear(x1, w)), y1), f"{MEAN} (scale 0.5)"),
    "softcap": (
        lambda x1, w, y1: F.cross_entropy((torch.tanh(F.linear(x1, w) / 3) * 3).float(), y1),
        f"{MEAN} (softcap 3)",
    ),
    "softcap after float": (
        lambda x1, w, y1: F.cross_entropy(3 * F.tanh(F.linear(x1, w).float() / 3), y1),
        f"{MEAN} (softcap 3)",
    ),
    "softcap by method": (
        lambda x1, w, y1: F.cross_entropy((F.linear(x1, w) / 3).tanh().mul(3), y1),
        f"{MEAN} (softcap 3)",
    ),
    "softcap and temperature": (
        lambda x1, w, c1: ((F.linear(x1, w) / 3).tanh() * 3 / 2).log_softmax(-1).gather(1, c1[:, None]),
        f"{LOG_PROB} (softcap 1.5, scale 0.5)",
    ),
    "bias": (lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w, b), y1), MEAN),
    "bias added": (lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w) + b, y1), f"{MEAN} (bias)"),
    "bias from the left": (
        lambda x, w, b, c: (b + F.linear(x, w)).log_softmax(-1).gather(-1, c[..., None]),
        f"{LOG_PROB} (bias)",
    ),
    "bias [1, V]": (lambda x1, w, b2, y1: F.cross_entropy(F.linear(x1, w) + b2, y1), f"{MEAN} (bias)"),
    "bias twice": (lambda x1, w, b, b2, y1: F.cross_entropy(F.linear(x1, w, b) + b2, y1), f"{MEAN} (bias)"),
    "bias in place": (lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w).add_(b), y1), f"{MEAN} (bias)"),
    "bias, then scale": (
        lambda x1, w, b, y1: F.cross_entropy((F.linear(x1, w) + b) / 2, y1),
        f"{MEAN} (bias, scale 0.5)",
    ),
    "bias, then softcap": (
        lambda x1, w, b, y1: F.cross_entropy(torch.tanh(F.linear(x1, w, b) / 3) * 3, y1),
        f"{MEAN} (softcap 3)",
    ),
}


def _div_(z):
    z.div_(2)
    return z


# ------------------------------------------------------------------------------------------------- views and rows

VIEWS = {
    "view(-1, V)": (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, VOCAB), y.view(-1)), MEAN),
    "view(-1, size)": (lambda x, w, y: F.cross_entropy(_view(F.linear(x, w)), y.view(-1)), MEAN),
    "reshape": (lambda x, w, y: F.cross_entropy(F.linear(x, w).reshape(10, -1), y.reshape(10)), MEAN),
    "flatten": (lambda x, w, y: F.cross_entropy(F.linear(x, w).flatten(0, 1), y.flatten()), MEAN),
    "contiguous": (lambda x, w, y: F.cross_entropy(F.linear(x, w).contiguous().view(10, VOCAB), y.flatten()), MEAN),
    "transpose(1, 2)": (lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(1, 2), y), MEAN),
    "permute, sum": (lambda x, w, y: F.cross_entropy(F.linear(x, w).permute(0, 2, 1), y, reduction="sum"), SUM),
    "transpose, none": (lambda x, w, y: F.cross_entropy(F.linear(x, w).mT, y, reduction="none"), LOG_PROB),
    "rows swapped": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(0, 1).reshape(10, VOCAB), y.t().flatten()),
        MEAN,
    ),
    "unsqueeze, squeeze": (
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).unsqueeze(0).squeeze(0), y1),
        MEAN,
    ),
    "classes last of four dims": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).view(1, 2, 5, VOCAB).permute(0, 3, 1, 2), y[None]),
        MEAN,
    ),
    "logits[:, :-1]": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, :-1].reshape(-1, VOCAB), y[:, 1:].reshape(-1)),
        MEAN,
    ),
    "logits[..., :-1, :]": (
        lambda x, w, y: F.cross_entropy(
            F.linear(x, w)[..., :-1, :].contiguous().view(-1, VOCAB), y[..., 1:].contiguous().view(-1)
        ),
        MEAN,
    ),
    "labels padded": (
        lambda x, w, y: F.cross_entropy(
            F.linear(x, w).float().view(-1, VOCAB), F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        ),
        MEAN,
    ),
    "last rows": (lambda x, w, c: F.linear(x, w)[:, -3:].log_softmax(-1).gather(-1, c[:, -3:, None]), LOG_PROB),
    "sliced twice": (
        lambda x, w, c: F.linear(x, w)[:, :-1][:, -2:].log_softmax(-1).gather(-1, c[:, -2:, None]),
        LOG_PROB,
    ),
    "every other row": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w)[::2], y1[::2]), MEAN),
    "last position": (lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, -1], y[:, 0]), MEAN),
    "one sequence": (lambda x, w, y: F.cross_entropy(F.linear(x, w)[0], y[0]), MEAN),
    "hidden sliced": (lambda x, w, y: F.cross_entropy(F.linear(x[:, :-1], w).mT, y[:, 1:]), MEAN),
    "whole slice": (lambda x, w, y: F.cross_entropy(F.linear(x, w)[:, slice(0, None), :].mT, y), MEAN),
    "rows flipped": (lambda x, w, c: F.cross_entropy(F.linear(x, w).flip(0).mT, c), MEAN),
    "rows rolled": (lambda x, w, y: F.cross_entropy(F.linear(x, w).roll(1, 1).reshape(-1, VOCAB), y.flatten()), MEAN),
    "rows by an index": (lambda x1, w, c1: F.cross_entropy(F.linear(x1, w)[c1 % 10], c1), MEAN),
    "index_select": (lambda x1, w, c1: F.cross_entropy(F.linear(x1, w).index_select(0, c1 % 10), c1), MEAN),
    "a position of each sequence": (
        lambda x, w, c: F.cross_entropy(F.linear(x, w)[torch.arange(c.shape[0]), c[:, 0] % 5], c[:, 1]),
        MEAN,
    ),
    "positions by an index": (lambda x, w, c: F.cross_entropy(F.linear(x, w)[:, c[0] % 5].mT, c), MEAN),
    "an index for each of some rows": (
        lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(2, 6), c1[:4]],
        LOG_PROB,
    ),
    "loop over sequences": (
        lambda x, w, c: _per_sequence(F.linear(x, w), c),
        LOG_PROB,
    ),
}


def _view(z):
    return z.view(-1, z.size(-1))


def _per_sequence(z, c):
    rows = [row.log_softmax(-1).gather(-1, label[:, None])[:, 0] for row, label in zip(z, c, strict=True)]
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------------- products

PRODUCTS = {
    "matmul of w.T": (lambda x1, w, y1: F.cross_entropy(x1 @ w.T, y1), MEAN),
    "matmul of w.t()": (lambda x, w, y: F.cross_entropy(torch.matmul(x, w.t()).mT, y), MEAN),
    "matmul of [H, V]": (lambda x, wt, y: F.cross_entropy((x @ wt).view(-1, VOCAB), y.view(-1)), MEAN),
    "mm": (lambda x1, wt, y1: F.cross_entropy(torch.mm(x1, wt), y1), MEAN),
    "mm by method": (lambda x1, wt, y1: F.cross_entropy(x1.mm(wt), y1), MEAN),
    "addmm": (lambda x1, wt, b, y1: F.cross_entropy(torch.addmm(b, x1, wt), y1), MEAN),
    "addmm by method": (lambda x1, wt, b, y1: F.cross_entropy(b.addmm(x1, wt), y1), MEAN),
    "einsum vh": (lambda x, w, y: F.cross_entropy(torch.einsum("bth,vh->btv", x, w).mT, y), MEAN),
    "einsum hv": (lambda x, wt, y: F.cross_entropy(torch.einsum("bth,hv->btv", x, wt).mT, y), MEAN),
    "einsum, weight first": (
        lambda x, w, y: F.cross_entropy(torch.einsum("vh,bth->btv", w, x).mT, y),
        MEAN,
    ),
    "bmm of an expanded weight": (
        lambda x, wt, y: F.cross_entropy(torch.bmm(x, wt.expand(x.shape[0], -1, -1)).mT, y),
        MEAN,
    ),
    "conv1d": (lambda x, w, b, y: F.cross_entropy(F.conv1d(x.mT, w.unsqueeze(-1), b), y), MEAN),
    "einsum to classes in dim 1": (
        lambda x, w, y: F.cross_entropy(torch.einsum("bth,vh->bvt", x, w), y),
        MEAN,
    ),
    "cast weight": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w.to(x1.dtype)), y1), MEAN),
    "sum of weights": (lambda x1, w, wt, y1: F.cross_entropy(F.linear(x1, w + 0.5 * wt.t()), y1), MEAN),
    "part of a weight": (lambda x1, w, y1: F.cross_entropy(F.linear(x1, w[2:]), y1.clamp(-100, 30)), MEAN),
    "normalised": (lambda x1, w, y1: F.cross_entropy(F.linear(F.normalize(x1), F.normalize(w)), y1), MEAN),
}

GROUPS = {
    "cross entropy": CROSS_ENTROPY,
    "log-probs": LOG_PROBS,
    "transforms": TRANSFORMS,
    "views": VIEWS,
    "products": PRODUCTS,
}
SPELLINGS = [
    Spelling(f"{group}: {name}", fn, summary)
    for group, table in GROUPS.items()
    for name, (fn, summary) in table.items()
]
