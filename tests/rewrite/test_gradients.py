"""The autograd contract: what gets a gradient in eager gets that gradient, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fuse_losses
from tests.capture import Capture, operators
from tests.head.spellings import Spelling, tensors
from tests.oracle import assert_as_eager

OPTIONS = {"fuse_losses.min_vocab": 1}


def head_without_gradients(x1, w, y1):
    with torch.no_grad():
        z = F.linear(x1, w)
    return F.cross_entropy(z, y1) * w.sum()


def loss_without_gradients(x1, w, y1):
    z = F.linear(x1, w)
    with torch.no_grad():
        loss = F.cross_entropy(z, y1)
    return loss * w.sum()


def metric_without_gradients(x1, w, y1):
    z = F.linear(x1, w)
    loss = F.cross_entropy(z, y1)
    with torch.no_grad():
        perplexity = z.logsumexp(-1).mean()
    return loss, perplexity


def metric_before_the_loss(x1, w, y1):
    z = F.linear(x1, w)
    with torch.no_grad():
        metric = F.cross_entropy(z, y1)
    return metric, F.cross_entropy(z, y1)


def detached_logits(x1, w, y1):
    z = F.linear(x1, w)
    return F.cross_entropy(z.detach(), y1) * w.sum()


def detached_term(x1, w, c1):
    z = F.linear(x1, w)
    log_prob = z.log_softmax(-1).gather(1, c1[:, None]).squeeze(1)
    return (-log_prob * log_prob.detach().exp()).mean() + z.detach().logsumexp(-1).mean()


def logsumexp_without_gradients(x1, w, c1):
    """Not log_softmax: the gradient of the logsumexp is missing."""
    z = F.linear(x1, w)
    with torch.no_grad():
        lse = z.logsumexp(-1, keepdim=True)
    return (z - lse).gather(1, c1[:, None])


def logsumexp_detached(x1, w, c1):
    z = F.linear(x1, w)
    return (z - z.logsumexp(-1, keepdim=True).detach()).gather(1, c1[:, None])


def detached_loss(x1, w, y1):
    loss = F.cross_entropy(F.linear(x1, w), y1)
    return loss, loss.detach()


def frozen_head(x1, w, y1):
    return F.cross_entropy(F.linear(x1.tanh(), w.detach()), y1)


def frozen_body(x1, w, y1):
    return F.cross_entropy(F.linear(x1.detach(), w), y1)


def two_heads_on_one_weight(x, w, y):
    first = F.cross_entropy(F.linear(x, w).mT, y)
    second = F.cross_entropy(F.linear(x.tanh(), w).mT, y, reduction="sum")
    return first + 0.3 * second


def tied_embedding(w, c):
    return F.cross_entropy(F.linear(F.embedding(c, w).tanh(), w).mT, c.roll(1))


def two_losses_on_one_head(x1, w, y1, c1):
    z = F.linear(x1, w)
    return F.cross_entropy(z, y1) + 0.5 * F.cross_entropy(z, c1, reduction="sum")


def labels_set_before(x1, w, y1):
    labels = y1.clone()
    labels[:3] = -100
    return F.cross_entropy(F.linear(x1, w), labels)


def autocast_inside(x1, w, b, y1):
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x1, w, b)
    return F.cross_entropy(z.float(), y1)


def autocast_around_loss(x1, w, y1):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(x1 @ w.t(), y1)


def autocast_off_inside(x1, w, y1):
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x1, w)
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(z.float() / 2, y1)


def loss_and_logits(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z.float().view(-1, 37), y.view(-1)), z


def loss_and_capped_logits(x, w, y):
    z = 3 * torch.tanh(F.linear(x, w) / 3)
    return F.cross_entropy(z.view(-1, 37), y.view(-1)), z


def loss_and_scaled_logits(x, w, b, y):
    z = (F.linear(x, w) + b) * 0.25
    return F.cross_entropy(z.transpose(1, 2), y), z.float()


def loss_and_shifted_logits(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z[:, :-1].reshape(-1, 37), y[:, 1:].reshape(-1)), z


def logits_divided_in_place_and_returned(x, w, c):
    z = F.linear(x, w)
    z.div_(2)
    return z.log_softmax(-1).gather(-1, c[..., None]), z


CASES = [
    head_without_gradients,
    loss_without_gradients,
    metric_without_gradients,
    metric_before_the_loss,
    detached_logits,
    detached_term,
    detached_loss,
    frozen_head,
    frozen_body,
    two_heads_on_one_weight,
    tied_embedding,
    two_losses_on_one_head,
    labels_set_before,
    loss_and_logits,
    loss_and_capped_logits,
    loss_and_scaled_logits,
    loss_and_shifted_logits,
    logits_divided_in_place_and_returned,
]
AUTOCAST = [autocast_inside, autocast_around_loss, autocast_off_inside]


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_eager(fn, dtype: torch.dtype) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, Spelling("", fn, "").args(dtype))
    assert capture.report.fused and not capture.codes, str(capture.report)


@pytest.mark.parametrize("fn", [logsumexp_without_gradients, logsumexp_detached], ids=lambda fn: fn.__name__)
def test_half_a_log_softmax(fn) -> None:
    capture = Capture()
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, Spelling("", fn, "").args())


@pytest.mark.parametrize("fn", AUTOCAST, ids=lambda fn: fn.__name__)
def test_autocast_inside(fn) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, Spelling("", fn, "").args())
    assert capture.report.fused and not capture.codes, str(capture.report)


@pytest.mark.parametrize("fn", [loss_and_logits, autocast_off_inside, two_losses_on_one_head], ids=lambda f: f.__name__)
def test_autocast_of_the_caller(fn) -> None:
    capture = Capture(chunk_rows=4)
    compiled = capture.compile(fn, fullgraph=True)

    def around(f):
        def run(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return f(*args)

        return run

    assert_as_eager(around(compiled), around(fn), Spelling("", fn, "").args())
    assert capture.report.fused and not capture.codes, str(capture.report)


@pytest.mark.parametrize(
    "fn", [loss_and_logits, metric_without_gradients, two_heads_on_one_weight], ids=lambda fn: fn.__name__
)
def test_with_inductor(fn) -> None:
    compiled = torch.compile(fn, backend="fuse_losses", fullgraph=True, options=OPTIONS)
    assert_as_eager(compiled, fn, Spelling("", fn, "").args())
    assert torch._dynamo.utils.counters["fuse_losses"]["fused"] >= 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_none_are_computed(mode) -> None:
    named = tensors()
    args = [named["x"], named["w"], named["y"]]
    capture = Capture()
    with mode():
        loss, logits = capture.compile(loss_and_logits)(*args)
        expected = loss_and_logits(*args)
    assert not loss.requires_grad and not logits.requires_grad
    torch.testing.assert_close((loss, logits), expected)
    assert operators(capture.after[0]) == ["linear_nll_sum"]


def test_only_what_needs_a_gradient_has_one() -> None:
    named = tensors()
    x, w, y = named["x1"], named["w"].detach(), named["y1"]
    Capture().compile(lambda: F.cross_entropy(F.linear(x, w), y))().backward()
    assert x.grad is not None and w.grad is None


def test_a_metric_does_not_make_the_loss_recompute() -> None:
    """The loss keeps its gradients in the forward when what reads the logits besides it wants none."""
    named = tensors()
    capture = Capture()
    capture.compile(metric_without_gradients)(named["x1"], named["w"], named["y1"])
    assert operators(capture.after[0]).count("linear_nll_sum") == 1
    assert capture.report.fused[0].details["gradients"] == "forward"


def test_two_losses_share_one_operator_where_they_can() -> None:
    def fn(x1, w, y1):
        z = F.linear(x1, w)
        return F.cross_entropy(z, y1), z.logsumexp(-1), F.cross_entropy(z, y1, reduction="none")

    named = tensors()
    capture = Capture()
    capture.compile(fn)(named["x1"], named["w"], named["y1"])
    assert operators(capture.after[0]) == ["linear_log_prob"]


# --------------------------------------------------------------------------------------------------- checkpointing


def checkpointed_head(x, w, y):
    def body(x, w, y):
        return F.cross_entropy(F.linear(x.tanh(), w).mT, y)

    return checkpoint(body, x, w, y, use_reentrant=False)


def checkpointed_body(x, w, y):
    x = checkpoint(lambda x: x.tanh() * 2, x, use_reentrant=False)
    return F.cross_entropy(F.linear(x, w).mT, y)


@pytest.mark.parametrize(
    ("fn", "operator"),
    [(checkpointed_head, "linear_log_prob"), (checkpointed_body, "linear_nll_sum")],
    ids=["head", "body"],
)
def test_checkpoint(fn, operator: str) -> None:
    """A checkpointed head recomputes: its forward runs twice, so it must not make gradients there."""
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, Spelling("", fn, "").args())
    assert operators(capture.after[0]) == [operator]


def test_checkpoint_with_inductor() -> None:
    compiled = torch.compile(checkpointed_head, backend="fuse_losses", fullgraph=True, options=OPTIONS)
    assert_as_eager(compiled, checkpointed_head, Spelling("", checkpointed_head, "").args())
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1}


def test_a_copy_is_rewritten_not_the_checkpoint_body_that_was_captured() -> None:
    capture = Capture()
    capture.compile(checkpointed_head)(*Spelling("", checkpointed_head, "").args())
    assert operators(capture.after[0]) and not operators(capture.before[0])


# ---------------------------------------------------------------------------------------------------- second backward

TWICE = textwrap.dedent(
    """
    import torch, torch.nn.functional as F
    torch.manual_seed(0)
    body, w = torch.nn.Linear(6, 6), torch.randn(37, 6, requires_grad=True)
    x, y = torch.randn(10, 6), torch.randint(0, 37, (10,))
    def fn(x, y):
        return F.cross_entropy(F.linear(body(x).tanh(), w), y)
    compiled = torch.compile(fn, backend="fuse_losses", options={"fuse_losses.min_vocab": 1})
    leaves = [*body.parameters(), w]
    loss = compiled(x, y)
    first = torch.autograd.grad(1.7 * loss, leaves, retain_graph=True)
    second = torch.autograd.grad(1.7 * loss, leaves)
    eager = torch.autograd.grad(1.7 * fn(x, y), leaves)
    for a, b, c in zip(first, second, eager):
        assert torch.equal(a, b), "the second backward gives another gradient"
        torch.testing.assert_close(a, c)
    print(torch._dynamo.utils.counters["fuse_losses"]["fused"])
    """
)


def test_backward_twice_cold_and_from_a_warm_cache(tmp_path) -> None:
    """retain_graph with a body before the head, in a process that compiles and in one that finds it compiled."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["1"]


def test_weights_written_to_before_they_are_summed() -> None:
    """Eager refuses the backward; the value must be that of the weights as they were, or an error, never another."""

    def fn(x1, w, y1, scale):
        scale = scale.clone()
        weighted = F.cross_entropy(F.linear(x1, w), y1, reduction="none") * scale
        scale.zero_()
        return weighted.sum()

    named = tensors()
    scale = torch.rand(named["x1"].shape[0])
    args = [named["x1"], named["w"], named["y1"], scale]
    capture = Capture()
    found = capture.compile(fn)(*args)
    assert capture.summaries == ["linear + log-prob"]
    torch.testing.assert_close(found, fn(*args))


def test_a_mask_written_to_between_two_exits() -> None:
    def fn(x1, w, scale):
        scale = scale.clone()
        z = F.linear(x1, w)
        first = (z.softmax(-1) * z).sum(-1)
        scale.mul_(3)
        return first, (z.sigmoid() * scale[:, None]).sum(-1)

    named = tensors()
    scale = torch.rand(named["x1"].shape[0])
    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, [named["x1"].detach(), named["w"].detach(), scale])


def test_a_graph_that_does_not_compile_goes_as_it_came(monkeypatch) -> None:
    def refuse(*args):
        raise RuntimeError("the operator refuses")

    monkeypatch.setattr("fuse_losses.rewrite.indexed.IndexedWriter._nll", lambda self, f, fused: self.call(refuse))
    named = tensors()
    args = [named["x1"], named["w"], named["y1"]]

    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w), y1)

    compiled = torch.compile(fn, backend="fuse_losses", options={"fuse_losses.min_vocab": 1})
    assert_as_eager(compiled, fn, args)
    (head,) = fuse_losses.last_report().heads
    assert head.decline is not None and head.decline.code == "failed"
