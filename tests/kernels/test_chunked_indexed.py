"""The row kernels in plain PyTorch, called directly: what they write, and to whom. Their numbers are the operators'."""

import pytest
import torch

from fuse_losses.kernels.chunked import indexed
from fuse_losses.kernels.squash import Squash

SQUASHES = [Squash("identity", 1.0, 0.3), Squash("tanh", 0.4, 2.5)]


@pytest.mark.parametrize("squash", SQUASHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_element_is_written_and_inputs_are_not(squash, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits, column = torch.randn(4, 33).to(dtype), torch.tensor([3, -1, 0, 32])
    before = logits.clone()
    log_prob, again, statistics = (torch.full(shape, float("nan"), dtype=wide) for shape in ((4,), (4,), (2, 4)))
    indexed.indexed_fwd(logits, column, -1, squash, log_prob, statistics)
    weight = torch.tensor([1.0, float("nan"), 0.5, 2.0], dtype=wide)  # of a row without a target: nobody reads it
    both, bwd = torch.full((2, 4, 33), float("nan"), dtype=dtype)
    indexed.indexed_fwd_bwd(logits, column, -1, weight, squash, again, both)
    indexed.indexed_bwd(logits, column, -1, -weight, None, statistics, squash, bwd)
    assert torch.equal(logits, before)
    leaf = logits.to(torch.float64).requires_grad_()
    z = squash.inner * leaf
    z = squash.outer * (z.tanh() if squash.name == "tanh" else z)
    expected = torch.where(column < 0, 0.0, z.log_softmax(1).gather(1, column.clamp(min=0)[:, None])[:, 0])
    (gradient,) = torch.autograd.grad(-(weight.nan_to_num() * expected).sum(), leaf)
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for value in (log_prob, again):
        torch.testing.assert_close(value.double(), expected, **close)
    for value in (both, bwd):
        torch.testing.assert_close(value.double(), gradient, **close)
        assert torch.equal(value[1], torch.zeros_like(value[1]))
    in_place = logits.clone()
    indexed.indexed_fwd_bwd(in_place, column, -1, weight, squash, again, in_place)
    assert torch.equal(in_place, both)
