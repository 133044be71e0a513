"""The operators under torch.compile with Inductor give what they give in eager."""

import pytest
import torch

OPS = torch.ops.fuse_losses


def loss(problem, x, weight, bias, target):
    total = OPS.linear_nll_sum(2 * x, weight, bias, target, None, None, *problem.how, 4, "float32")
    log_prob, lse = OPS.linear_log_prob(x, weight, bias, target, None, *problem.how, 4, "float32")
    given, _ = OPS.log_prob(x @ weight.t(), target, *problem.how, 4)
    total += 1.0  # outputs are fresh tensors
    return 0.3 * total / (target != problem.ignore_index).sum() + (log_prob * lse).sum() - given.mean()


@pytest.mark.parametrize("dynamic, dtype", [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_compiled_matches_eager(make_problem, dynamic, dtype):
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for rows in (13, 22) if dynamic else (13,):
        problem = make_problem(rows=rows, dtype=dtype, squash="tanh", bias=True)
        results = []
        for run in (loss, compiled):
            leaves = problem.leaves()
            value = run(problem, *leaves, problem.target)
            results.append([value, *torch.autograd.grad(value, leaves, torch.tensor(1.7))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    if dynamic:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_frozen_head_and_no_grad(make_problem):
    problem = make_problem(bias=True)
    compiled = torch.compile(loss, fullgraph=True)
    x, weight, bias = problem.leaves()
    frozen = (weight.detach(), bias.detach())
    expected = loss(problem, x, *frozen, problem.target)
    value = compiled(problem, x, *frozen, problem.target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(expected, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(problem, x, weight, bias, problem.target), expected)


def test_compiled_no_valid_row(make_problem):
    problem = make_problem(rows=4, ignored=4)

    @torch.compile(fullgraph=True)
    def mean(x, weight, target):
        total = OPS.linear_nll_sum(x, weight, None, target, None, None, *problem.how, 4, "float32")
        return total / (target != problem.ignore_index).sum()

    leaves = problem.leaves()
    value = mean(*leaves, problem.target)
    assert value.isnan()
    for leaf, grad in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_compiled_target_out_of_range_raises(make_problem):
    problem = make_problem()
    problem.target[0] = 5000

    @torch.compile(fullgraph=True)
    def total(x, weight, target):
        return OPS.linear_nll_sum(x, weight, None, target, None, None, *problem.how, 4, "float32")

    with pytest.raises(IndexError, match="Target 5000"):
        total(*problem.leaves(), problem.target)
