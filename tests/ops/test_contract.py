"""What torch.library and autograd ask of the operators: opcheck, gradcheck, and no gradient without need."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuse_losses.ops.given as inner_given
import fuse_losses.ops.indexed as inner

OPS = torch.ops.fuse_losses
SQUASHES = ["identity", "scale", "tanh"]


@pytest.mark.parametrize("squash", SQUASHES)
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(make_problem, squash, bias):
    problem = make_problem(rows=5, hidden=4, vocab=7, dtype=torch.float64, squash=squash, bias=bias, ignored=1)
    problem.row_weight = torch.rand(5, dtype=torch.float64)
    leaves = problem.leaves()
    assert torch.autograd.gradcheck(lambda *leaves: problem.nll_sum(leaves, 2), leaves)
    assert torch.autograd.gradcheck(lambda *leaves: problem.log_prob(leaves, 2), [*leaves[:-1], problem.row_weight])
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda u: OPS.log_prob(u, problem.target, *problem.how, 2), (logits,))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_outer(make_problem, grad, dtype):
    problem = make_problem(rows=5, hidden=4, vocab=7, squash="tanh", bias=True, row_weight=True, ignored=1, dtype=dtype)
    tensors = [t.requires_grad_(grad) for t in problem.leaves()]
    x, weight, bias, row_weight = tensors
    logits = torch.nn.functional.linear(x, weight, bias).detach()
    how = problem.how
    for given in (None, logits):
        torch.library.opcheck(
            OPS.linear_nll_sum.default,
            (x, weight, bias, problem.target, row_weight, given, *how, 2, "float32"),
        )
        torch.library.opcheck(OPS.linear_log_prob.default, (x, weight, bias, problem.target, given, *how, 2, "float32"))
    torch.library.opcheck(OPS.log_prob.default, (logits.requires_grad_(grad), problem.target, *how, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_opcheck_inner(make_problem, dtype, needs):
    problem = make_problem(rows=5, hidden=4, vocab=7, bias=True, row_weight=True, ignored=1, dtype=dtype)
    x, bias, target, how = problem.x, problem.bias, problem.target, problem.how
    weight = problem.weight.t().contiguous().t()  # gradients keep its strides
    logits = torch.nn.functional.linear(x, weight, bias)
    log_prob, statistics = inner.indexed_fwd(x, weight, bias, target, None, *how, 2)
    torch.library.opcheck(inner.indexed_fwd.operator, (x, weight, bias, target, None, *how, 2))
    torch.library.opcheck(
        inner.indexed_fwd_grad.operator,
        (x, weight, bias, target, problem.row_weight, None, *how, 2, "float32", *needs),
    )
    upstream = torch.randn_like(log_prob)
    for a, b in ((upstream, None), (None, upstream), (upstream, upstream)):
        torch.library.opcheck(
            inner.indexed_bwd.operator, (a, b, x, weight, bias, target, statistics, *how, 2, "float32", *needs)
        )
        torch.library.opcheck(inner_given.given_bwd.operator, (a, b, logits, target, statistics, *how, 2))
    torch.library.opcheck(inner_given.given_fwd.operator, (logits, target, *how, 2))


class Record(TorchDispatchMode):
    """Names of the inner operators that run, and the shapes they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[torch.Size]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("fuse_losses::linear_nll_sum", "fuse_losses::linear_log_prob"):  # whole in inference mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fuse_losses":
            self.calls[name.split("::")[1]] = [t.shape for t in out]
        return out


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_only_needed_gradients_are_computed(make_problem, trained):
    problem = make_problem(bias=True)
    every = problem.leaves()
    expected = torch.autograd.grad(problem.nll_sum(every, 4), every)
    leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(every)]
    kept = [leaves[i] for i in trained]
    with Record() as record:
        value = problem.nll_sum(leaves, 4)
    for i, shape in enumerate(record.calls["indexed_fwd_grad"][1:]):
        assert shape == (every[i].shape if i in trained else (0,))
    for i, grad in zip(trained, torch.autograd.grad(value, kept), strict=True):
        assert torch.equal(grad, expected[i])
    with Record() as record:
        torch.autograd.grad(problem.log_prob(leaves, 4)[0].sum(), kept)
    for i, shape in enumerate(record.calls["indexed_bwd"]):
        assert shape == (every[i].shape if i in trained else (0,))


def test_no_gradient_work_without_grad(make_problem):
    problem = make_problem(bias=True, row_weight=True)
    leaves = problem.leaves()
    frozen = [t.detach() for t in leaves]
    weights_only = [*frozen[:3], leaves[3]]
    expected = problem.nll_sum(leaves, 4)
    for mode, arguments in (
        (torch.no_grad, leaves),
        (torch.inference_mode, leaves),
        (torch.enable_grad, frozen),
    ):
        with mode(), Record() as record:
            value = problem.nll_sum(arguments, 4)
            problem.log_prob(arguments, 4)
        assert set(record.calls) == {"indexed_fwd"} and not value.requires_grad
        torch.testing.assert_close(value, expected)
    with Record() as record:
        value = problem.nll_sum(weights_only, 4)
    assert set(record.calls) == {"indexed_fwd"}
    (grad,) = torch.autograd.grad(value, leaves[3], torch.tensor(2.0))
    torch.testing.assert_close(grad, 2 * torch.autograd.grad(expected, leaves[3])[0])


def test_ambient_autocast_changes_nothing(make_problem):
    problem = make_problem(bias=True)
    plain, cast = problem.leaves(), problem.leaves()
    expected = problem.nll_sum(plain, 4)
    with torch.autocast("cpu", torch.bfloat16):
        value = problem.nll_sum(cast, 4)
        log_prob, _ = problem.log_prob(cast, 4)
        grads = torch.autograd.grad(value - log_prob.sum(), cast)
    assert torch.equal(value, expected)
    for a, b in zip(grads, torch.autograd.grad(expected, plain), strict=True):
        torch.testing.assert_close(a, 2 * b)


def test_importing_the_operators_imports_no_triton():
    code = "import sys, fuse_losses.functional; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _largest_allocation(step) -> int:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("which", ["nll_sum", "log_prob", "eager"])
def test_no_allocation_is_as_large_as_the_logits(make_problem, which):
    problem = make_problem(rows=512, hidden=16, vocab=4096, squash="tanh", bias=True)
    logits = 512 * 4096 * 4

    def step() -> None:
        leaves = problem.leaves()
        if which == "nll_sum":
            value = problem.nll_sum(leaves, 32)
        else:
            value = problem.log_prob(leaves, 32)[0].sum() if which == "log_prob" else problem.eager(leaves)[0]
        torch.autograd.grad(value, leaves)

    largest = _largest_allocation(step)
    if which == "eager":
        assert largest >= logits  # the measure sees what it should
    else:
        assert largest <= logits // 8
