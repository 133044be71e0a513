"""`log_prob` of given logits."""

import pytest
import torch

IGNORE = -100


def eager(logits, target, squash, inner, outer):
    z = logits if logits.dtype == torch.float64 else logits.float()
    z = outer * (torch.tanh(inner * z) if squash == "tanh" else inner * z)
    kept = target != IGNORE
    picked = z.log_softmax(1).gather(1, target.masked_fill(~kept, 0).unsqueeze(1)).squeeze(1)
    return torch.where(kept, picked, 0.0), z.logsumexp(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("how", [("identity", 1.0, 1.0), ("identity", 1.0, 0.3), ("tanh", 0.2, 5.0)], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 127, 1009])
@pytest.mark.parametrize("chunk_rows", [1, 3, 64])
def test_values_and_gradient(assert_as_good_as_eager, dtype, how, vocab, chunk_rows):
    logits = (3 * torch.randn(7, vocab)).to(dtype)
    target = torch.randint(0, vocab, (7,))
    target[2] = IGNORE
    upstreams = torch.randn(2, 7, dtype=torch.float64)
    # both outputs at the target of a single class cancel; keep their parts comparable
    upstreams[1].abs_().add_(1)
    runs = []
    for run, wide in ((None, dtype), (eager, dtype), (eager, torch.float64)):
        leaf = logits.to(wide).requires_grad_()
        values = (
            torch.ops.fuse_losses.log_prob(leaf, target, *how, IGNORE, chunk_rows)
            if run is None
            else run(leaf, target, *how)
        )
        total = sum((u.to(v.dtype) * v).sum() for u, v in zip(upstreams, values, strict=True))
        runs.append([*values, *torch.autograd.grad(total, leaf)])
    if vocab == 1:  # log_prob is 0 and its gradient 1 - 1: compare with the rounding of 1
        for ours, oracle in zip(runs[0], runs[2], strict=True):
            tolerance = 4 * torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours.double(), oracle, rtol=tolerance, atol=tolerance)
    else:
        assert_as_good_as_eager(*runs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_ten_thousand(assert_as_good_as_eager, dtype):
    logits = (1e4 + 3 * torch.randn(7, 127)).to(dtype)
    target = torch.randint(0, 127, (7,))
    upstream = torch.randn(7, dtype=torch.float64)
    runs = []
    for ours, wide in ((True, dtype), (False, dtype), (False, torch.float64)):
        leaf = logits.to(wide).requires_grad_()
        how = ("identity", 1.0, 1.0)
        values = torch.ops.fuse_losses.log_prob(leaf, target, *how, IGNORE, 4) if ours else eager(leaf, target, *how)
        runs.append([*values, *torch.autograd.grad((upstream.to(values[0].dtype) * values[0]).sum(), leaf)])
    assert_as_good_as_eager(*runs)


def test_input_is_not_changed_and_gradient_keeps_its_dtype():
    leaf = torch.randn(5, 33, dtype=torch.bfloat16).requires_grad_()
    before = leaf.detach().clone()
    log_prob, lse = torch.ops.fuse_losses.log_prob(leaf, torch.arange(5), "tanh", 0.5, 2.0, IGNORE, 2)
    (grad,) = torch.autograd.grad(log_prob.sum() + lse.sum(), leaf)
    assert torch.equal(leaf, before) and grad.dtype == torch.bfloat16 and grad.data_ptr() != leaf.data_ptr()


def test_minus_infinity_nan_and_ignored_rows():
    logits = torch.randn(5, 9)
    logits[0, ::2] = float("-inf")
    logits[1] = float("nan")
    logits[3, 4] = float("nan")
    leaf = logits.requires_grad_()
    target = torch.tensor([1, IGNORE, 0, 2, 5])
    log_prob, _ = torch.ops.fuse_losses.log_prob(leaf, target, "identity", 1.0, 1.0, IGNORE, 2)
    assert log_prob[1] == 0 and log_prob[3].isnan() and log_prob[[0, 2, 4]].isfinite().all()
    upstream = torch.tensor([1.0, float("inf"), 1.0, 1.0, 1.0])
    (grad,) = torch.autograd.grad(log_prob, leaf, upstream)
    assert torch.equal(grad[1], torch.zeros(9)) and torch.equal(grad[0, ::2], torch.zeros(5))
    assert grad[3].isnan().all() and grad[[0, 2, 4]].isfinite().all()


def test_transposed_logits_and_int32_targets():
    base = torch.randn(33, 5)
    target = torch.randint(0, 33, (5,))
    runs = []
    for leaf, labels in ((base.t(), target.int()), (base.t().contiguous(), target)):
        leaf = leaf.detach().requires_grad_()
        log_prob, _ = torch.ops.fuse_losses.log_prob(leaf, labels, "identity", 1.0, 1.0, IGNORE, 2)
        runs.append([log_prob, *torch.autograd.grad(log_prob.sum(), leaf)])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)


def test_double_backward_raises():
    leaf = torch.randn(5, 9, requires_grad=True)
    log_prob, _ = torch.ops.fuse_losses.log_prob(leaf, torch.arange(5), "identity", 1.0, 1.0, IGNORE, 2)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(log_prob.sum(), leaf, create_graph=True)


def test_target_out_of_range():
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        torch.ops.fuse_losses.log_prob(torch.randn(2, 9), torch.tensor([0, 9]), "identity", 1.0, 1.0, IGNORE, 2)
