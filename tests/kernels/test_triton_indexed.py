"""The row kernels in Triton: compiled on a GPU, or in the interpreter (see test_interpreter.py), small sizes."""

import os

import pytest
import torch

from fuse_losses.kernels.chunked import indexed as chunked
from fuse_losses.kernels.squash import Squash

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1"
)

SQUASHES = [Squash("identity", 1.0, 1.0), Squash("identity", 1.0, 0.3), Squash("tanh", 0.4, 2.5)]
VOCABS = [1, 127, 1009, 8192, 20011]  # below, at and beyond one tile
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 6


@pytest.fixture
def triton_kernels():
    return pytest.importorskip("fuse_losses.kernels.triton.indexed")


def unwritten(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def chunk(vocab, dtype):
    logits = (3 * torch.randn(ROWS, vocab)).to(dtype).to(DEVICE)
    column = torch.randint(0, vocab, (ROWS,), device=DEVICE)
    column[1] = -1
    column[-1] = vocab - 1
    return logits, column


def oracle(logits, column, squash):
    """(z, log_prob, log_softmax) in float64."""
    u = logits.double()
    z = squash.outer * (torch.tanh(squash.inner * u) if squash.name == "tanh" else squash.inner * u)
    log_softmax = z.log_softmax(1)
    log_prob = torch.where(column < 0, 0.0, log_softmax.gather(1, column.clamp(min=0)[:, None])[:, 0])
    return z, log_prob, log_softmax


def oracle_gradient(logits, column, on_target, on_all, squash):
    z, _, log_softmax = oracle(logits, column, squash)
    hot = torch.zeros_like(z)
    hot[torch.arange(ROWS, device=DEVICE), column.clamp(min=0)] = (column >= 0).double()
    dz = on_all[:, None].double() * log_softmax.exp() + on_target[:, None].double() * hot
    slope = 1 - (z / squash.outer) ** 2 if squash.name == "tanh" else torch.ones_like(z)
    return dz * slope * squash.inner * squash.outer


def forward(kernels, logits, column, squash):
    """(log_prob, statistics), the latter strided as those of a chunk are."""
    out = unwritten(ROWS), unwritten(2, ROWS + 3)[:, :ROWS]
    kernels.indexed_fwd(logits, column, -1, squash, *out)
    return out


def close(actual, expected, roundings=8.0):
    """Within a few roundings of the dtype, relative to the largest value."""
    scale = expected.abs().max().clamp(min=1e-3).item()
    eps = torch.finfo(actual.dtype).eps
    half = 1 if INTERPRETED and actual.dtype == torch.bfloat16 else 0.5  # the interpreter truncates to bfloat16
    tolerance = (roundings * 2**-24 + half * eps) * scale
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("squash", SQUASHES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_the_oracle(triton_kernels, vocab, dtype, squash):
    logits, column = chunk(vocab, dtype)
    before = logits.clone()
    log_prob, statistics = forward(triton_kernels, logits, column, squash)
    z, expected, _ = oracle(logits, column, squash)
    largest = max(1.0, z.abs().max().item())
    close(log_prob, expected, 16 * largest)
    close(statistics.sum(0), z.logsumexp(1), 16 * largest)
    assert log_prob[1] == 0

    of_log_prob, of_lse = torch.randn(2, ROWS, device=DEVICE)
    out = unwritten(ROWS, vocab, dtype=dtype)
    triton_kernels.indexed_bwd(logits, column, -1, of_log_prob, of_lse, statistics, squash, out)
    on_target = torch.where(column < 0, 0.0, of_log_prob)
    close(out, oracle_gradient(logits, column, on_target, of_lse - on_target, squash), 32 * largest)
    assert torch.equal(logits, before)

    weight = torch.rand(ROWS, device=DEVICE)
    weight[1] = float("nan")  # of a row without a target: nobody reads it
    both, again, in_place = unwritten(ROWS, vocab, dtype=dtype), unwritten(ROWS), logits.clone()
    triton_kernels.indexed_fwd_bwd(logits, column, -1, weight, squash, again, both)
    assert torch.equal(again, log_prob)
    weight[1] = 0
    close(both, oracle_gradient(logits, column, -weight, weight, squash), 32 * largest)
    assert torch.equal(both[1], torch.zeros_like(both[1]))
    triton_kernels.indexed_fwd_bwd(in_place, column, -1, weight, squash, unwritten(ROWS), in_place)
    assert torch.equal(in_place, both)


@pytest.mark.parametrize("squash", SQUASHES, ids=str)
def test_against_the_chunked_kernels_at_the_edges(triton_kernels, squash):
    """-inf columns, a row of only -inf, NaN and +inf rows, logits of 10000, rows without a column."""
    vocab = 300
    logits, column = chunk(vocab, torch.float32)
    logits[0, ::2] = float("-inf")
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    logits[4] += 1e4
    logits[5, 7] = float("nan")
    of_log_prob, of_lse = torch.randn(2, ROWS, device=DEVICE)
    of_log_prob[1] = of_lse[1] = 0
    weight = torch.rand(ROWS, device=DEVICE)
    weight[1] = 0
    results = []
    for kernels in (triton_kernels, chunked):
        log_prob, statistics = forward(kernels, logits, column, squash)
        bwd, both, again = unwritten(ROWS, vocab), unwritten(ROWS, vocab), unwritten(ROWS)
        kernels.indexed_bwd(logits, column, -1, of_log_prob, of_lse, statistics, squash, bwd)
        kernels.indexed_fwd_bwd(logits, column, -1, weight, squash, again, both)
        results.append([log_prob, statistics.sum(0), bwd, both, again])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6, equal_nan=True)
    log_prob, _, bwd, both, _ = results[0]
    assert log_prob[1] == 0 and log_prob[[0, 4]].isfinite().all() and log_prob[5].isnan()
    for out in (bwd, both):
        assert torch.equal(out[1], torch.zeros(vocab, device=DEVICE)) and out[5].isnan().any()
        assert out[[0, 4]].isfinite().all()
        assert squash.name != "identity" or torch.equal(out[0, ::2].abs(), _hot(column, out, 0)[::2].abs())


def _hot(column, out, row):
    """Gradient of a row's masked columns: nothing, but at a masked target."""
    hot = torch.zeros_like(out[row])
    hot[column[row]] = out[row, column[row]]
    return hot


def test_strides(triton_kernels):
    squash = SQUASHES[2]
    logits, column = chunk(130, torch.float32)
    transposed = logits.t().contiguous().t()
    padded = unwritten(ROWS, 200)[:, :130].copy_(logits)
    expected = forward(triton_kernels, logits, column, squash)
    of_log_prob, of_lse = torch.randn(2, ROWS, device=DEVICE)
    out = unwritten(ROWS, 130)
    triton_kernels.indexed_bwd(logits, column, -1, of_log_prob, of_lse, expected[1], squash, out)
    for strided in (transposed, padded):
        assert all(
            torch.equal(a, b) for a, b in zip(forward(triton_kernels, strided, column, squash), expected, strict=True)
        )
        other = unwritten(130, ROWS).t() if strided is transposed else unwritten(ROWS, 200)[:, :130]
        triton_kernels.indexed_bwd(strided, column, -1, of_log_prob, of_lse, expected[1], squash, other)
        assert torch.equal(other, out)


@pytest.mark.parametrize("targets", [torch.int32, torch.int64], ids=str)
def test_gradients_that_are_missing_expanded_or_of_another_dtype(triton_kernels, targets):
    """What the operators hand on from autograd; a row that is ignored takes nothing from its log-probability."""
    vocab, squash, ignore = 300, SQUASHES[2], -100
    logits, column = chunk(vocab, torch.float32)
    target = torch.where(column < 0, ignore, column).to(targets).unsqueeze(1).expand(ROWS, 2)[:, 0]
    of_log_prob, of_lse = torch.randn(2, ROWS, device=DEVICE)
    of_log_prob[1] = float("nan")
    one = torch.tensor(0.7, device=DEVICE)
    results = []
    for kernels in (triton_kernels, chunked):
        statistics = unwritten(2, ROWS)
        kernels.indexed_fwd(logits, target, ignore, squash, unwritten(ROWS), statistics)
        for above in ((of_log_prob, None), (None, of_lse), (one.expand(ROWS), of_lse.bfloat16())):
            results.append(unwritten(ROWS, vocab))
            kernels.indexed_bwd(logits, target, ignore, *above, statistics, squash, results[-1])
    for ours, theirs in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
    assert torch.equal(results[0][1], torch.zeros_like(results[0][1])) and results[1][1].abs().max() > 0


@pytest.mark.skipif(not INTERPRETED, reason="trips a device assert, after which the process has no GPU")
def test_a_column_beyond_the_row_is_not_read(triton_kernels):
    logits, column = chunk(64, torch.float32)
    column[0] = 10**12
    log_prob, statistics = forward(triton_kernels, logits, column, SQUASHES[0])
    assert log_prob[0].isnan() and log_prob[1:].isfinite().all() and statistics.isfinite().all()
