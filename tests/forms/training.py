"""Cross-entropy heads with more than a cross entropy: smoothing, weights, terms beside it (the second half)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.forms.form import IGNORE, H, V, form


@form("C17", "label_smoothing=", "rows")
def label_smoothing(x1, w, y1):
    return F.cross_entropy(F.linear(x1, w), y1, label_smoothing=0.1)


@form("C17", "Trainer's LabelSmoother, in place", "rows")
def label_smoother(x, w, y):
    logits, labels = F.linear(x, w)[..., :-1, :].contiguous(), y[..., 1:].contiguous()
    log_probs = -F.log_softmax(logits, dim=-1)
    labels = labels.unsqueeze(-1)
    padding = labels.eq(IGNORE)
    nll_loss = log_probs.gather(dim=-1, index=labels.clamp(min=0))
    smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll_loss.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return 0.9 * nll_loss.sum() / active + 0.1 * smoothed.sum() / (active * V)


@form("C17", "Megatron's smoothing: K/(K-1)", "rows")
def megatron_smoothing(x1, w, c1):
    smoothing = 0.1 * V / (V - 1)
    log_probs = F.linear(x1, w).float().log_softmax(-1)
    loss = -log_probs.gather(-1, c1[:, None]).squeeze(-1)
    return (1.0 - smoothing) * loss - smoothing * log_probs.mean(dim=-1)


@form("C18", "class weights of a module", "rows")
class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(H, V)
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(V) + 0.5)

    def forward(self, x, y):
        return self.loss(self.head(x).view(-1, V), y.view(-1))


@form("C19", "soft targets", "kernels")
def soft_targets(x, w, t):
    return F.cross_entropy(F.linear(x, w).view(-1, V), t.softmax(-1).view(-1, V))


@form("C19", "EAGLE: minus the sum of p log q", "kernels")
def eagle(x, w, t, m):
    with torch.no_grad():
        p = t.softmax(dim=2)
    logp = nn.LogSoftmax(dim=2)(F.linear(x, w))
    return -torch.sum(torch.sum(m[:, :, None] * (p * logp), 2)) / (m.sum() + 1e-5)


@form("C20", "z-loss with a mask, and detached copies", "kernels")
def z_loss(x, w, y):
    logits, labels = F.linear(x, w).view(-1, V).float(), y.view(-1)
    mask = labels != IGNORE
    ce = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / mask.sum()
    z = 1e-2 * (logits.logsumexp(-1).pow(2) * mask).sum() / mask.sum()
    return ce + z, ce.detach(), z.detach()


@form("C20", "z-loss, mean", "kernels")
def z_loss_mean(x1, w, c1):
    logits = F.linear(x1, w)
    return F.cross_entropy(logits, c1) + 1e-4 * torch.logsumexp(logits, dim=-1).square().mean()


@form("C21", "multi-token prediction: one weight, three hidden states", "kernels")
def multi_token(x, w, y):
    losses, labels, h = [], y, x
    for _ in range(3):
        losses.append(F.cross_entropy(F.linear(h, w).float().view(-1, V), labels.reshape(-1), ignore_index=IGNORE))
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        h = torch.tanh(h)
    return losses[0] + 0.3 * torch.stack(losses[1:]).mean()


@form("C21", "Medusa: stacked heads, each a position further", "rows")
def medusa(x, wk, y):
    logits = torch.stack([F.linear(x, wk[i]) for i in range(3)], dim=0)
    loss = 0
    for i in range(3):
        z = logits[i, :, : -(2 + i)].contiguous()
        labels = y[..., 2 + i :].contiguous()
        loss = loss + 0.8**i * nn.CrossEntropyLoss()(z.view(-1, V), labels.view(-1))
    return loss


@form("C21", "Medusa with top-k accuracy", "rows")
def medusa_accuracy(x, wk, c):
    logits = torch.stack([F.linear(x, wk[i]) for i in range(2)], dim=0)
    loss, correct = 0, []
    for i in range(2):
        z = logits[i, :, : -(2 + i)].contiguous().view(-1, V)
        labels = c[..., 2 + i :].contiguous().view(-1)
        loss = loss + nn.CrossEntropyLoss()(z, labels)
        top = z.topk(2, dim=-1).indices
        correct.append((top == labels.unsqueeze(-1)).any(-1).float().mean())
    return loss, torch.stack(correct)


@form("C21", "several targets from one logsumexp, weighted", "rows")
def several_targets(x1, w, c1):
    z = F.linear(x1, w).float()
    lse = z.logsumexp(-1)
    targets = torch.stack([c1, c1.roll(-1), c1.roll(-2)], -1)
    picked = lse[:, None] - z.gather(-1, targets)
    picked[-1, 1] = 0
    picked[-2:, 2] = 0
    return (picked * torch.tensor([1.0, 0.5, 0.25])).sum(-1)


@form("C22", "two label sets on one head", "kernels")
def two_label_sets(x1, w, y1, c1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + 0.3 * F.cross_entropy(z, c1.roll(1))


@form("C22", "cross entropy and an entropy bonus", "rows")
def entropy_bonus(x1, w, y1):
    z = F.linear(x1, w).float()
    p = z.softmax(-1)
    return F.cross_entropy(z, y1) - 0.01 * (z.logsumexp(-1) - (p * z).sum(-1)).mean()


@form("C22", "distillation and cross entropy", "kernels")
def kd_and_ce(x1, w, y1, wT):
    z = F.linear(x1, w)
    with torch.no_grad():
        teacher = F.linear(x1, wT)
    kd = F.kl_div(F.log_softmax(z / 2.0, -1), F.softmax(teacher / 2.0, -1), reduction="batchmean") * 4.0
    return 0.5 * kd + 0.5 * F.cross_entropy(z, y1)


@form("C22", "preference loss and cross entropy on one head", "kernels")
def dpo_and_sft(x, w, y, m):
    z = F.linear(x, w)
    labels = y.clamp(min=0)
    lp = z.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (lp * m).sum(-1).chunk(2)
    sft = F.cross_entropy(z[:1].reshape(-1, V), y[:1].reshape(-1))
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean() + sft


@form("C23", "auxiliary loss of a mixture, in place", "kernels")
def moe(x, w, y):
    logits = F.linear(x, w)
    loss = F.cross_entropy(logits.float().view(-1, V), y.view(-1))
    aux = x.softmax(-1).mean((0, 1)).square().sum()
    loss += 0.01 * aux.to(loss.device)
    return loss, logits, aux


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(H, V, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(H, 4, bias=False), nn.Linear(4, V, bias=False)
        self.magnitude = nn.Parameter(torch.rand(V) + 0.5)

    def loss(self, logits, y):
        return F.cross_entropy(logits.float().view(-1, V), y.view(-1), ignore_index=IGNORE)


@form("C24", "LoRA on a frozen head", "rows", dtype=torch.bfloat16)
class LoraHead(Lora):
    def forward(self, x, y):
        logits = self.base(x)
        logits = logits + self.b(self.a(F.dropout(x.to(self.a.weight.dtype), 0.0))) * 2.0
        return self.loss(logits.to(x.dtype), y)


@form("C24", "LoRA, logits returned", "rows")
class LoraReturned(Lora):
    def forward(self, x, y):
        logits = self.base(x) + self.b(self.a(x)) * 2.0
        return self.loss(logits, y), logits


@form("C24", "LoRA merged into the weight", "kernels")
class LoraMerged(Lora):
    def forward(self, x, y):
        weight = self.base.weight + self.b.weight @ self.a.weight * 2.0
        return self.loss(F.linear(x, weight), y)


@form("C24", "DoRA: a norm and a magnitude for each row of the weight", "kernels")
class Dora(Lora):
    def forward(self, x, y):
        weight = self.base.weight + 2.0 * self.b.weight @ self.a.weight
        norm = torch.linalg.norm(weight, dim=1).detach()
        return self.loss(F.linear(x, (self.magnitude / norm)[:, None] * weight), y)


@form("C24", "DoRA at the logits", "rows")
class DoraLogits(Lora):
    def forward(self, x, y):
        weight = self.base.weight + 2.0 * self.b.weight @ self.a.weight
        scale = self.magnitude / torch.linalg.norm(weight, dim=1).detach()
        base = self.base(x)
        return self.loss(base + (scale - 1) * base + scale * self.b(self.a(x)) * 2.0, y)


@form("C24", "DoRA at the logits, as many hidden units as classes may be", "rows", options={"min_vocab": H})
class DoraWide(DoraLogits):
    pass


class Parallel(torch.autograd.Function):
    """Megatron's cross entropy: max, exp and sums by hand, in place, its backward by hand."""

    @staticmethod
    def forward(ctx, logits, target):
        logits = logits.float()
        logits = logits - logits.max(dim=-1)[0].unsqueeze(-1)
        picked = logits.view(-1, V)[torch.arange(target.numel()), target.view(-1)].view_as(target)
        exp = logits.exp()
        total = exp.sum(-1)
        loss = total.log() - picked
        exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exp, target)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        softmax, target = ctx.saved_tensors
        grad = softmax - F.one_hot(target, V).to(softmax.dtype)
        return grad * upstream.unsqueeze(-1), None


@form("C25", "Megatron's autograd.Function", "declined: opaque")
def megatron(x, w, c, m):
    logits = F.linear(x.transpose(0, 1), w).transpose(0, 1)
    losses = Parallel.apply(logits.contiguous(), c)
    return (losses * m).sum() / m.sum() + 1e-4 * logits.logsumexp(-1).square().mean()


@form("C27", "log_softmax by hand", "rows")
def log_softmax_by_hand(x, w, c):
    z = F.linear(x, w)
    z = z - z.amax(-1, keepdim=True)
    log_probs = z - torch.log(torch.sum(torch.exp(z), dim=-1, keepdim=True))
    return -log_probs.gather(-1, c.unsqueeze(-1)).mean()


@form("C27", "log_softmax by hand, the largest by max, picked by an index", "rows")
def log_softmax_by_hand_indexed(x1, w, c1):
    z = x1 @ w.t()
    z = z - z.max(dim=-1, keepdim=True).values.detach()
    log_probs = z - z.exp().sum(-1, keepdim=True).log()
    return -log_probs[torch.arange(len(c1)), c1]


@form("C27", "softmax by hand", "rows")
def softmax_by_hand(x, w, c):
    e = torch.exp(F.linear(x, w))
    p = e / e.sum(-1, keepdim=True)
    return -p.gather(-1, c.unsqueeze(-1)).log().mean()


@form("C28", "margins to the target", "rows")
def multi_margin(x1, w, c1):
    return F.multi_margin_loss(F.linear(x1, w), c1)


@form("C28", "squared margins, weighted classes, one loss per row", "rows")
def multi_margin_squared(x1, w, c1, b):
    return F.multi_margin_loss(F.linear(x1, w), c1, p=2, margin=0.5, weight=b.detach().abs(), reduction="none")


@form("C28", "a sigmoid for each class", "rows")
def sigmoids(x, w, t):
    return F.binary_cross_entropy_with_logits(F.linear(x, w), t.sigmoid())


@form("C28", "a sigmoid for each class, weighted, summed", "rows")
def sigmoids_weighted(x1, w, c1, b):
    hot = F.one_hot(c1, V).to(w.dtype)
    weights = b.detach().abs()
    return F.binary_cross_entropy_with_logits(
        F.linear(x1, w), hot, weight=weights, pos_weight=weights + 1, reduction="sum"
    )
