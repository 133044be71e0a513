"""The operators on a GPU: compiled kernels, large vocabularies, 64-bit offsets, memory, no host syncs."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
OPS = torch.ops.fuse_losses
HOW = ("identity", 1.0, 1.0, -100)


def graded(run, leaves, upstream):
    """Value and gradients of `run(leaves)`."""
    value = run(leaves)
    return [value, *torch.autograd.grad(value, leaves, upstream.to(value))]


@pytest.fixture
def check(assert_as_good_as_eager):
    def check(problem, chunk_rows) -> None:
        upstream = torch.randn((), dtype=torch.float64, device=DEVICE)
        rows = torch.randn(2, problem.x.shape[0], dtype=torch.float64, device=DEVICE)

        def both(values):
            log_prob, lse = values
            return (rows[0].to(log_prob.dtype) * log_prob + rows[1].to(lse.dtype) * lse).sum()

        assert_as_good_as_eager(
            graded(lambda leaves: problem.nll_sum(leaves, chunk_rows), problem.leaves(), upstream),
            graded(lambda leaves: problem.eager(leaves)[0], problem.leaves(), upstream),
            graded(lambda leaves: problem.eager(leaves)[0], problem.leaves(torch.float64), upstream),
        )
        assert_as_good_as_eager(
            graded(lambda leaves: both(problem.log_prob(leaves, chunk_rows)), problem.leaves(), upstream),
            graded(lambda leaves: both(problem.eager(leaves)[1:]), problem.leaves(), upstream),
            graded(lambda leaves: both(problem.eager(leaves)[1:]), problem.leaves(torch.float64), upstream),
        )

    return check


@pytest.mark.parametrize("vocab", [3, 127, 1009, 32000, 50257, 128256, 151936, 262144])
def test_vocabularies(make_problem, check, vocab):
    check(make_problem(rows=40, hidden=64, vocab=vocab, dtype=torch.bfloat16, bias=True, device=DEVICE), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("squash", ["identity", "scale", "tanh"])
def test_dtypes_and_squashes(make_problem, check, dtype, squash):
    for vocab in (127, 12800):
        problem = make_problem(rows=40, hidden=64, vocab=vocab, dtype=dtype, squash=squash, bias=True, device=DEVICE)
        check(problem, 16)


@pytest.mark.parametrize("chunk_rows", [64, 512, 4096])
def test_bfloat16_weight_gradient_does_not_degrade_with_chunks(make_problem, check, chunk_rows):
    check(
        make_problem(rows=4096, hidden=256, vocab=1009, dtype=torch.bfloat16, bias=True, device=DEVICE),
        chunk_rows,
    )


def test_strided_weight(make_problem, check):
    problem = make_problem(rows=33, hidden=48, vocab=501, dtype=torch.bfloat16, device=DEVICE)
    problem.weight = problem.weight.t().contiguous().t()
    assert not problem.weight.is_contiguous()
    check(problem, 8)


def test_ignored_rows_are_exact_zeros_and_nan_stays_in_its_row(make_problem):
    problem = make_problem(rows=9, vocab=50257, dtype=torch.bfloat16, ignored=0, device=DEVICE)
    problem.target[2] = problem.ignore_index
    problem.x[2] = float("nan")
    problem.x[5] = float("nan")
    leaves = problem.leaves()
    for value in (problem.nll_sum(leaves, 4), problem.log_prob(leaves, 4)[0].sum()):
        (grad,) = torch.autograd.grad(value, leaves[:1])
        assert torch.equal(grad[2], torch.zeros_like(grad[2])) and grad[5].isnan().all()
        assert grad[[0, 1, 3, 4, 6, 7, 8]].isfinite().all()


def test_no_valid_row(make_problem):
    leaves = (problem := make_problem(rows=5, ignored=5, device=DEVICE)).leaves()
    grads = torch.autograd.grad(problem.nll_sum(leaves, 2), leaves, torch.tensor(float("nan"), device=DEVICE))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_more_than_two_to_the_31_logits():
    rows, vocab, hidden = 8200, 262144, 64
    assert rows * vocab > 2**31
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16) / 8
    target = torch.randint(0, vocab, (rows,), device=DEVICE)
    last = slice(rows - 8, rows)
    z = (x[last] @ weight.t()).double()
    expected = z.log_softmax(1).gather(1, target[last, None])[:, 0]
    gradient = torch.nn.functional.one_hot(target[last], vocab) - z.softmax(1)

    log_prob, _ = OPS.linear_log_prob(x, weight, None, target, None, *HOW, rows, "float32")
    torch.testing.assert_close(log_prob[last].double(), expected, rtol=1e-5, atol=1e-4)

    logits = (x @ weight.t()).requires_grad_()
    log_prob, _ = OPS.log_prob(logits, target, *HOW, rows)
    torch.testing.assert_close(log_prob[last].double(), expected, rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad(log_prob.sum(), logits)
    torch.testing.assert_close(grad[last].double(), gradient, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_target_out_of_range_asserts_on_the_device(dtype):
    code = f"""
import torch, fuse_losses.ops
x, w = torch.randn(4, 8, device="cuda").to(torch.{dtype}), torch.randn(9, 8, device="cuda").to(torch.{dtype})
t = torch.tensor([0, 1, 9, 2], device="cuda")
out, _ = torch.ops.fuse_losses.linear_log_prob(x, w, None, t, None, "identity", 1.0, 1.0, -100, 2, "float32")
print("value", out.sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "value" not in done.stdout
    assert "assert" in done.stderr.lower(), done.stderr[-2000:]


def test_peak_memory():
    rows, hidden, vocab, chunk_rows = 8192, 512, 32000, 1024
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16) / 20).requires_grad_()
    target = torch.randint(0, vocab, (rows,), device=DEVICE)

    def step(which):
        if which == "nll_sum":
            value = OPS.linear_nll_sum(x, weight, None, target, None, None, *HOW, chunk_rows, "float32")
        else:
            value = OPS.linear_log_prob(x, weight, None, target, None, *HOW, chunk_rows, "float32")[0].sum()
        torch.autograd.grad(value, (x, weight))

    gradients = 2 * (rows * hidden + vocab * hidden)
    for which, copies in (("nll_sum", 2), ("log_prob", 1)):
        step(which)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(which)
        peak = torch.cuda.max_memory_allocated() - before
        # one chunk of logits, the weight's sum in float32, the gradients (saved, scaled), O(N), a workspace
        allowed = 2 * chunk_rows * vocab + 4 * vocab * hidden + copies * gradients + (40 << 20)
        assert peak <= allowed < 2 * rows * vocab, (which, peak >> 20, allowed >> 20)


def test_no_host_sync_and_graph_capture(make_problem):
    problem = make_problem(rows=64, hidden=64, vocab=1009, dtype=torch.bfloat16, bias=True, device=DEVICE)
    leaves = problem.leaves()
    upstream = torch.tensor(1.5, device=DEVICE)

    def step():
        value = problem.nll_sum(leaves, 16)
        log_prob, lse = problem.log_prob(leaves, 16)
        given, _ = OPS.log_prob(leaves[0] @ leaves[1].t(), problem.target, *problem.how, 16)
        total = value - log_prob.mean() + lse.sum() - given.sum()
        return total, torch.autograd.grad(total, leaves, upstream)

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
        problem.target[0] = problem.ignore_index
    graph.replay()
    expected, expected_grads = step()
    torch.testing.assert_close(value, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


def test_bitwise_repeatable(make_problem):
    problem = make_problem(rows=256, hidden=64, vocab=50257, dtype=torch.bfloat16, bias=True, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    runs = [graded(lambda leaves: problem.nll_sum(leaves, 64), problem.leaves(), one) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_compiled(make_problem):
    problem = make_problem(rows=40, hidden=64, vocab=1009, dtype=torch.bfloat16, bias=True, device=DEVICE)
    compiled = torch.compile(lambda leaves: problem.nll_sum([2 * leaves[0], *leaves[1:]], 16), fullgraph=True)
    upstream = torch.tensor(0.7, device=DEVICE)
    ours = graded(compiled, problem.leaves(), upstream)
    expected = graded(lambda leaves: problem.nll_sum([2 * leaves[0], *leaves[1:]], 16), problem.leaves(), upstream)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
