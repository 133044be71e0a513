"""`linear_log_prob`: per-row values of a projection, whose backward recomputes the logits."""

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def results(problem, leaves, values, upstreams):
    """Values, then gradients of their weighted sum."""
    total = sum((u.to(v.dtype) * v).sum() for u, v in zip(upstreams, values, strict=True) if u is not None)
    return [*values, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("squash", ["identity", "scale", "tanh"])
@pytest.mark.parametrize("outputs", ["log_prob", "lse", "both"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_values_and_gradients(make_problem, assert_as_good_as_eager, dtype, squash, outputs, chunk_rows):
    problem = make_problem(dtype=dtype, squash=squash, bias=True)
    upstreams = [
        torch.randn(13, dtype=torch.float64) if outputs in (name, "both") else None for name in ("log_prob", "lse")
    ]
    ours, eager, oracle = problem.leaves(), problem.leaves(), problem.leaves(torch.float64)
    assert_as_good_as_eager(
        results(problem, ours, problem.log_prob(ours, chunk_rows), upstreams),
        results(problem, eager, problem.eager(eager)[1:], upstreams),
        results(problem, oracle, problem.eager(oracle)[1:], upstreams),
    )


@pytest.mark.parametrize("upstream", [float("inf"), float("nan")])
def test_ignored_rows_take_no_gradient_through_log_prob(make_problem, upstream):
    problem = make_problem(rows=6, ignored=0)
    problem.target[2] = problem.ignore_index
    clean = problem.leaves()
    expected = torch.autograd.grad(problem.log_prob(clean, 2)[0].sum(), clean[0])[0]
    problem.x[2] = float("nan")
    leaves = problem.leaves()
    log_prob, lse = problem.log_prob(leaves, 2)
    assert log_prob[2] == 0.0 and lse[2].isnan() and lse[[0, 1, 3, 4, 5]].isfinite().all()
    row_upstream = torch.ones(6)
    row_upstream[2] = upstream
    grad = torch.autograd.grad(log_prob, leaves[0], row_upstream)[0]
    assert torch.equal(grad, expected)
    assert torch.equal(grad[2], torch.zeros_like(grad[2]))


def test_ignored_rows_still_have_an_lse(make_problem):
    problem = make_problem(rows=5, ignored=5)
    leaves = problem.leaves()
    log_prob, lse = problem.log_prob(leaves, 2)
    torch.testing.assert_close(lse, problem.eager(leaves)[2])
    expected = torch.autograd.grad(problem.eager(leaves)[2].sum(), leaves)
    for a, b in zip(torch.autograd.grad(lse.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(log_prob, torch.zeros(5))


def test_rows_of_minus_infinity(make_problem):
    """A row with no class left is NaN, as in eager; a row whose target is masked has log-probability -inf."""
    logits = torch.randn(4, 9)
    logits[1] = float("-inf")
    logits[2, 3] = float("-inf")
    problem = make_problem(rows=4, hidden=9, vocab=9, ignored=0)
    problem.x, problem.weight = logits, torch.eye(9)
    problem.target = torch.tensor([0, 1, 3, 4])
    # the product with an identity would make NaN of -inf * 0: give the logits
    log_prob, lse = torch.ops.fuse_losses.linear_log_prob(
        torch.zeros(4, 9), problem.weight, None, problem.target, logits, *problem.how, 2, "float32"
    )
    expected = logits.log_softmax(1).gather(1, problem.target[:, None]).squeeze(1)
    torch.testing.assert_close(log_prob, expected, equal_nan=True)
    torch.testing.assert_close(lse, logits.logsumexp(1))


def test_no_rows(make_problem):
    problem = make_problem(rows=0, ignored=0, bias=True)
    leaves = problem.leaves()
    log_prob, lse = problem.log_prob(leaves, 4)
    assert log_prob.shape == lse.shape == (0,)
    for leaf, grad in zip(leaves, torch.autograd.grad((log_prob + lse).sum(), leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_expanded_upstream_and_two_backwards(make_problem):
    leaves = (problem := make_problem()).leaves()
    log_prob, _ = problem.log_prob(leaves, 4)
    first = torch.autograd.grad(log_prob, leaves, torch.ones(()).expand(13), retain_graph=True)
    second = torch.autograd.grad(log_prob, leaves, torch.full((13,), 2.0))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)


def test_double_backward_raises(make_problem):
    leaves = (problem := make_problem()).leaves()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(problem.log_prob(leaves, 4)[0].sum(), leaves, create_graph=True)


def test_results_may_be_changed_in_place(make_problem):
    leaves = (problem := make_problem()).leaves()
    expected = torch.autograd.grad(sum(problem.log_prob(leaves, 4)).sum(), leaves)
    log_prob, lse = problem.log_prob(leaves, 4)
    log_prob += 1
    lse *= 1
    for a, b in zip(torch.autograd.grad((log_prob + lse).sum(), leaves), expected, strict=True):
        assert torch.equal(a, b)
