"""The functional forms return what PyTorch's own functions return."""

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F

from fuse_losses.functional import cross_entropy, linear_cross_entropy, linear_log_probs
from fuse_losses.plan.chunk import default_chunk_rows


def head(dtype=torch.float32, shape=(2, 5), vocab=127, hidden=16):
    x = torch.randn(*shape, hidden).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden) / hidden**0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, shape)
    target.view(-1)[1:2] = -100
    return x, weight, bias, target


def eager_loss(x, weight, bias, target, softcap=None, logit_scale=1.0, **kwargs):
    u = logit_scale * F.linear(x, weight, bias)
    z = u if softcap is None else softcap * torch.tanh(u / softcap)
    if z.dim() == 1:
        return F.cross_entropy(z, target, **kwargs)
    loss = F.cross_entropy(z.flatten(0, -2), target.flatten(), **kwargs)
    return loss.view(target.shape) if kwargs.get("reduction") == "none" else loss


def compare(ours, eager, leaves):
    assert ours.dtype == eager.dtype and ours.shape == eager.shape
    upstream = torch.randn(ours.shape).to(ours.dtype)
    close = {"rtol": 2e-2, "atol": 1e-2} if ours.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, eager, **close)
    theirs = torch.autograd.grad(eager, leaves, upstream)
    for a, b in zip(torch.autograd.grad(ours, leaves, upstream), theirs, strict=True):
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("softcap, logit_scale", [(None, 1.0), (None, 0.25), (3.0, 1.0), (3.0, 2.0)])
def test_linear_cross_entropy(dtype, reduction, softcap, logit_scale):
    *leaves, target = head(dtype)
    x, weight, bias = leaves
    options = {"softcap": softcap, "logit_scale": logit_scale, "reduction": reduction}
    ours = linear_cross_entropy(x, weight, target, bias, chunk_rows=4, **options)
    compare(ours, eager_loss(x, weight, bias, target, **options), leaves)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)], ids=str)
def test_shapes(shape):
    x, weight, _, target = head(shape=shape)
    for reduction in ("none", "mean"):
        ours = linear_cross_entropy(x, weight, target, reduction=reduction)
        compare(ours, eager_loss(x, weight, None, target, reduction=reduction), [x, weight])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_logits(dtype, reduction):
    logits = (2 * torch.randn(2, 5, 33)).to(dtype).requires_grad_()
    target = torch.randint(0, 33, (2, 5))
    target[0, 1] = 7
    ours = cross_entropy(logits, target, reduction=reduction, ignore_index=7, softcap=4.0)
    capped = 4.0 * torch.tanh(logits / 4.0)
    eager = F.cross_entropy(capped.flatten(0, 1), target.flatten(), reduction=reduction, ignore_index=7)
    compare(ours, eager.view(target.shape) if reduction == "none" else eager, [logits])


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_linear_log_probs(softcap):
    x, weight, bias, target = head()
    target.clamp_(min=0)
    u = F.linear(x, weight, bias)
    z = (u if softcap is None else softcap * torch.tanh(u / softcap)) / 0.7
    eager = z.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    compare(linear_log_probs(x, weight, target, bias, temperature=0.7, softcap=softcap), eager, [x, weight, bias])


def test_linear_log_probs_ignore_only_what_is_asked():
    x, weight, _, target = head()
    ignored = linear_log_probs(x, weight, target, ignore_index=-100)
    assert ignored.view(-1)[1] == 0 and (ignored.view(-1)[2:] < 0).all()
    with pytest.raises(IndexError, match="Target -100"):
        linear_log_probs(x, weight, target)
    half = linear_log_probs(x.bfloat16(), weight.bfloat16(), target, ignore_index=-100)
    assert half.dtype == torch.float32


def test_mean_over_no_rows_is_nan_with_zero_gradients():
    for shape in ((0,), (4,)):
        x, weight = torch.randn(*shape, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
        loss = linear_cross_entropy(x, weight, torch.full(shape, -100))
        assert loss.isnan()
        for leaf, grad in zip((x, weight), torch.autograd.grad(loss, (x, weight)), strict=True):
            assert torch.equal(grad, torch.zeros_like(leaf))
        logits = torch.randn(*shape, 9, requires_grad=True)
        loss = cross_entropy(logits, torch.full(shape, -100))
        assert loss.isnan() and torch.equal(*torch.autograd.grad(loss, logits), torch.zeros_like(logits))


def test_autocast_is_honoured():
    *leaves, target = head()
    x, weight, bias = leaves
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(x, weight, target, bias)
        eager = eager_loss(x, weight, bias, target)
    assert ours.dtype == eager.dtype == torch.float32
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-3)
    theirs = torch.autograd.grad(eager, leaves)
    for a, b in zip(torch.autograd.grad(ours, leaves), theirs, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dynamic", [False, True])
@torch._inductor.config.patch(force_disable_caches=True)  # a cached graph would hide a change of an operator
def test_under_compile(dynamic):
    *leaves, target = head()
    x, weight, bias = leaves
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, dynamic=dynamic)
    compare(
        compiled(x, weight, target, bias, softcap=3.0),
        eager_loss(x, weight, bias, target, softcap=3.0),
        leaves,
    )


def test_clear_errors():
    x, weight, bias, target = head()
    with pytest.raises(ValueError, match="got 'average'"):
        linear_cross_entropy(x, weight, target, reduction="average")
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        cross_entropy(x, target, reduction="Mean")
    with pytest.raises(ValueError, match=r"\(2, 5, 16\).*\(2, 4\)"):
        linear_cross_entropy(x, weight, target[:, :4])
    with pytest.raises(ValueError, match=r"\(2, 5, 16\).*\(16, 127\)"):
        linear_cross_entropy(x, weight.t(), target)
    with pytest.raises(ValueError, match=r"\(127, 16\).*\(126,\)"):
        linear_cross_entropy(x, weight, target, bias[1:])
    with pytest.raises(TypeError, match=r"input and weight .* torch.bfloat16 and torch.float32"):
        linear_cross_entropy(x.bfloat16(), weight, target)
    with pytest.raises(TypeError, match="input and bias"):
        linear_cross_entropy(x, weight, target, bias.double())
    with pytest.raises(ValueError, match="softcap must be positive"):
        linear_cross_entropy(x, weight, target, softcap=0.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_log_probs(x, weight, target, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_rows"):
        linear_cross_entropy(x, weight, target, chunk_rows=-1)
    with pytest.raises(IndexError, match="Target 127 is out of bounds"):
        linear_cross_entropy(x, weight, target.fill_(127))


@pytest.mark.parametrize(
    "vocab, itemsize, device, rows",
    [
        (128256, 4, "cpu", 32),  # the floor
        (32000, 4, "cpu", 64),
        (16384, 4, "cpu", 128),
        (50, 4, "cpu", 8192),  # the cap
        (128256, 2, "cuda", 2048),
        (262144, 2, "cuda", 1024),
        (262144, 4, "cuda", 1024),  # the floor
        (32000, 2, "cuda", 8192),
    ],
)
def test_default_chunk_rows(vocab, itemsize, device, rows):
    assert default_chunk_rows(vocab, itemsize, device) == rows
