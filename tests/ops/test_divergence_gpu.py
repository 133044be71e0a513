"""The operators for two distributions on a GPU: compiled kernels, large vocabularies, 64-bit offsets, memory."""

import math

import pytest
import torch

from tests.losses.pages import CASES
from tests.ops.pair import OPS, graded, make_pair, three

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PROPER = [case for case in CASES if case[0] != "soft_cross_entropy"]


def pair_on_gpu(*args, **kwargs):
    return make_pair(*args, device=DEVICE, **kwargs)


@pytest.fixture
def check(assert_as_good_as_eager):
    def check(pair, chunk_rows=16) -> None:
        scalar = torch.randn((), dtype=F64, device=DEVICE)
        by_row = torch.randn(pair.tensors[0].shape[0], dtype=F64, device=DEVICE)
        assert_as_good_as_eager(*three(pair, lambda x: pair.rows(x, chunk_rows), pair.eager_rows, by_row))
        assert_as_good_as_eager(*three(pair, lambda x: pair.sum(x, chunk_rows), pair.eager_sum, scalar))

    return check


@pytest.mark.parametrize("dtypes", [(F32, F32), (B16, B16), (F16, F16), (B16, F32), (F16, B16), (B16, F64)], ids=str)
@pytest.mark.parametrize("name, k", CASES)
def test_projected(check, name, k, dtypes):
    check(pair_on_gpu(name, k, rows=40, vocab=4999, dtypes=dtypes, squashes=("tanh", "scale"), row_weight=True))


@pytest.mark.parametrize("given", [("logits", "logits"), ("log_probs", "probs"), ("probs", "log_probs")], ids=str)
@pytest.mark.parametrize("name, k", CASES)
def test_given(check, name, k, given):
    for vocab in (127, 4999):
        check(pair_on_gpu(name, k, rows=40, vocab=vocab, given=given, row_weight=True))


@pytest.mark.parametrize("vocab", [3, 127, 2048, 2049, 50257, 128256, 262144])
@pytest.mark.parametrize("name, k", [("kl", 0.0), ("jsd", 0.5)])
def test_vocabularies(check, name, k, vocab):
    check(pair_on_gpu(name, k, rows=40, hidden=(64, 48), vocab=vocab, dtypes=(B16, B16)))


@pytest.mark.parametrize("dtypes", [(B16, F32), (F16, B16)], ids=str)
def test_given_logits_of_narrow_dtypes_and_any_strides(check, dtypes):
    pair = pair_on_gpu(rows=33, vocab=5001, dtypes=dtypes, given=("logits", "log_probs"), row_weight=True)
    pair.tensors[0] = pair.tensors[0].t().contiguous().t()
    padded = torch.full((33, 5056), math.nan, device=DEVICE, dtype=dtypes[1])
    pair.tensors[3] = padded[:, :5001].copy_(pair.tensors[3])
    check(pair)


@pytest.mark.parametrize("squash", ["identity", "scale", "tanh"])
@pytest.mark.parametrize("name, k", PROPER)
def test_equal_distributions_give_exact_zeros(name, k, squash):
    """Whatever the compiler contracts: both sides have the same bits, and so has what is made of them."""
    for trained in ((0, 1, 2), (0, 1, 2, 3, 4, 5)):
        pair = pair_on_gpu(name, k, rows=9, vocab=4999, hidden=(32, 32), dtypes=(B16, B16), squashes=(squash, squash))
        pair.tensors[3:] = pair.tensors[:3]
        for run in (pair.sum, pair.rows):
            leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(pair.leaves())]
            value = run(leaves, 4)
            results = [value, *torch.autograd.grad(value.sum() * 1.7, [leaves[i] for i in trained])]
            assert all(torch.equal(r.abs(), torch.zeros_like(r)) for r in results)


@pytest.mark.parametrize("name, k", CASES)
def test_edges(name, k):
    pair = pair_on_gpu(name, k, rows=6, vocab=4999, given=("logits", "logits"))
    p, q = pair.tensors[0], pair.tensors[3]
    q[0, ::3] = -math.inf
    p[0, ::3] = -math.inf
    p[1] += 1e4
    q[1] -= 1e4
    p[2, 7] = math.nan
    p[3] = -math.inf
    pair.row_weight = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], device=DEVICE)
    d = pair.rows(pair.leaves(), 4)
    assert d[[0, 1, 4, 5]].isfinite().all() and d[2:4].isnan().all()
    value, *grads = graded(lambda x: pair.sum(x, 4), pair.leaves(), torch.tensor(1.3, device=DEVICE))
    assert value.isfinite()
    for grad in grads:
        assert grad.isfinite().all() and torch.equal(grad[2:4], torch.zeros_like(grad[2:4]))
        assert torch.equal(grad[0, ::3].abs(), torch.zeros_like(grad[0, ::3]))


def test_more_than_two_to_the_31_logits():
    rows, vocab = 8200, 262144
    assert rows * vocab > 2**31
    p = torch.randn(rows, vocab, device=DEVICE, dtype=B16)
    q = torch.randn(rows, vocab, device=DEVICE, dtype=B16)
    last = slice(rows - 4, rows)
    leaf = p[last].double().requires_grad_()
    lp, lq = leaf.log_softmax(1), q[last].double().log_softmax(1)
    expected = (lq.exp() * (lq - lp)).sum(1)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    p.requires_grad_()
    how = ("kl", 0.0, False, *("logits", "identity", 1.0, 1.0) * 2, rows, "float32")
    d = OPS.divergence(p, None, None, q, None, None, *how)
    torch.testing.assert_close(d[last].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(d.sum(), p)
    torch.testing.assert_close(grad[last].double(), gradient, rtol=1e-2, atol=1e-7)


def test_peak_memory():
    rows, hidden, vocab, chunk_rows = 8192, 512, 32000, 1024
    pair = pair_on_gpu("kl", 0.0, rows=rows, hidden=(hidden, 256), vocab=vocab, dtypes=(B16, B16), bias=False)
    leaves = pair.leaves()
    arguments = [*leaves[:2], *[t.detach() for t in leaves[2:]]]
    for run, copies in ((pair.sum, 2), (pair.rows, 1)):

        def step(run=run):
            torch.autograd.grad(run(arguments, chunk_rows).sum(), leaves[:2])

        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
        # two chunks of float32 logits, the weight's sum in float32, gradients (saved, scaled), O(N), a workspace
        gradients = 2 * (rows * hidden + vocab * hidden)
        allowed = 2 * 4 * chunk_rows * vocab + 4 * vocab * hidden + copies * gradients + (40 << 20)
        assert peak <= allowed < 2 * 2 * rows * vocab, (peak >> 20, allowed >> 20)


def test_no_host_sync_and_graph_capture():
    pair = pair_on_gpu("jsd", 0.3, rows=64, hidden=(64, 32), vocab=4999, dtypes=(B16, B16), row_weight=True)
    leaves = pair.leaves()

    def step():
        value = pair.sum(leaves, 16) + pair.rows(leaves, 16).square().sum()
        return value, torch.autograd.grad(value, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, grads = step()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    expected, expected_grads = step()
    torch.testing.assert_close(value, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_bitwise_repeatable():
    """Gradients are written over the logits that other threads still read, unless the kernel waits for them."""
    pair = pair_on_gpu("jsd", 0.5, rows=512, hidden=(64, 64), vocab=50257, dtypes=(B16, B16))
    one = torch.ones((), device=DEVICE)
    runs = [graded(lambda x: pair.sum(x, 128), pair.leaves(), one) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_compiled():
    pair = pair_on_gpu("jsd", 0.5, rows=40, hidden=(64, 64), vocab=1009, dtypes=(B16, B16), row_weight=True)
    compiled = torch.compile(lambda x: pair.sum([2 * x[0], *x[1:]], 16), fullgraph=True)
    upstream = torch.tensor(0.7, device=DEVICE)
    ours = graded(compiled, pair.leaves(), upstream)
    expected = graded(lambda x: pair.sum([2 * x[0], *x[1:]], 16), pair.leaves(), upstream)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
