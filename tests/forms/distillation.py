"""Distillation: a student's logits and a teacher's, as trainers and papers' code have them; more is in log_probs.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.forms.form import IGNORE, H, V, form
from tests.forms.log_probs import jsd, teacher

BF16 = torch.bfloat16

FORWARD_KL = REVERSE_KL = SYMMETRIC_KL = SKEWED_KL = JSD = TOTAL_VARIATION = SOFT_TARGETS = "kernels"


def masked_mean(per_row, y):
    mask = (y != IGNORE).int().view(-1)
    return torch.sum(per_row.view(-1) * mask, dim=0) / torch.sum(mask, dim=0)


# ------------------------------------------------------------------ D1, D2: generalised Jensen-Shannon divergence


def gkd_loss(student, teacher, beta, temperature=1.0, reduction="batchmean"):
    divergence = jsd(student, teacher, beta, temperature)
    if reduction == "batchmean":
        return divergence.sum() / divergence.size(0)
    return divergence.sum() if reduction == "sum" else divergence.mean() if reduction == "mean" else divergence


@form("D1", "TRL's GKD without labels, batchmean", JSD)
def gkd_batchmean(x, w, xT, wT):
    return gkd_loss(F.linear(x, w)[:, :-1, :], teacher(xT, wT)[:, :-1, :], 0.5, 0.9)


# the logarithms of its weights are rounded to bfloat16 too, and it is no JSD any more
@form("D1", "TRL's GKD in bfloat16", "rows", dtype=BF16)
def gkd_bfloat16(x, w, xT, wT):
    return gkd_loss(F.linear(x, w), teacher(xT, wT), 0.5)


@form("D1", "beta=0 is the forward KL", FORWARD_KL)
def gkd_forward(x, w, xT, wT, n):
    return gkd_loss(F.linear(x, w), teacher(xT, wT), 0, reduction="sum") / n


@form("D1", "beta=1 is the reverse KL", REVERSE_KL)
def gkd_reverse(x, w, xT, wT, n):
    return gkd_loss(F.linear(x, w), teacher(xT, wT), 1, reduction="sum") / n


@form("D1", "mean over everything, one side's head shared with the other", JSD)
def gkd_mean(x, w, xT):
    return gkd_loss(F.linear(x, w), teacher(xT, w), 0.1, reduction="mean")


@form("D1", "chunks of rows, beta=0.25, sum over a count", JSD)
def gkd_in_chunks(x1, w, xT, wT, n):
    total = torch.zeros(())
    for h, hT in zip(x1.chunk(4), xT.flatten(0, 1).chunk(4), strict=True):
        total = total + gkd_loss(F.linear(h, w), teacher(hT, wT), 0.25, reduction="sum")
    return total / n


def self_distillation(student, teacher, alpha):
    """TRL's SDFT: per token, the two divergences joined by a lerp."""
    s, t = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    if alpha in (0.0, 1.0):
        s, t = (s, t) if alpha == 0.0 else (t, s)
        return F.kl_div(s, t, reduction="none", log_target=True).sum(-1)
    alpha = torch.tensor(alpha, dtype=s.dtype)
    mixed = torch.logsumexp(torch.stack([s + torch.log(1 - alpha), t + torch.log(alpha)]), dim=0)
    of_teacher = F.kl_div(mixed, t, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, s, reduction="none", log_target=True)
    return torch.lerp(of_student, of_teacher, alpha).sum(-1)


@form("D2", "TRL's self-distillation, alpha=0.5", JSD)
def sdft(x, w, xT, wT, m):
    return (self_distillation(F.linear(x, w), teacher(xT, wT), 0.5) * m).sum() / m.sum().clamp(min=1.0)


@form("D2", "TRL's self-distillation, alpha=1", REVERSE_KL)
def sdft_reverse(x, w, xT, wT, m):
    per_token = self_distillation(F.linear(x, w), teacher(xT, wT), 1.0)
    return ((per_token * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()


@form("D2", "a mixture of probabilities by lerp", JSD)
def lerped(x, w, xT, wT, m):
    p, q = teacher(xT, wT).softmax(-1), F.linear(x, w).softmax(-1)
    mixed = torch.lerp(q, p, 0.3).log()
    left = F.kl_div(mixed, p, reduction="none").sum(-1)
    right = F.kl_div(mixed, q, reduction="none").sum(-1)
    return ((0.3 * left + 0.7 * right) * m).sum()


# -------------------------------------------------------------------- D3, D4, D5: products of probabilities by hand


def forward_kl(student, teacher):
    """The negated cross term of the forward KL of each row; the teacher's entropy is left out."""
    probs = F.softmax(teacher, dim=-1, dtype=torch.float32)
    infinite = torch.isinf(student)
    log_probs = F.log_softmax(student, dim=-1, dtype=torch.float32)
    return torch.sum(torch.masked_fill(probs * log_probs, infinite, 0), dim=-1)


def reverse_kl(student, teacher):
    probs = F.softmax(student, dim=-1, dtype=torch.float32)
    infinite = torch.isinf(student) | torch.isinf(teacher)
    products = torch.masked_fill(probs * F.log_softmax(teacher, dim=-1, dtype=torch.float32), infinite, 0)
    products -= torch.masked_fill(probs * F.log_softmax(student, dim=-1, dtype=torch.float32), infinite, 0)
    return torch.sum(products, dim=-1)


@form("D3", "torchtune's forward KL in bfloat16", FORWARD_KL, dtype=BF16)
def torchtune_forward(x, w, xT, wT, y):
    return -masked_mean(forward_kl(F.linear(x, w), teacher(xT, wT)), y)


@form("D3", "torchtune's forward KL over chunks of the sequence", FORWARD_KL)
def torchtune_chunks(x, w, xT, wT, y):
    total = 0.0
    student, target = F.linear(x, w), teacher(xT, wT)
    for s, t, labels in zip(student.chunk(4, dim=1), target.chunk(4, dim=1), y.chunk(4, dim=1), strict=True):
        total += -torch.sum(forward_kl(s, t) * (labels != IGNORE).int())
    return total / torch.sum((y != IGNORE).int())


@form("D4", "DistiLLM's reverse KL, the teacher in a bfloat16 of its own", REVERSE_KL)
def distillm_reverse(x, w, xT, wT, y):
    return -masked_mean(reverse_kl(F.linear(x, w), teacher(xT.bfloat16(), wT.bfloat16())), y)


@form("D5", "torchtune's symmetric KL", SYMMETRIC_KL)
def symmetric(x, w, xT, wT, y):
    student, target = F.linear(x, w), teacher(xT, wT)
    left, right = -masked_mean(forward_kl(student, target), y), -masked_mean(reverse_kl(student, target), y)
    return 0.4 * left + 0.6 * right


@form("D5", "DistiLLM's Jensen-Shannon distance", JSD)
def js_distance(x, w, t, y):
    student = F.linear(x, w)
    p, q = F.softmax(t, dim=-1, dtype=torch.float32), F.softmax(student, dim=-1, dtype=torch.float32)
    mixed = torch.log((1 - 0.1) * p + 0.1 * q)
    infinite = torch.isinf(student) | torch.isinf(t)
    s_lp = F.log_softmax(student, dim=-1, dtype=torch.float32)
    t_lp = F.log_softmax(t, dim=-1, dtype=torch.float32)
    of_student = torch.masked_fill(q * mixed, infinite, 0)
    of_student -= torch.masked_fill(q * s_lp, infinite, 0)
    of_teacher = torch.masked_fill(p * mixed, infinite, 0)
    of_teacher -= torch.masked_fill(p * t_lp, infinite, 0)
    return -0.9 * masked_mean(of_teacher.sum(-1), y) - 0.1 * masked_mean(of_student.sum(-1), y)


@form("D5", "DistiLLM's skewed forward KL", SKEWED_KL)
def skewed_forward(x, w, xT, wT, y):
    student, target = F.linear(x, w), teacher(xT, wT)
    p = F.softmax(target, dim=-1, dtype=torch.float32)
    mixed = torch.log(0.1 * p + 0.9 * F.softmax(student, dim=-1, dtype=torch.float32))
    products = torch.masked_fill(p * mixed, torch.isinf(student) | torch.isinf(target), 0)
    return -masked_mean(torch.sum(products, dim=-1), y)


@form("D5", "DistiLLM's skewed reverse KL", SKEWED_KL)
def skewed_reverse(x, w, xT, wT, y):
    student, target = F.linear(x, w), teacher(xT, wT)
    q = F.softmax(student, dim=-1, dtype=torch.float32)
    mixed = torch.log(0.9 * F.softmax(target, dim=-1, dtype=torch.float32) + 0.1 * q)
    infinite = torch.isinf(student) | torch.isinf(target)
    products = torch.masked_fill(q * mixed, infinite, 0)
    products -= torch.masked_fill(q * F.log_softmax(student, dim=-1, dtype=torch.float32), infinite, 0)
    return -masked_mean(torch.sum(products, dim=-1), y)


@form("D5", "DistiLLM's total variation", TOTAL_VARIATION)
def variation_by_hand(x, w, xT, wT, y):
    student, target = F.linear(x, w), teacher(xT, wT)
    p, q = F.softmax(target, dim=-1, dtype=torch.float32), F.softmax(student, dim=-1, dtype=torch.float32)
    infinite = torch.isinf(student) | torch.isinf(target)
    return masked_mean(0.5 * torch.masked_fill(torch.abs(p - q), infinite, 0).sum(dim=-1), y)


@form("D5", "total variation by a norm", TOTAL_VARIATION)
def variation_by_norm(x1, w, t):
    return 0.5 * torch.norm(F.softmax(F.linear(x1, w), -1) - F.softmax(t.flatten(0, 1), -1), p=1, dim=-1).mean()


@form("D5", "total variation by l1_loss", TOTAL_VARIATION)
def variation_by_l1(x1, w, t):
    q, p = F.linear(x1, w).softmax(-1), t.flatten(0, 1).softmax(-1)
    return F.l1_loss(q, p, reduction="sum") / (2 * q.shape[0])


# --------------------------------------------------------------------- D6: Hinton's distillation, a hard loss beside it


@form("D6", "KLDivLoss and CrossEntropyLoss of modules with biases", FORWARD_KL)
class Hinton(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(H, V), nn.Linear(H, V)
        self.teacher.requires_grad_(False)
        self.soft, self.hard = nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss()
        self.temperature, self.alpha = 4.0, 0.3

    def forward(self, x1, y1):
        logits, target = self.student(x1), self.teacher(x1)
        soft = self.soft(
            F.log_softmax(logits / self.temperature, dim=1), F.softmax(target / self.temperature, dim=1)
        ) * (self.temperature**2)
        return self.alpha * self.hard(logits, y1) + (1.0 - self.alpha) * soft


@form("D6", "log_target, the mean of rows, bfloat16 with an upcast", FORWARD_KL, dtype=BF16)
def hinton_log_target(x, w, xT, wT, y):
    z, zT = F.linear(x, w).float(), teacher(xT, wT).float()
    soft = F.kl_div(
        (z / 2).log_softmax(-1).view(-1, V), (zT / 2).log_softmax(-1).view(-1, V), log_target=True, reduction="none"
    )
    return F.cross_entropy(z.view(-1, V), y.view(-1)) + soft.sum(-1).mean() * 2**2


@form("D6", "kl_div in three dims: batchmean is over sequences", FORWARD_KL)
def hinton_three_dims(x, w, xT, wT):
    return F.kl_div(F.log_softmax(F.linear(x, w), -1), F.softmax(teacher(xT, wT), -1), reduction="batchmean")


@form("D6", "shifted, padded rows left out by a mask", FORWARD_KL)
def hinton_shifted(x, w, xT, wT, y):
    z, zT = F.linear(x, w)[..., :-1, :].contiguous(), teacher(xT, wT)[..., :-1, :].contiguous()
    labels = y[..., 1:].contiguous()
    keep = (labels != IGNORE).unsqueeze(-1)
    soft = F.kl_div(F.log_softmax(z / 2, dim=-1), F.softmax(zT / 2, dim=-1), reduction="none")
    soft = (soft * keep).sum() / keep.sum() * 4
    return 0.5 * F.cross_entropy(z.view(-1, V), labels.view(-1), ignore_index=IGNORE) + 0.5 * soft


# ------------------------------------------------------------------------------------- D7, D8: speculators, MiniLLM


@form("D7", "EAGLE: a LogSoftmax module, a mask with a dim of its own", SOFT_TARGETS)
class Eagle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.log_softmax = nn.Linear(H, V, bias=False), nn.LogSoftmax(dim=2)
        self.head.requires_grad_(False)

    def forward(self, x, xT, m):
        with torch.no_grad():
            target = nn.Softmax(dim=2)(self.head(xT)).detach()
        products = target * self.log_softmax(self.head(x))
        mask = m[:, :, None]
        soft = -torch.sum(torch.sum(mask * products, 2)) / (mask.sum() + 1e-5)
        return 0.1 * soft + F.smooth_l1_loss(x, xT)


@form("D8", "reverse KL summed over the answer, and a policy gradient of the same log-probs", REVERSE_KL)
def on_policy(x, w, xT, wT, c, a, m):
    lp, target = F.linear(x, w).log_softmax(-1), teacher(xT, wT).log_softmax(-1)
    picked = lp.gather(-1, c.unsqueeze(-1)).squeeze(-1)
    exact = (lp.exp() * (lp - target)).sum(-1)
    return ((exact - a.detach() * picked) * m).sum(-1).mean()


# ------------------------------------------------------------------------------- D9, D10: what is not a pair of rows


@form("D9", "top-k of both, renormalised", "fused")
def topk_renormalised(x, w, t, c, m):
    ids = torch.stack([c, c.flip(0), c.flip(1)], -1)
    student = F.linear(x, w).gather(-1, ids).log_softmax(-1)
    target = t[..., :3].log_softmax(-1)
    return (F.kl_div(student, target, reduction="none", log_target=True).sum(-1) * m).sum() / m.sum()


@form("D10", "ULD: sorted probabilities of two tokenizers, the shorter padded", "rows")
def universal(x, w, xT, wT, m):
    q = F.linear(x, w).softmax(-1)
    p = teacher(xT, wT[: V - 24]).softmax(-1)
    q, p = q.sort(dim=-1, descending=True).values, p.sort(dim=-1, descending=True).values
    p = F.pad(p, (0, V - p.shape[-1]))
    return ((q - p).abs().sum(-1) * m).sum() / m.sum()


@form("D10", "ULD and a cross entropy", "rows")
def universal_and_hard(x, w, t, y):
    z = F.linear(x, w)
    q, p = torch.sort(z.softmax(-1), dim=-1, descending=True)[0], torch.sort(t.softmax(-1), dim=-1, descending=True)[0]
    return F.cross_entropy(z.view(-1, V), y.view(-1)) + 1.5 * F.l1_loss(q, p, reduction="sum") / y.numel()


# ---------------------------------------------------------------------------------- D11: a teacher that was saved


@form("D11", "saved log-probabilities, in bfloat16", FORWARD_KL)
def saved_log_probs(x, w, tlp, m):
    saved = tlp.bfloat16()
    per_row = F.kl_div(F.linear(x, w).log_softmax(-1), saved.float(), reduction="none", log_target=True).sum(-1)
    return (per_row * m).sum() / m.sum()


@form("D11", "saved probabilities, batchmean", FORWARD_KL)
def saved_probs(x1, w, tp):
    return F.kl_div(F.log_softmax(F.linear(x1, w), dim=-1), tp.view(-1, V), reduction="batchmean")


@form("D11", "saved probabilities as targets of a cross entropy", SOFT_TARGETS)
def saved_targets(x1, w, tp):
    return F.cross_entropy(F.linear(x1, w), tp.view(-1, V))


@form("D11", "saved probabilities, total variation", TOTAL_VARIATION)
def saved_variation(x, w, tp, m):
    return (0.5 * (F.linear(x, w).softmax(-1) - tp).abs().sum(-1) * m).sum() / m.sum()
