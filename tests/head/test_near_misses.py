"""Heads that are not fused: each says why, by code, and computes what eager computes."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import fuse_losses
from tests.capture import Capture
from tests.head.spellings import VOCAB, tensors
from tests.oracle import assert_as_eager


class Reader(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.logsumexp(-1) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.unsqueeze(-1).expand(-1, VOCAB) / VOCAB


def masked_fill(x1, w, b, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z.masked_fill(b > 3, -1e9), y1)


def logits_in_another_term(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + z.square().mean()


def target_from_logits(x1, w):
    z = F.linear(x1, w)
    return F.cross_entropy(z, z.argmax(-1))


def hidden_mutated(x1, w, y1):
    h = x1 * 2
    z = F.linear(h, w)
    with torch.no_grad():
        h.mul_(3)
    return F.cross_entropy(z, y1).detach()


def log_probs_returned(x1, w, y1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    return F.nll_loss(log_probs, y1), log_probs


def functorch(x1, w, y1):
    return torch.func.grad(lambda h: F.cross_entropy(F.linear(h, w), y1))(x1)


def autograd_function(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + Reader.apply(z).mean()


def entropy(x1, w, c1):
    log_probs = F.linear(x1, w).log_softmax(-1)
    return log_probs.gather(1, c1[:, None]).mean() - (log_probs.exp() * log_probs).sum(-1).mean()


def learned_temperature(x1, w, b, y1):
    return F.cross_entropy(F.linear(x1, w) * b[0].exp(), y1)


def kl_to_teacher(x1, w, wt):
    return F.kl_div(F.linear(x1, w).log_softmax(-1), (x1 @ wt).softmax(-1), reduction="batchmean")


def vocab_slice(x1, w, y1):
    return F.cross_entropy(F.linear(x1, w)[:, :31], y1.clamp(max=30))


def topk(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1), z.topk(3).values


def lora(x1, w, wt, y1):
    return F.cross_entropy(F.linear(x1, w) + 0.5 * (x1 @ wt), y1)


def written_rows(x, w, y):
    z = F.linear(x, w)
    z[:, :-1].mul_(2)
    return F.cross_entropy(z.mT, y)


# (what, function, code of the head's decline); where two products make the logits, both are declined
NEAR_MISSES = [
    ("log-probs are returned", log_probs_returned, "log_probs_returned"),
    ("softmax over rows", lambda x1, w, y1: F.nll_loss(F.linear(x1, w).log_softmax(0), y1), "wrong_axis"),
    (
        "classes in the wrong dim",
        lambda x, w, c: F.cross_entropy(F.linear(x, w), c[:, :1].repeat(1, VOCAB) % 5),
        "wrong_axis",
    ),
    ("gather over rows", lambda x1, w, c1: F.linear(x1, w).log_softmax(1).gather(0, c1[:, None] % 10), "wrong_axis"),
    ("logsumexp over rows too", lambda x, w: F.linear(x, w).logsumexp((1, 2)), "wrong_axis"),
    ("logits in another term", logits_in_another_term, "unsupported_transform"),
    ("top-k of the logits", topk, "unsupported_loss"),
    ("class weights", lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w), y1, b.detach().exp()), "unsupported_loss"),
    (
        "label smoothing",
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, label_smoothing=0.1),
        "unsupported_loss",
    ),
    (
        "soft targets",
        lambda x1, w, wt: F.cross_entropy(F.linear(x1, w), (x1 @ wt).softmax(-1).detach()),
        "unsupported_transform",
    ),
    (
        "several classes",
        lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c[..., None].repeat(1, 1, 3)),
        "unsupported_loss",
    ),
    ("fewer rows than logits", lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c[:, :3, None]), "rows_mix"),
    ("targets from the logits", target_from_logits, "unsupported_loss"),
    ("masked_fill", masked_fill, "unsupported_transform"),
    ("part of the vocabulary", vocab_slice, "unsupported_transform"),
    ("hidden states written to", hidden_mutated, "mutated"),
    ("some rows written to", written_rows, "unsupported_transform"),
    ("autograd.Function", autograd_function, "opaque"),
    ("torch.func.grad", functorch, "functorch"),
    ("sum over rows", lambda x1, w: F.linear(x1, w).sum(0).log_softmax(-1)[3], "unsupported_loss"),
    ("cumsum over rows", lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).cumsum(0), y1), "unsupported_transform"),
    ("rows picked by an index", lambda x1, w, c1: F.cross_entropy(F.linear(x1, w)[c1 % 10], c1), "rows_mix"),
    (
        "an index for each of two rows",
        lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(2, 6), c1[:4]],
        "rows_mix",
    ),
    (
        "rows and vocabulary reshaped",
        lambda x1, w, c1: F.cross_entropy(F.linear(x1, w).view(VOCAB, 10), c1.repeat(4)[:VOCAB] % 10),
        "rows_mix",
    ),
    ("LoRA", lora, "unsupported_transform"),
    ("a learned temperature", learned_temperature, "unsupported_transform"),
    ("logits in float64", lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).double(), y1), "unsupported_dtype"),
    ("entropy", entropy, "unsupported_transform"),
    ("KL to a teacher", kl_to_teacher, "unsupported_transform"),
    (
        "bias after a softcap",
        lambda x1, w, b, y1: F.cross_entropy(F.linear(x1, w).tanh() + b, y1),
        "unsupported_transform",
    ),
    ("a bias per row", lambda x1, w, y1: F.cross_entropy(F.linear(x1, w) + x1[:, :1], y1), "unsupported_transform"),
    ("relu", lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).relu(), y1), "unsupported_transform"),
    ("one class for all", lambda x1, w: F.linear(x1, w).log_softmax(-1)[:, 0].sum(), "unsupported_loss"),
    (
        "einsum of two matrices, weight first",
        lambda x1, w, y1: F.cross_entropy(torch.einsum("vh,nh->nv", w, x1), y1),
        "wrong_axis",
    ),
]


@pytest.mark.parametrize(("fn", "code"), [n[1:] for n in NEAR_MISSES], ids=[n[0] for n in NEAR_MISSES])
def test_declined_and_right(fn, code: str) -> None:
    available = tensors()
    args = [available[name] for name in inspect.signature(fn).parameters]
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, args)
    assert set(capture.codes) == {code}, str(capture.report)
    assert not capture.report.fused
    assert capture.after == capture.before  # the very graphs: nothing was touched


def test_explain_says_the_same() -> None:
    available = tensors()
    report = fuse_losses.explain(topk, min_vocab=1)(available["x1"], available["w"], available["y1"])
    (head,) = report.declined
    assert head.decline.code == "unsupported_loss"
    assert "aten.topk" in head.decline.reason
    assert "z.topk(3)" in head.decline.where


def test_labels_written_to_after_the_loss() -> None:
    """No obstacle: without gradients, as eager's backward refuses what was written to."""

    def fn(x1, w, y1):
        labels = y1.clone()
        loss = F.cross_entropy(F.linear(x1, w), labels)
        labels[0] = 3
        return loss, labels

    named = tensors()
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, [named["x1"].detach(), named["w"].detach(), named["y1"]])
    assert len(capture.report.fused) == 1, str(capture.report)


def test_labels_written_to_between_head_and_loss() -> None:
    """The loss reads the labels behind the write, wherever the head is: right, fused or not."""

    def fn(x1, w, y1):
        labels = y1.clone()
        z = F.linear(x1, w)
        labels[:4] = -100
        return F.cross_entropy(z, labels)

    named = tensors()
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, [named["x1"], named["w"], named["y1"]])
    assert len(capture.report.fused) == 1, str(capture.report)


def test_labels_written_to_between_two_losses() -> None:
    def fn(x1, w, y1):
        labels = y1.clone()
        z = F.linear(x1, w)
        first = F.cross_entropy(z, labels)
        labels[:4] = 7
        return first + 2 * F.cross_entropy(z, labels)

    named = tensors()
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, [named["x1"].detach(), named["w"].detach(), named["y1"]])


@pytest.mark.parametrize("operand", ["w", "b"])
def test_a_weight_written_to_between_head_and_loss(operand: str) -> None:
    def fn(x1, w, b, y1):
        w, b = w.detach().clone(), b.detach().clone()
        z = F.linear(x1, w, b)
        {"w": w, "b": b}[operand].zero_()
        return F.cross_entropy(z, y1).detach()

    named = tensors()
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, [named[name] for name in ("x1", "w", "b", "y1")])
    assert capture.codes == ["mutated"]


def test_a_small_vocabulary_is_left_alone_by_default() -> None:
    named = tensors()
    args = [named["x1"], named["w"], named["y1"]]
    report = fuse_losses.explain(lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1))(*args)
    assert [h.decline.code for h in report.declined] == ["small_vocab"]
    report = fuse_losses.explain(lambda x1, w: F.linear(x1, w).softmax(-1) @ w)(*args[:2])
    assert report.heads == []  # a router or an attention: nothing that a user calls a head
