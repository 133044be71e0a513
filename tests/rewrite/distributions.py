"""Losses between distributions that keep their rows apart; what a function may name is said in row_wise.py."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.head.spellings import VOCAB

INF = float("inf")


def entropy_of_probs(x1, w, c1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    return log_probs.gather(1, c1[:, None]).mean() - (log_probs.exp() * log_probs).sum(-1).mean()


def entropy_by_logsumexp(x, w):
    z = F.linear(x, w)
    return torch.logsumexp(z, -1) - (z.softmax(-1) * z).sum(-1)


def log_softmax_by_hand(x1, w, c1):
    z = F.linear(x1, w)
    shifted = z - z.max(-1, keepdim=True).values
    log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return -log_probs.gather(1, c1[:, None]).mean() + 1e-3 * z.logsumexp(-1).mean()


def log_softmax_by_amax(x, w, c):
    z = F.linear(x, w)
    top = z.amax(-1, keepdim=True).detach()
    log_probs = z - top - (z - top).exp().sum(-1, keepdim=True).log()
    return log_probs.gather(-1, c[..., None]) * z.softmax(-1).square().sum(-1, keepdim=True)


def focal_of_all(x1, w, c1):
    p = F.linear(x1, w).softmax(-1)
    onehot = F.one_hot(c1, VOCAB)
    return -(onehot * (1 - p).pow(2) * (p + 1e-7).log()).sum(-1).mean()


def unlikelihood(x, w, c):
    p = F.linear(x, w).softmax(-1)
    return -torch.log1p(-p.gather(-1, c[..., None]).clamp(max=0.99)).mean()


def margin(x1, w, c1):
    z = F.linear(x1, w)
    right = z.gather(1, c1[:, None])
    return F.cross_entropy(z, c1) + F.relu(1 - right + z).sum(-1).mean()


def best_wrong(x1, w, c1):
    z = F.linear(x1, w)
    right = z.gather(1, c1[:, None]).squeeze(1)
    wrong = z.scatter(1, c1[:, None], -INF).amax(-1)
    return F.cross_entropy(z, c1) + F.relu(1 + wrong - right).mean()


def sorted_distance(x1, w, t1):
    ours = F.linear(x1, w).softmax(-1).sort(-1).values
    return (ours - t1.softmax(-1).sort(-1).values).abs().sum(-1)


def nucleus(x, w, c):
    ordered = F.linear(x, w).softmax(-1).sort(-1, descending=True)
    kept = ordered.values.cumsum(-1) < 0.9
    return (ordered.values * kept).sum(-1).log()


def cumulative_distance(x1, w, t1):
    return (F.linear(x1, w).softmax(-1).cumsum(-1) - t1.softmax(-1).cumsum(-1)).abs().mean(-1).sum()


def forward_kl(x, w, xT, wT):
    teacher = F.linear(xT, wT).log_softmax(-1)
    student = F.linear(x, w).log_softmax(-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(x, w, xT, wT, m):
    teacher = F.linear(xT, wT).log_softmax(-1)
    student = F.linear(x, w).log_softmax(-1)
    return ((student.exp() * (student - teacher)).sum(-1) * m).sum() / m.sum()


def jsd(x, w, t):
    student, teacher = F.linear(x, w).log_softmax(-1), t.log_softmax(-1)
    mixed = torch.logsumexp(torch.stack([student, teacher]) - math.log(2), dim=0)
    left = F.kl_div(mixed, student, log_target=True, reduction="none").sum(-1)
    return 0.5 * (left + F.kl_div(mixed, teacher, log_target=True, reduction="none").sum(-1)).mean()


def jsd_of_products(x, w, xT, wT):
    student, teacher = F.linear(x, w).log_softmax(-1), F.linear(xT, wT).log_softmax(-1)
    mixed = torch.logsumexp(torch.stack([student, teacher], -1) - math.log(2), dim=-1)
    left = (student.exp() * (student - mixed)).sum(-1)
    return 0.5 * left + 0.5 * (teacher.exp() * (teacher - mixed)).sum(-1)


def shifted_distillation(x, w, c, t):
    """Both sides shifted, a hard loss beside it."""
    z = F.linear(x, w)[:, :-1]
    teacher = t[:, 1:].softmax(-1)
    soft = -(teacher * z.log_softmax(-1)).sum(-1).mean()
    return soft + F.cross_entropy(z.reshape(-1, VOCAB), c[:, 1:].reshape(-1))


def masked_3d(x, w, t, m):
    log_ratio = F.linear(x, w).log_softmax(-1) - t.log_softmax(-1)
    return (log_ratio.square() * m.unsqueeze(-1)).sum() / m.sum()


def two_temperatures(x, w, xT, wT, q):
    student = (F.linear(x, w) / 2).log_softmax(-1)
    teacher = (F.linear(xT, wT) * q).softmax(-1)
    return -(teacher * student).sum(-1).mean() * 4


def teacher_under_no_grad(x, w, b, wt):
    """The teacher's head could have a gradient, and has none."""
    with torch.no_grad():
        teacher = (x @ wt + b).softmax(-1)
    return -(teacher * F.linear(x, w).log_softmax(-1)).sum(-1)


def teacher_and_student_learn(x1, w, b, r1):
    teacher = r1 * b  # [N, V] of tensors with gradients
    return F.kl_div(F.linear(x1, w).log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)


def expected_reward(x, w, b):
    return (F.linear(x, w).softmax(-1) * b).sum(-1)


DISTRIBUTIONS = {
    "entropy of probs": entropy_of_probs,
    "entropy by logsumexp": entropy_by_logsumexp,
    "log_softmax by hand": log_softmax_by_hand,
    "log_softmax by hand, amax": log_softmax_by_amax,
    "focal": focal_of_all,
    "unlikelihood": unlikelihood,
    "margin": margin,
    "best wrong class": best_wrong,
    "sorted distance": sorted_distance,
    "nucleus": nucleus,
    "cumulative distance": cumulative_distance,
    "KL to a teacher": lambda x1, w, t1: F.kl_div(
        F.linear(x1, w).log_softmax(-1), t1.softmax(-1), reduction="batchmean"
    ),
    "KL to a teacher that learns": lambda x1, w, wt: F.kl_div(
        F.linear(x1, w).log_softmax(-1), (x1.tanh() @ wt).softmax(-1), reduction="batchmean"
    ),
    "KL, log targets, sum": lambda x, w, t: F.kl_div(
        F.linear(x, w).log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True
    ),
    "KL, mean over everything": lambda x, w, t: F.kl_div(
        F.linear(x, w).log_softmax(-1), t.softmax(-1), reduction="mean"
    ),
    "forward KL to a teacher's head": forward_kl,
    "reverse KL to a teacher's head": reverse_kl,
    "JSD": jsd,
    "JSD of two heads": jsd_of_products,
    "TVD": lambda x, w, t: 0.5 * (F.linear(x, w).softmax(-1) - t.softmax(-1)).abs().sum(-1),
    "TVD, sum": lambda x, w, t: (F.linear(x, w).softmax(-1) - t.softmax(-1)).abs().sum(),
    "distillation, shifted": shifted_distillation,
    "masked, 3-D": masked_3d,
    "two temperatures": two_temperatures,
    "teacher under no_grad": teacher_under_no_grad,
    "teacher and student learn": teacher_and_student_learn,
    "expected reward": expected_reward,
    "square error of logits": lambda x, w, t: (F.linear(x, w).log_softmax(-1) - t).square().mean((0, 2)),
    "sum of probs squared": lambda x, w: F.linear(x, w).softmax(-1).square().sum(),
    "mean of probs squared": lambda x, w: F.linear(x, w).softmax(-1).square().mean(),
    "mean over sequences and classes": lambda x, w: F.linear(x, w).log_softmax(-1).mean((0, 2)),
    "sum over positions and classes": lambda x, w: F.linear(x, w).softmax(-1).square().sum((1, 2), keepdim=True),
    "norm of probs": lambda x, w: F.linear(x, w).softmax(-1).norm(dim=-1),
    "variance of log-probs": lambda x, w: F.linear(x, w).log_softmax(-1).var(-1),
}
