"""Losses that pick, move or sum up rows or classes; what a function may name is said in row_wise.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

INF = float("inf")


def probs(x, w):
    return F.linear(x, w).softmax(-1)


def above_the_20th(x1, w):
    p = probs(x1, w)
    return (p - p.kthvalue(20, -1, keepdim=True).values).relu().sum(-1)


def kl(x, w, t):
    return F.kl_div(F.linear(x, w).log_softmax(-1), t.softmax(-1), reduction="none")


def rolled_distillation(x, w, t):
    return (t.softmax(-1).roll(-1, 1) * F.linear(x, w).log_softmax(-1).roll(1, 1)).sum(-1)


def rows_with_the_next_ones(x, w):
    """Two choices of the same rows."""
    p = probs(x, w)
    return (p - p.roll(1, 1)).abs().sum(-1)[:, 1:]


def rows_and_classes(x1, w, c1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    return (log_probs.exp() * log_probs)[c1 % 10, c1]


def own_best(x1, w):
    z = F.linear(x1, w)
    return z.softmax(-1).square()[torch.arange(x1.shape[0]), z.argmax(-1)]


def rows_zeroed(x, w, t, m):
    divergence = kl(x, w, t)
    divergence[m == 0] = 0
    return divergence.sum() / m.sum()


def draft_vocabulary(x, w, t):
    """EAGLE: a teacher's probabilities over the classes that the draft model has."""
    ids = torch.tensor([1, 5, 9, 30, 2])
    teacher = t[..., ids].softmax(-1)
    return -(teacher * F.linear(x, w)[..., ids].log_softmax(-1)).sum(-1).mean()


OF_ROWS = {
    "rows by an index": lambda x, w, t, c: kl(x, w, t)[:, c[0] % 5].sum(-1),
    "sequences by an index": lambda x, w, t, c: kl(x, w, t)[c[0] % 2].sum(-1),
    "rows by two indices": lambda x, w, t, c: kl(x, w, t)[c[0] % 2, c[1] % 5].sum((0, 1)),
    "rows by a matrix of indices": lambda x, w, t, c: kl(x, w, t)[:, c % 5].sum(-1),
    "one position per sequence": lambda x, w, t, c: kl(x, w, t)[torch.arange(x.shape[0]), c[:, 0] % 5].sum(-1),
    "index_select of rows": lambda x1, w, c1: probs(x1, w).index_select(0, c1 % 10).square().sum(-1),
    "negative indices of rows": lambda x1, w, c1: probs(x1, w)[-1 - c1 % 10].square().sum(-1),
    "indices of indices": lambda x, w, t, c: kl(x, w, t)[:, c[0] % 5].transpose(0, 1)[c[1] % 5].sum(-1),
    "index, then a slice": lambda x, w, t, c: kl(x, w, t)[:, c[0] % 5][:, 1:].sum(-1),
    "rows and classes": rows_and_classes,
    "one class for all rows": lambda x, w, c: probs(x, w).square()[c % 2, c % 5, c[:1, :1]],
    "the row's own best": own_best,
    "rows flipped": lambda x, w, t: (kl(x, w, t).flip(1) * t).sum(-1),
    "all flipped": lambda x, w, t: (kl(x, w, t).flip(0, 1, 2) * t).sum(-1),
    "rows rolled": rolled_distillation,
    "rows and classes rolled": lambda x, w, t: (kl(x, w, t).roll((1, 2), (1, 2)) * t).sum(-1),
    "rows with the next ones": rows_with_the_next_ones,
    "rows set to zero by a mask": rows_zeroed,
}

OF_CLASSES = {
    "flipped": lambda x1, w, c1, b: (F.linear(x1, w).flip(-1).log_softmax(-1) * b).sum(-1),
    "rolled": lambda x1, w, b: (probs(x1, w).roll(3, -1) * b).sum(-1),
    "padded": lambda x1, w, c1: F.cross_entropy(F.pad(F.linear(x1, w), (1, 2), value=-INF), c1 + 1),
    "cropped by a padding": lambda x1, w, c1: F.cross_entropy(F.pad(F.linear(x1, w), (0, -6)), c1.clamp(max=30)),
    "index_select": lambda x, w, c: (
        F.linear(x, w).index_select(2, torch.tensor([1, 5, 9, 30])).log_softmax(-1).gather(-1, (c % 4)[..., None])
    ),
    "a matrix of classes": lambda x1, w: probs(x1, w)[:, torch.tensor([[1, 5], [9, 30]])].sum(-1).square(),
    "draft vocabulary": draft_vocabulary,
    "k-th value": lambda x1, w: probs(x1, w).kthvalue(3, -1).values,
    "threshold at the k-th value": above_the_20th,
    "median": lambda x1, w: probs(x1, w).median(-1).values.log(),
    "cummax": lambda x1, w, b: (probs(x1, w).cummax(-1).values * b).sum(-1),
    "logcumsumexp": lambda x, w: F.linear(x, w).log_softmax(-1).logcumsumexp(-1).square().mean(-1),
}

WITH_PRODUCTS = {
    "expected embedding": lambda x, w, wT: probs(x, w) @ wT,
    "expected learned embedding": lambda x1, w: probs(x1, w) @ w,
    "expected embedding of dim 1": lambda x1, w, wT: (wT.t() @ probs(x1, w).t()).t(),
    "linear over the classes": lambda x1, w, wT, xT: F.linear(probs(x1, w), wT.t(), xT[0, 0]),
    "expected value": lambda x, w, cw: probs(x, w) @ cw,
    "expected learned value": lambda x1, w, b: torch.mv(probs(x1, w), b),
    "another vocabulary": lambda x1, w: (probs(x1, w) @ (w @ w.t())).square().amax(-1),
    "einsum to values": lambda x, w, cw: torch.einsum("btv,v->bt", probs(x, w), cw),
    "einsum to embeddings": lambda x, w, wT: torch.einsum("btv,vh->bth", probs(x, w), wT),
    "einsum with a teacher": lambda x, w, t: (
        -torch.einsum("btv,btv->bt", t.softmax(-1), F.linear(x, w).log_softmax(-1))
    ),
    "einsum of two heads": lambda x, w, xT, wT: (
        -torch.einsum("btv,btv->bt", F.linear(xT, wT).softmax(-1), F.linear(x, w).log_softmax(-1)).mean()
    ),
    "einsum with itself": lambda x1, w: torch.einsum("nv,nv->n", probs(x1, w), F.linear(x1, w)),
    "bmm": lambda x1, w, t1: torch.bmm(t1.softmax(-1)[:, None], F.linear(x1, w).log_softmax(-1)[..., None]).flatten(),
    "matmul of vectors": lambda x, w: (lambda p: (p[..., None, :] @ p[..., None]).flatten(1))(probs(x, w)),
}
