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


def mean_of_rows_read_again(x1, w):
    """The second loss reads a number that is made of all rows."""
    z = F.linear(x1, w)
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return (z * entropy.detach().mean()).log_softmax(-1).square().sum(-1).mean()


def rows_set(x1, w, y1):
    z = F.linear(x1, w)
    z[:3] = 0
    return F.cross_entropy(z, y1)


def gumbel(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z - torch.empty_like(z).exponential_().log(), y1)


def transposed_square(x, w):
    z = F.linear(x, w[:5])  # positions and vocabulary of one size
    return (z.softmax(-1) * z.mT).sum(-1)


def rows_scaled(x, w, y):
    z = F.linear(x, w)
    z[:, :-1].mul_(2)
    return F.cross_entropy(z.mT, y)


def contrastive(x1, w):
    p = F.linear(x1, w).softmax(-1)
    return (p @ p.t()).diagonal()


def squared(x1, w):
    return F.linear(x1, w).softmax(-1).square()


def flipped_beside(x1, w):
    p = F.linear(x1, w).softmax(-1)
    return (p + p.flip(0).cumsum(0)).square().sum(-1)


def picked_by_argmax(x1, w):
    z = F.linear(x1, w)
    return z.log_softmax(-1)[z.argmax(-1) % 10].square().sum(-1)


def matrix_for_each_row(x1, w):
    return torch.bmm(F.linear(x1, w).softmax(-1)[:, None], x1[:, None, :] * w).squeeze(1)


# (what, function, code of the head's decline)
NEAR_MISSES = [
    ("log-probs are returned", log_probs_returned, "log_probs_returned"),
    ("softmax over rows", lambda x1, w, y1: F.nll_loss(F.linear(x1, w).log_softmax(0), y1), "wrong_axis"),
    (
        "classes in the wrong dim",
        lambda x, w, c: F.cross_entropy(F.linear(x, w), c[:, :1].repeat(1, VOCAB) % 5),
        "wrong_axis",
    ),
    ("gather over rows", lambda x1, w, c1: F.linear(x1, w).log_softmax(1).gather(0, c1[:, None] % 10), "wrong_axis"),
    ("sort of rows", lambda x1, w: F.linear(x1, w).softmax(-1).sort(0).values.sum(-1), "wrong_axis"),
    ("top-k of rows", lambda x1, w: F.linear(x1, w).softmax(-1).topk(2, 0).values.sum(-1), "wrong_axis"),
    ("cumsum over rows", lambda x1, w, y1: F.cross_entropy(F.linear(x1, w).cumsum(0), y1), "wrong_axis"),
    ("logsumexp over rows too", lambda x, w: F.linear(x, w).logsumexp((1, 2)), "rows_mix"),
    ("sum over rows", lambda x1, w: F.linear(x1, w).sum(0).log_softmax(-1)[3], "rows_mix"),
    ("max over rows", lambda x1, w: F.linear(x1, w).softmax(-1).amax(0).sum(), "rows_mix"),
    ("largest of all", lambda x1, w: F.linear(x1, w).softmax(-1).max(), "rows_mix"),
    ("mean of a batch", lambda x1, w, y1: _centred(F.linear(x1, w), y1), "rows_mix"),
    ("a mean of rows is read again", mean_of_rows_read_again, "rows_mix"),
    ("rows multiplied", contrastive, "rows_mix"),
    ("rows repeated", lambda x1, w, c1: F.cross_entropy(F.linear(x1, w).repeat(2, 1), c1.repeat(2)), "rows_mix"),
    ("rows expanded", lambda x1, w: F.linear(x1[:1], w).expand(4, -1).log_softmax(-1).sum(-1), "rows_mix"),
    ("rows flipped, then added up", flipped_beside, "wrong_axis"),
    ("rows joined", lambda x1, w, c1: F.cross_entropy(torch.cat(2 * [F.linear(x1, w)]), c1.repeat(2)), "rows_mix"),
    ("rolled as if flat", lambda x1, w, c1: F.cross_entropy(F.linear(x1, w).roll(1), c1), "rows_mix"),
    ("fewer rows than logits", lambda x, w, c: F.linear(x, w).log_softmax(-1).gather(-1, c[:, :3, None]), "rows_mix"),
    ("targets from the logits", target_from_logits, "rows_mix"),
    ("rows picked by their own classes", picked_by_argmax, "rows_mix"),
    (
        "rows padded",
        lambda x1, w, c1: F.cross_entropy(F.pad(F.linear(x1, w), (0, 0, 1, 0)), c1[[0, *range(10)]]),
        "rows_mix",
    ),
    ("median of rows", lambda x1, w: F.linear(x1, w).softmax(-1).median(0).values.sum(), "rows_mix"),
    ("k-th of rows", lambda x1, w: F.linear(x1, w).softmax(-1).kthvalue(2, 0).values.sum(), "rows_mix"),
    ("cummax of rows", lambda x1, w: F.linear(x1, w).softmax(-1).cummax(0).values.sum(-1), "wrong_axis"),
    ("rows multiplied by a matrix", lambda x1, w: x1.detach().t() @ F.linear(x1, w).softmax(-1), "rows_mix"),
    (
        "einsum over rows",
        lambda x, w: torch.einsum("btv,btv->bv", *2 * [F.linear(x, w).softmax(-1)]).amax(-1),
        "rows_mix",
    ),
    ("einsum of all pairs", lambda x, w: torch.einsum("btv,bsv->bts", *2 * [F.linear(x, w).softmax(-1)]), "rows_mix"),
    ("a matrix for each row", matrix_for_each_row, "rows_mix"),
    ("an index for all rows of one class", lambda x1, w, c1: squared(x1, w)[c1[:, None] % 10, c1[None, :]], "rows_mix"),
    ("some rows written to", rows_set, "rows_mix"),
    ("some rows scaled in place", rows_scaled, "rows_mix"),
    (
        "rows and vocabulary reshaped",
        lambda x1, w, c1: F.cross_entropy(F.linear(x1, w).view(VOCAB, 10), c1.repeat(4)[:VOCAB] % 10),
        "rows_mix",
    ),
    ("rows and vocabulary of one size", transposed_square, "rows_mix"),
    ("flattened", lambda x1, w: F.linear(x1, w).flatten().log_softmax(-1).square().sum(), "rows_mix"),
    ("Gumbel noise", gumbel, "rows_mix"),
    ("noise", lambda x1, w, y1: (lambda z: F.cross_entropy(z + torch.rand_like(z), y1))(F.linear(x1, w)), "rows_mix"),
    ("dropout", lambda x1, w, y1: F.cross_entropy(F.dropout(F.linear(x1, w), 0.5), y1), "rows_mix"),
    ("hidden states written to", hidden_mutated, "mutated"),
    ("autograd.Function", autograd_function, "opaque"),
    ("torch.func.grad", functorch, "functorch"),
]
# drawn anew in each run: only that it is declined can be compared
RANDOM = {n[1] for n in NEAR_MISSES if n[0] in ("Gumbel noise", "noise", "dropout")}


def _centred(z, y):
    return F.cross_entropy(z - z.mean(0, keepdim=True), y)


@pytest.mark.parametrize(("fn", "code"), [n[1:] for n in NEAR_MISSES], ids=[n[0] for n in NEAR_MISSES])
def test_declined_and_right(fn, code: str) -> None:
    available = tensors()
    args = [available[name] for name in inspect.signature(fn).parameters]
    capture = Capture()
    if fn in RANDOM:
        capture.compile(fn)(*args)
    else:
        assert_as_eager(capture.compile(fn), fn, args)
    assert set(capture.codes) == {code}, str(capture.report)
    assert not capture.report.fused
    assert capture.after == capture.before  # the very graphs: nothing was touched


def test_explain_says_the_same() -> None:
    available = tensors()
    report = fuse_losses.explain(contrastive, min_vocab=1)(available["x1"], available["w"])
    (head,) = report.declined
    assert head.decline.code == "rows_mix"
    assert "aten.mm" in head.decline.reason
    assert "p @ p.t()" in head.decline.where


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


def test_a_bias_on_given_logits_is_not_forgotten() -> None:
    def loss(z, b, y):
        return F.cross_entropy(z.float() + b, y)

    z, b = torch.randn(8, VOCAB, requires_grad=True), torch.randn(VOCAB, requires_grad=True)
    y = torch.randint(0, VOCAB, (8,))
    capture = Capture()
    compiled = capture.compile(loss)
    assert_as_eager(compiled, loss, (z, b, y))
    assert capture.codes == ["no_gain"]
