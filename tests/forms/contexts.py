"""The places where a head may be: autocast, no_grad, checkpoints, loops, computed weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.forms.cross_entropy import for_causal_lm
from tests.forms.form import H, V, form

BF16 = torch.bfloat16


@form("X1", "autocast inside, no upcast", "kernels")
def autocast_inside(x, w, y):
    with torch.autocast("cpu", BF16):
        return F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1))


@form("X1", "autocast around the body, the loss outside; logits upcast and returned", "kernels")
def autocast_body(x, w, y):
    with torch.autocast("cpu", BF16):
        logits = F.linear(torch.tanh(x), w)
        loss = for_causal_lm(logits, y)
    return loss, logits.float()


@form("X1", "autocast inside, smoothed", "rows")
def autocast_rows(x, w, y):
    with torch.autocast("cpu", BF16):
        return F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1), label_smoothing=0.1)


@form("X1", "autocast switched off for the loss", "kernels")
def autocast_off(x, w, c):
    with torch.autocast("cpu", BF16):
        logits = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            return logits.float().log_softmax(-1).gather(-1, c.unsqueeze(-1))


@form("X2", "metrics without gradients beside the loss", "rows")
def metrics(x1, w, c1):
    z = F.linear(x1, w)
    loss = F.cross_entropy(z, c1)
    with torch.no_grad():
        accuracy = (z.argmax(-1) == c1).float().mean()
        perplexity = loss.exp()
    return loss, accuracy, perplexity


@form("X2", "everything without gradients", "kernels")
def evaluation(x1, w, y1):
    with torch.no_grad():
        return F.cross_entropy(F.linear(x1, w), y1, reduction="none")


@form("X2", "reference log-probs without gradients from another head", "kernels")
def reference_model(x, w, xT, wT, c):
    lp = F.linear(x, w).log_softmax(-1).gather(-1, c.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        ref = F.linear(xT, wT).log_softmax(-1).gather(-1, c.unsqueeze(-1)).squeeze(-1)
    return (torch.exp(ref - lp) - (ref - lp) - 1).mean()


@form("X3", "head and loss in a checkpoint", "kernels")
def checkpointed(x, w, y):
    def body(x, w, y):
        return F.cross_entropy(F.linear(x, w).float().view(-1, V), y.view(-1))

    return checkpoint(body, x, w, y, use_reentrant=False)


@form("X3", "a checkpoint for each chunk, as TRL's chunked loss has it", "kernels")
def checkpointed_chunks(x, w, c):
    def body(h, w, labels):
        logits = F.linear(h, w).float()
        return F.nll_loss(logits.log_softmax(-1), labels, reduction="sum")

    total = torch.zeros((), dtype=torch.float32)
    for h, labels in zip(x.flatten(0, 1).split(8), c.flatten().split(8), strict=True):
        total = total + checkpoint(body, h, w, labels, use_reentrant=False)
    return total / c.numel()


@form("X3", "distillation in a checkpoint", "kernels")
def checkpointed_pair(x, w, t):
    def body(x, w, t):
        return -(t.softmax(-1) * F.linear(x.tanh(), w).log_softmax(-1)).sum(-1).mean()

    return checkpoint(body, x, w, t, use_reentrant=False)


@form("X3", "row-wise loss in a checkpoint", "rows")
def checkpointed_rows(x, w, t):
    def body(x, w, t):
        return -(t.softmax(-1).square() * F.linear(x.tanh(), w).log_softmax(-1)).sum(-1).mean()

    return checkpoint(body, x, w, t, use_reentrant=False)


@form("X4", "weight norm", "kernels")
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(H, V))

    def forward(self, x, y):
        return F.cross_entropy(self.head(x).view(-1, V), y.view(-1))


@form("X4", "cosine head with a learned scale on the hidden states", "kernels")
def cosine(x1, w, y1, b):
    return F.cross_entropy(F.linear(F.normalize(x1) * b[:1].exp(), F.normalize(w)), y1)


@form("X4", "weight cast and cut", "kernels", dtype=BF16)
def cast_and_cut(x1, w, c1):
    return F.cross_entropy(x1.float() @ w[: V - 8].float().t(), c1 % (V - 8))


@form("X4", "weight of a quantised copy: a straight-through estimate", "kernels")
def straight_through(x1, w, c1):
    rounded = w + ((w * 16).round() / 16 - w).detach()
    return F.cross_entropy(F.linear(x1, rounded), c1)


@form("X5", "eight chunks by hand, summed", "kernels")
def eight_chunks(x1, w, c1):
    total = torch.zeros(())
    for h, labels in zip(x1.chunk(8), c1.chunk(8), strict=True):
        total = total + F.cross_entropy(F.linear(h, w).float(), labels, reduction="sum")
    return total / c1.numel()


@form("X5", "eight chunks by hand, in place, smoothed", "rows")
def eight_chunks_smoothed(x1, w, c1):
    total = torch.zeros(())
    for h, labels in zip(x1.chunk(8), c1.chunk(8), strict=True):
        total += F.cross_entropy(F.linear(h, w).float(), labels, reduction="sum", label_smoothing=0.1)
    return total / c1.numel()


@form("X6", "masked_fill_ of per-token losses, scaled in place", "kernels")
def in_place_losses(x, w, c, m):
    losses = F.cross_entropy(F.linear(x, w).view(-1, V), c.view(-1), reduction="none").view_as(c)
    losses = losses * 1.0
    losses.masked_fill_(m == 0, 0.0)
    loss = losses.sum()
    loss /= m.sum()
    return loss


@form("X6", "vocabulary entries set in place", "rows")
def setitem_vocabulary(x, w, c):
    logits = F.linear(x, w)
    logits[..., V - 8 :] = -1e9
    return F.cross_entropy(logits.view(-1, V), (c % (V - 8)).view(-1))


@form("X7", "torch.func.grad_and_value inside", "kernels")
def func_grad(x1, w, y1):
    def loss(x, w):
        return F.cross_entropy(F.linear(x, w), y1)

    return torch.func.grad_and_value(loss, argnums=(0, 1))(x1.detach(), w.detach())


@form("X7", "torch.func.grad inside, logits beside the loss", "kernels")
def func_grad_aux(x1, w, y1):
    def loss(w):
        logits = x1.detach().tanh() @ w.t()
        return F.cross_entropy(logits, y1, reduction="sum") / 7, logits

    return torch.func.grad(loss, has_aux=True)(w.detach())


@form("X7", "torch.func.grad inside, smoothed", "rows")
def func_grad_rows(x1, w, y1):
    def loss(x, w):
        return F.cross_entropy(F.linear(x, w), y1, label_smoothing=0.1)

    return torch.func.grad_and_value(loss, argnums=1)(x1.detach(), w.detach())
