"""The generic executor on a GPU: a chunk's operations compiled into kernels, called from inside a compiled graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, VOCAB = 2048, 64, 32_003


def smoothing(x, w, y, xt, wt):
    return F.cross_entropy(F.linear(x, w), y, label_smoothing=0.1)


def focal_and_entropy(x, w, y, xt, wt):
    log_probs = F.linear(x, w).float().log_softmax(-1)
    picked = log_probs.gather(1, y.clamp(min=0)[:, None]).squeeze(1)
    return -((1 - picked.exp()) ** 2 * picked).mean() - 0.1 * (log_probs.exp() * log_probs).sum(-1).mean()


def jsd(x, w, y, xt, wt):
    s, t = F.linear(x, w).float().log_softmax(-1), F.linear(xt, wt).float().log_softmax(-1)
    m = torch.logsumexp(torch.stack([s, t]), 0) - torch.log(torch.tensor(2.0, device=s.device))
    return 0.5 * (s.exp() * (s - m) + t.exp() * (t - m)).sum(-1).mean()


def tvd(x, w, y, xt, wt):
    return 0.5 * (F.linear(x, w).softmax(-1) - F.linear(xt, wt).softmax(-1)).abs().sum(-1).mean()


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    x, w = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN) * 0.3
    y = torch.randint(0, VOCAB, (ROWS,))
    y[::7] = -100
    teacher = [torch.randn(ROWS, 48), torch.randn(VOCAB, 48) * 0.3]
    floats = [t.cuda().to(dtype) for t in (x, w, *teacher)]
    return [floats[0].requires_grad_(), floats[1].requires_grad_(), y.cuda(), *floats[2:]]


def gradients(fn, args, upstream: float) -> list[torch.Tensor]:
    loss = fn(*args)
    grads = torch.autograd.grad(loss, args[:2], torch.tensor(upstream, dtype=loss.dtype, device="cuda"))
    return [loss.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [smoothing, focal_and_entropy, jsd, tvd])
def test_as_right_as_eager_in_the_memory_of_a_chunk(fn, dtype: torch.dtype) -> None:
    args = tensors(dtype)
    wide = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a for a in args]
    exact = gradients(fn, wide, 1.75)
    eager = gradients(fn, args, 1.75)
    compiled = torch.compile(fn, backend="fuse_losses")
    gradients(compiled, args, 1.75)
    assert torch._dynamo.utils.counters["fuse_losses"]["fused"] == 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours = gradients(compiled, args, 1.75)
    peak = torch.cuda.max_memory_allocated() - before
    for mine, theirs, want in zip(ours, eager, exact, strict=True):
        error, allowed = (mine.double() - want).norm(), 2 * (theirs.double() - want).norm()
        assert error <= allowed + 1e-6 * want.norm()
    assert peak < ROWS * VOCAB * 4
