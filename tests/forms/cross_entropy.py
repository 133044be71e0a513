"""Cross-entropy heads of models and of training code (the first half of the table)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.forms.form import IGNORE, H, V, form

MEAN_OR_SUM = "sum over num_items, or mean"


def for_causal_lm(logits, labels, num_items_in_batch=None, ignore_index=IGNORE, shift_labels=None):
    """Hugging Face's loss function, which takes its logits whole and pads the labels."""
    logits = logits.float()
    if shift_labels is None:
        labels = F.pad(labels, (0, 1), value=ignore_index)
        shift_labels = labels[..., 1:].contiguous()
    logits = logits.view(-1, V)
    shift_labels = shift_labels.view(-1).to(logits.device)
    reduction = "sum" if num_items_in_batch is not None else "mean"
    loss = F.cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction=reduction)
    if reduction == "sum":
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss


class Decoder(nn.Module):
    """The end of a decoder; `between` is what a family does to its logits."""

    bias = False

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(H, V, bias=self.bias)

    def between(self, logits):
        return logits

    def forward(self, x, y):
        logits = self.between(self.lm_head(x[:, slice(0, None), :]))
        return for_causal_lm(logits, y), logits


@form("C1", "Hugging Face, mean, logits returned", "kernels")
class Plain(Decoder):
    pass


@form("C1", "Hugging Face, num_items_in_batch is a tensor", "kernels")
class NumItems(Decoder):
    def forward(self, x, y, nf):
        logits = self.lm_head(x[:, slice(0, None), :])
        return for_causal_lm(logits, y, nf), logits


@form("C1", "Hugging Face, num_items_in_batch is an int", "kernels")
class NumItemsInt(NumItems):
    def forward(self, x, y, ni):
        return super().forward(x, y, ni)


@form("C1", "Hugging Face, num_items_in_batch is a SymInt", "kernels", how={"dynamic": True})
class NumItemsSymInt(NumItemsInt):
    pass


@form("C1", "Hugging Face, shift_labels are passed, logits stay", "kernels", dtype=torch.bfloat16)
class ShiftedBefore(Decoder):
    def forward(self, x, y, n):
        return for_causal_lm(self.lm_head(x), None, n, shift_labels=y)


@form("C1", "Hugging Face, labels set to ignore before use", "kernels")
class Relabelled(Decoder):
    def forward(self, x, c, m):
        labels = c.clone()
        labels[m == 0] = IGNORE
        return for_causal_lm(self.lm_head(x), labels)


@form("C2", "softcap by tanh, in bfloat16 before the upcast", "kernels", dtype=torch.bfloat16)
class Softcapped(Decoder):
    cap = 30.0

    def between(self, logits):
        logits = logits / self.cap
        logits = torch.tanh(logits)
        return logits * self.cap


@form("C2", "softcap, dynamic shapes: the cap is a SymFloat", "rows", how={"dynamic": True})
class SoftcappedDynamic(Softcapped):
    def __init__(self) -> None:
        super().__init__()
        self.cap = 12.5


@form("C2", "softcap by F.tanh", "kernels")
class SoftcappedF(Decoder):
    def between(self, logits):
        return F.tanh(logits / 30.0) * 30.0


@form("C3", "logits times a scale", "kernels")
class Scaled(Decoder):
    def between(self, logits):
        return logits * 0.0625


@form("C3", "logits over a scale, a SymFloat", "rows", how={"dynamic": True})
class ScaledDynamic(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.logits_scaling = 8.5

    def between(self, logits):
        return logits / self.logits_scaling


@form("C3", "logits over a scale, in place", "kernels")
class ScaledInPlace(Decoder):
    def forward(self, x, y):
        logits = self.lm_head(x)
        logits.div_(8.0)
        return for_causal_lm(logits, y)


@form("C3", "hidden states scaled before the head", "kernels")
class ScaledBefore(Decoder):
    def forward(self, x, y):
        logits = self.lm_head((x * H**-0.5)[:, slice(0, None), :])
        return for_causal_lm(logits, y), logits


@form("C4", "upcast twice", "kernels", dtype=torch.bfloat16)
class UpcastTwice(Decoder):
    def forward(self, x, y):
        logits = self.lm_head(x.to(self.lm_head.weight.dtype)).float()
        return for_causal_lm(logits, y), logits


@form("C5", "masked language model: bias, no upcast", "kernels", dtype=torch.bfloat16)
class MaskedLM(Decoder):
    bias = True

    def forward(self, x, y):
        scores = self.lm_head(x)
        return nn.CrossEntropyLoss()(scores.view(-1, V), y.view(-1)), scores


@form("C5", "masked language model tied to its embedding", "kernels")
class TiedMaskedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.decoder = nn.Linear(H, V)
        self.decoder.weight = self.embedding.weight

    def forward(self, c, y):
        scores = self.decoder(torch.tanh(self.embedding(c.roll(1, 1))))
        return nn.CrossEntropyLoss()(scores.view(-1, V), y.view(-1)), scores


@form("C6", "sparse prediction: masked rows alone", "kernels", unbacked=True)
class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(H, V)

    def forward(self, x, y):
        labels = y.view(-1)
        keep = labels != IGNORE
        hidden, labels = x.view(labels.shape[0], -1)[keep], labels[keep]
        return F.cross_entropy(self.decoder(hidden).float(), labels)


@form("C7", "encoder-decoder: scaled hidden states, a bias buffer", "kernels")
class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(H, V, bias=False)
        self.register_buffer("final_logits_bias", torch.randn(1, V))

    def forward(self, x, y):
        logits = self.lm_head(x * H**-0.5)
        logits = logits + self.final_logits_bias.to(logits.device)
        return nn.CrossEntropyLoss()(logits.view(-1, V), y.view(-1)), logits


@form("C8", "classification: a tiny vocabulary", "declined: small_vocab", options={"min_vocab": 4000})
class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(H, 5)

    def forward(self, x, c):
        logits = self.score(x)
        pooled = logits[torch.arange(x.shape[0]), c[:, 0] % 16]
        return nn.CrossEntropyLoss()(pooled.view(-1, 5), c[:, 1] % 5), pooled


@form("C9", "nanoGPT: ignore_index=-1", "kernels")
class NanoGPT(Decoder):
    def forward(self, x, y):
        logits = self.lm_head(x)
        targets = y.clamp(min=-1)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def padded_vocabulary(reduction):
    def fn(x, w, y):
        softcap = 15
        logits = F.linear(x, w)[..., : V - 8].float()
        logits = softcap * torch.tanh(logits / softcap)
        targets = y.clamp(-1, V - 9)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=reduction)
        return loss

    return fn


form("C10", "nanochat: padded vocabulary, softcap after the upcast", "kernels")(padded_vocabulary("mean"))
form("C10", "nanochat, none", "kernels", dtype=torch.bfloat16)(padded_vocabulary("none"))


@form("C11", "softcap by sigmoid, shifted", "rows", dtype=torch.bfloat16)
def sigmoid_softcap(x, w, c1):
    logits = F.linear(x, w.bfloat16())
    logits = 23 * torch.sigmoid((logits + 5) / 7.5)
    return F.cross_entropy(logits.float().view(-1, V), c1, reduction="sum")


@form("C11", "softcap by sigmoid", "rows")
def sigmoid_softcap_plain(x, w, c1):
    logits = 30 * torch.sigmoid(F.linear(x, w) / 7.5)
    return F.cross_entropy(logits.view(-1, V), c1)


@form("C11", "softcap by rsqrt", "rows")
def rsqrt_softcap(x, w, c1):
    logits = F.linear(x, w).float()
    logits = 15 * logits * torch.rsqrt(logits.square() + 225)
    return F.cross_entropy(logits.view(-1, V), c1, reduction="none")


@form("C11", "four chunks of rows in a loop", "kernels")
def four_chunks(x1, w, c1):
    loss = 0
    for h, c in zip(x1.chunk(4), c1.chunk(4), strict=True):
        loss = loss + F.cross_entropy(F.linear(h, w).float(), c, reduction="sum")
    return loss / c1.numel()


@form("C12", "the loss compiled alone: logits come in", "kernels")
def loss_alone(t, y, n):
    return F.cross_entropy(t.flatten(0, 1).float(), y.flatten(0, 1), reduction="sum", ignore_index=IGNORE) / n


@form("C12", "head and loss of one graph, sum over a count of valid tokens", "kernels")
def titan(x, w, y, n):
    return F.cross_entropy(F.linear(x, w).flatten(0, 1).float(), y.flatten(0, 1), reduction="sum") / n


@form("C12", "the head compiled without its loss", "declined: loss_elsewhere")
def head_alone(x, w):
    return F.linear(x, w)


@form("C13", "torchtune: chunks of the sequence, ignored rows stay", "kernels")
def tune_chunks(x, w, y):
    total = torch.tensor(0.0)
    for h, labels in zip(x.tensor_split(4, dim=1), y.tensor_split(4, dim=1), strict=True):
        logits = F.linear(h, w).float().reshape(-1, V)
        total += F.cross_entropy(logits, labels.reshape(-1), reduction="sum", ignore_index=IGNORE)
    return total / (y != IGNORE).sum()


@form("C13", "torchtune: ignored rows are left out", "kernels", unbacked=True)
def tune_masked(x, w, y):
    labels = y.reshape(-1)
    keep = torch.where(labels != IGNORE)[0]
    hidden, labels = x.reshape(-1, H).index_select(0, keep), labels.index_select(0, keep)
    total = F.cross_entropy(F.linear(hidden, w).float(), labels, reduction="sum", ignore_index=IGNORE)
    return total / keep.numel()


@form("C14", "litgpt: split along the sequence, mean of none", "kernels")
def split_none(x, w, y):
    logits = F.linear(x, w)[..., :-1, :].reshape(-1, V)
    targets = y[..., 1:].reshape(-1)
    losses = [
        F.cross_entropy(z, t, ignore_index=IGNORE, reduction="none")
        for z, t in zip(logits.split(8), targets.split(8), strict=True)
    ]
    not_ignored = (targets != IGNORE).sum()
    return torch.cat(losses).sum() / not_ignored.maximum(torch.ones_like(not_ignored))


@form("C14", "litgpt: a list of chunks of logits", "kernels")
def list_of_logits(x, w, y):
    chunks = [F.linear(h, w) for h in x.split(4, dim=1)]
    targets = [t.reshape(-1) for t in y.split(4, dim=1)]
    losses = [
        F.cross_entropy(z.reshape(-1, V), t, ignore_index=IGNORE, reduction="none")
        for z, t in zip(chunks, targets, strict=True)
    ]
    return torch.cat(losses).sum() / max(1, y.numel())


@form("C15", "logits shifted by a slice", "kernels")
def shifted(x, w, y):
    logits = F.linear(x, w)
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = y[..., 1:].contiguous()
    return nn.CrossEntropyLoss()(shift_logits.view(-1, V), shift_labels.view(-1))


@form("C15", "logits shifted, none over a mask", "kernels")
def shifted_masked(x, w, c, m):
    logits = F.linear(x, w)[:, :-1]
    losses = F.cross_entropy(logits.reshape(-1, V), c[:, 1:].reshape(-1), reduction="none").view(c.size(0), -1)
    return (losses * m[:, 1:]).sum() / m[:, 1:].sum().clamp(min=1)


@form("C16", "classes in dim 1, permuted", "kernels")
def class_dim_1(x, w, y):
    return F.cross_entropy(F.linear(x, w).permute(0, 2, 1), y)


@form("C16", "classes in dim 1, transposed, none", "kernels")
def class_dim_1_none(x, w, y):
    return F.cross_entropy(F.linear(x, w).transpose(1, 2), y, reduction="none").sum(1)


@form("C26", "F.linear_cross_entropy", "kernels")
def linear_cross_entropy(x1, w, y1):
    return F.linear_cross_entropy(x1, w, y1)
