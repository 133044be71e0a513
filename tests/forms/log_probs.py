"""Log-probabilities of given tokens: reinforcement learning, preferences, scoring; and distillation beside them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.forms.form import V, form


def selective_log_softmax(logits, index):
    if logits.dtype in (torch.float32, torch.float64):
        selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        lse = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
        return selected - lse
    per_row = []
    for row, labels in zip(logits, index, strict=True):
        row_logps = F.log_softmax(row, dim=-1)
        per_row.append(row_logps.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_row)


def log_probs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@form("L1", "TRL's selective_log_softmax, float32", "kernels")
def selective(x, w, c):
    return selective_log_softmax(F.linear(x, w), c)


@form("L1", "TRL's selective_log_softmax, bfloat16: a loop over rows", "kernels", dtype=torch.bfloat16)
def selective_bfloat16(x, w, c):
    return selective_log_softmax(F.linear(x, w), c)


@form("L1", "the loop over rows with a temperature and a shift", "kernels")
def selective_shifted(x, w, c):
    logits = F.linear(x, w)[:, :-1, :] / 0.9
    return selective_log_softmax(logits, c[:, 1:])


@form("L2", "unsloth: chunks, h @ W.t(), scale, softcap, temperature after the upcast", "kernels")
def unsloth(x, w, c):
    out = []
    for h, labels in zip(x.reshape(-1, x.shape[-1]).chunk(4), c.reshape(-1).chunk(4), strict=True):
        logits = h @ w.t()
        logits = logits * 0.5
        logits = 30.0 * torch.tanh(logits / 30.0)
        logits = logits.to(torch.float32) / 0.8
        selected = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        out.append(selected - torch.logsumexp(logits, dim=-1))
    return torch.concat(out).reshape(c.shape)


form("L2", "unsloth, dynamic", "kernels", how={"dynamic": True})(unsloth)


@form("L3", "log_softmax over a temperature, gather", "kernels")
def gathered(x, w, c):
    return torch.gather(F.log_softmax(F.linear(x, w) / 0.7, dim=-1), 2, c.unsqueeze(-1)).squeeze(-1)


@form("L3", "log_softmax, take_along_dim", "kernels")
def taken(x, w, c):
    return torch.take_along_dim(F.linear(x, w).log_softmax(-1), c.unsqueeze(-1), dim=-1).squeeze(-1)


@form("L3", "log_softmax, indexed", "kernels")
def indexed(x1, w, c1):
    return F.linear(x1, w).log_softmax(-1)[torch.arange(c1.shape[0]), c1]


@form("L4", "negated cross entropy, and the entropy without gradients", "rows")
def negated(x, w, c):
    logits = F.linear(x, w).float()
    lp = -F.cross_entropy(logits.view(-1, V), c.view(-1), reduction="none").view(c.shape)
    with torch.no_grad():
        p = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
    return lp, entropy


@form("L5", "temperature in place", "kernels")
def temperature_in_place(x, w, c):
    logits = F.linear(x, w)
    logits.div_(0.7)
    return selective_log_softmax(logits, c)


@form("L5", "temperature, a SymFloat", "rows", how={"dynamic": True})
def temperature_symbolic(x, w, c, temperature):
    return log_probs(F.linear(x, w) / temperature, c)


@form("L5", "temperature, a tensor", "rows")
def temperature_tensor(x, w, c, nf):
    return log_probs(F.linear(x, w) / nf, c)


@form("L6", "TRL: shifted, then the last completion tokens", "kernels")
def kept(x, w, c):
    logits = F.linear(x[:, -9:], w)[:, :-1]
    return selective_log_softmax(logits[:, -8:], c[:, -8:])


@form("L6", "verl: the response's logits", "kernels")
def response(x, w, c):
    logits = F.linear(x, w) / 0.9
    return log_probs(logits[:, -9:-1], c[:, -8:])


@form("L6", "verl: packed rows and rolled ids", "kernels")
def packed(x, w, c):
    logits = F.linear(x.reshape(1, -1, x.shape[-1]), w).squeeze(0)
    return log_probs(logits, torch.roll(c.reshape(1, -1), shifts=-1, dims=1).squeeze(0))


@form("L7", "DPO: setitem on the mask, sums, chosen and rejected", "kernels")
def dpo(x, w, c, m):
    lp = selective_log_softmax(F.linear(x, w)[:, :-1], c[:, 1:])
    lp[m[:, 1:] == 0] = 0
    chosen, rejected = lp.sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@form("L7", "GRPO: ratio, clip, masked mean", "kernels")
def grpo(x, w, c, m, a):
    lp = selective_log_softmax(F.linear(x, w), c)
    ratio = torch.exp(lp - lp.detach())
    advantages = a.detach()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((loss * m).sum(-1) / m.sum(-1).clamp(min=1.0)).mean()


DENOMINATORS = {
    "a clamp": lambda m, y: m.sum().clamp(min=1),
    "a maximum": lambda m, y: torch.maximum(m.sum(), torch.ones_like(m.sum())),
    "an epsilon": lambda m, y: m.sum() + 1e-8,
    "an int": lambda m, y: y.numel(),
    "a size": lambda m, y: y.size(0),
}


def masked_mean(denominator):
    def fn(x, w, c, m):
        lp = log_probs(F.linear(x, w), c)
        return -(lp * m).sum() / denominator(m, c)

    return fn


for _name, _denominator in DENOMINATORS.items():
    form("L7", f"masked mean over {_name}", "kernels")(masked_mean(_denominator))


@form("L8", "TRL's entropy, in splits of rows", "rows")
def entropy_in_splits(x, w, c):
    logits = F.linear(x, w)
    entropies = []
    for chunk in logits.reshape(-1, V).split(8, dim=0):
        lp = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(lp) * lp).sum(-1))
    return torch.cat(entropies, dim=0).view(c.shape), log_probs(logits, c)


@form("L8", "entropy by logsumexp, with gradients", "rows")
def entropy_bonus(x, w, c):
    logits = F.linear(x, w)
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(logits.softmax(dim=-1) * logits, dim=-1)
    return -log_probs(logits, c).mean() - 0.01 * entropy.mean()


@form("L9", "TRL's DFT loss", "kernels")
def dft(x, w, c, m, n):
    lp = log_probs(F.linear(x, w), c)
    return (-lp.exp().detach() * lp * m).sum() / n


@form("L10", "lm-eval: greedy, all, gather", "rows")
def harness(x, w, c):
    lp = F.log_softmax(F.linear(x, w), dim=-1, dtype=torch.float32)
    greedy = (lp.argmax(-1) == c).all(-1)
    return lp.gather(-1, c.unsqueeze(-1)).squeeze(-1).sum(-1), greedy


@form("L10", "lm-eval: the log-probs leave whole", "declined: log_probs_returned")
def harness_whole(x, w):
    return F.log_softmax(F.linear(x, w), dim=-1, dtype=torch.float32)


@form("L11", "K tokens gathered per row", "rows")
def several(x, w, c):
    index = torch.stack([c, c.roll(1, 1), c.roll(2, 1)], -1)
    return F.log_softmax(F.linear(x, w), -1).gather(-1, index)


@form("L11", "the student's top-k and its logsumexp", "rows")
def student_topk(x, w):
    logits = F.linear(x, w)
    top = logits.topk(4, dim=-1)
    return top.values - logits.logsumexp(-1, keepdim=True), top.indices


@form("L12", "sum of squared probabilities by two logsumexps", "kernels")
def renyi(x, w):
    logits = F.linear(x, w)
    return torch.exp(torch.logsumexp(2 * logits, dim=-1) - 2 * torch.logsumexp(logits, dim=-1))


# --------------------------------------------------------------------------------- teacher and student, without D10


def teacher(xT, wT):
    with torch.no_grad():
        return F.linear(xT, wT)


def jsd(student, teacher, beta, temperature=1.0):
    student, teacher = F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1)
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True)
    beta = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0)
    kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return beta * kl_teacher + (1 - beta) * kl_student


def masked_jsd(beta):
    def fn(x, w, xT, wT, m):
        divergence = jsd(F.linear(x, w), teacher(xT, wT), beta, 0.9)
        return (divergence.sum(-1) * m).sum() / m.sum()

    return fn


for _beta in (0, 0.3, 1):
    form("D2", f"generalised JSD, beta={_beta}, masked sums", "kernels")(masked_jsd(_beta))


@form("D1", "generalised JSD, rows picked by a mask", "kernels", unbacked=True)
def gkd(x, w, xT, wT, m):
    divergence = jsd(F.linear(x, w), teacher(xT, wT), 0.5)
    return divergence[m != 0].sum() / (m != 0).sum().clamp_min(1)


@form("D3", "forward KL by hand", "kernels")
def forward_kl(x, w, xT, wT, y):
    logits, target = F.linear(x, w), teacher(xT, wT)
    probs = F.softmax(target, dim=-1, dtype=torch.float32)
    products = torch.masked_fill(probs * F.log_softmax(logits, dim=-1, dtype=torch.float32), torch.isinf(logits), 0)
    per_row = torch.sum(products, dim=-1).view(-1)
    mask = (y != -100).int()
    return -torch.sum(per_row * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)


@form("D4", "reverse KL by hand, in place", "kernels")
def reverse_kl(x, w, xT, wT, y):
    logits, target = F.linear(x, w), teacher(xT, wT)
    probs = F.softmax(logits, dim=-1, dtype=torch.float32)
    infinite = torch.isinf(logits)
    products = torch.masked_fill(probs * F.log_softmax(target, dim=-1, dtype=torch.float32), infinite, 0)
    products -= torch.masked_fill(probs * F.log_softmax(logits, dim=-1, dtype=torch.float32), infinite, 0)
    mask = (y != -100).int()
    return -torch.sum(torch.sum(products, dim=-1).view(-1) * mask.view(-1)) / torch.sum(mask.view(-1))


@form("D5", "skewed KL: a mixture of probabilities", "kernels")
def skewed(x, w, t, m):
    p, q = t.softmax(-1), F.linear(x, w).softmax(-1)
    mixed = torch.log(0.1 * p + 0.9 * q)
    return ((p * mixed).sum(-1) * m).sum() / m.sum()


@form("D5", "total variation", "kernels")
def total_variation(x, w, t, m):
    return ((0.5 * (t.softmax(-1) - F.linear(x, w).softmax(-1)).abs()).sum(-1) * m).sum() / m.sum()


@form("D6", "Hinton's distillation", "kernels")
def hinton(x1, w, y1, wT):
    z = F.linear(x1, w)
    soft = F.kl_div(F.log_softmax(z / 2, -1), F.softmax(teacher(x1, wT) / 2, -1), reduction="batchmean") * 4
    return 0.7 * soft + 0.3 * F.cross_entropy(z, y1)


@form("D7", "EAGLE-1: teacher and student share the head", "kernels")
def shared_head(x, w, xT, m):
    with torch.no_grad():
        p = F.softmax(F.linear(xT, w), dim=2)
    return -((p * F.log_softmax(F.linear(x, w), dim=2)).sum(2) * m).sum() / (m.sum() + 1e-5)


@form("D7", "EAGLE-3: a part of the teacher's vocabulary", "rows")
def part_of_the_teacher(x, w, xT, wT, m):
    some = torch.arange(0, V, 4)
    p = F.softmax(teacher(xT, wT)[..., some].float(), dim=2)
    return -((p * F.log_softmax(F.linear(x, w[: V // 4]), dim=2)).sum(2) * m).mean()


@form("D8", "MiniLLM: reverse KL and gathers of one log_softmax", "kernels")
def mini_llm(x, w, t, c, m):
    lp, target = F.linear(x, w).log_softmax(-1), t.log_softmax(-1)
    rkl = F.kl_div(target, lp, reduction="none", log_target=True).sum(-1)
    picked = lp.gather(-1, c.unsqueeze(-1)).squeeze(-1)
    return (rkl * m).sum() / m.sum() - (picked * m).sum(-1).mean()


@form("D9", "top-k distillation, the teacher's from a file", "rows")
def topk_distillation(x, w, t, c, m):
    ids = torch.stack([c, c.flip(0), c.flip(1)], -1)
    known = t[..., :3] - 2
    lp = F.linear(x, w).log_softmax(-1).gather(-1, ids)
    return ((known.exp() * (known - lp)).sum(-1) * m).sum() / m.sum()


@form("D9", "the teacher's top-k, computed here", "rows")
def topk_of_teacher(x, w, xT, wT, m):
    top = teacher(xT, wT).log_softmax(-1).topk(5, -1)
    lp = F.linear(x, w).log_softmax(-1).gather(-1, top.indices)
    return ((top.values.exp() * (top.values - lp)).sum(-1) * m).sum() / m.sum()


@form("D9", "top-k distillation with a tail", "rows")
def topk_with_tail(x, w, t, c, m):
    ids = torch.stack([c, c.flip(0)], -1)
    lp = F.linear(x, w).log_softmax(-1).gather(-1, ids)
    tail = torch.log1p(-lp.exp().sum(-1, keepdim=True).clamp(max=0.999))
    known = -t[..., :3].abs()
    return (F.kl_div(torch.cat([lp, tail], -1), known, log_target=True, reduction="none").sum(-1) * m).sum()


@form("D11", "probabilities of a teacher from a file", "kernels")
def offline(x, w, t):
    p = t.softmax(-1)
    return F.kl_div(F.linear(x, w).log_softmax(-1), p, reduction="none").sum(-1).mean()
