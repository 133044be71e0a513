"""What torch.library, autograd and torch.compile ask of the operators for two distributions."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuse_losses.ops.given as inner_given
import fuse_losses.ops.paired as inner
from tests.losses.pages import CASES
from tests.ops.pair import OPS, graded, make_pair

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
GIVEN = [(None, None), ("logits", "log_probs"), (None, "probs"), ("log_probs", None)]


@pytest.mark.parametrize("name, k", CASES)
@pytest.mark.parametrize("given", GIVEN[::3], ids=str)
def test_gradcheck(name, k, given):
    if name == "tvd":
        torch.manual_seed(1)  # no two probabilities so close that the differences of gradcheck cross a tie
    squashes = tuple("identity" if form in ("log_probs", "probs") else "tanh" for form in given)
    pair = make_pair(
        name, k, rows=3, hidden=(2, 3), vocab=4, dtypes=(F64, F64), given=given, squashes=squashes, row_weight=True
    )
    assert torch.autograd.gradcheck(lambda *leaves: pair.rows(leaves, 3), pair.leaves())
    assert torch.autograd.gradcheck(lambda *leaves: pair.sum(leaves, 3), pair.leaves())


@pytest.mark.parametrize("trained", [(), (0, 1, 2), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, B16)], ids=str)
def test_opcheck_outer(dtypes, trained):
    for given in ((None, None), ("probs", "logits")):
        pair = make_pair(rows=5, hidden=(4, 3), vocab=7, dtypes=dtypes, given=given, row_weight=True)
        tensors = [t if t is None else t.requires_grad_(i in trained) for i, t in enumerate(pair.tensors)]
        torch.library.opcheck(OPS.divergence.default, (*tensors, *pair.how(), 2, "float32"))
        torch.library.opcheck(OPS.divergence_sum.default, (*tensors, pair.row_weight, *pair.how(), 2, "float32"))
        torch.library.opcheck(OPS.divergence_sum.default, (*tensors, None, *pair.how(), 2, "float32"))
        if given == (None, None):
            detached = [t if t is None else t.detach() for t in tensors]
            torch.library.opcheck(OPS.paired_fwd_keep.default, (*detached, None, *pair.how(), 2, True, bool(trained)))


@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F64)], ids=str)
@pytest.mark.parametrize("needs", [[True] * 6, [True, False, False] * 2, [False, True, True, False, False, False]])
def test_opcheck_inner(dtypes, needs):
    for given in ((None, None), ("log_probs", "logits")):
        pair = make_pair(rows=5, hidden=(4, 3), vocab=7, dtypes=dtypes, given=given, row_weight=True)
        if given[0] is None:
            pair.tensors[1] = pair.tensors[1].t().contiguous().t()  # gradients keep its strides
        arguments = (*pair.tensors, *pair.how(), 2)
        torch.library.opcheck(inner.paired_fwd.operator, (*arguments, needs))
        d, statistics = inner.paired_fwd(*arguments, needs)
        torch.library.opcheck(
            inner.paired_bwd.operator, (torch.randn_like(d), statistics, *arguments, "float32", needs)
        )
        weighted = (*pair.tensors, pair.row_weight, *pair.how(), 2, "float32", needs)
        torch.library.opcheck(inner.paired_fwd_grad.operator, weighted)


@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F64)], ids=str)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
def test_opcheck_given(dtypes, needs):
    pair = make_pair(rows=5, vocab=7, dtypes=dtypes, given=("log_probs", "logits"))
    arguments = (pair.tensors[0], pair.tensors[3].t().contiguous().t(), *pair.how(), 2, *needs)
    torch.library.opcheck(inner_given.given_pair_fwd.operator, arguments)
    d, statistics = inner_given.given_pair_fwd(*arguments)
    for upstream in (torch.randn_like(d), torch.randn((), dtype=d.dtype).expand(5)):
        torch.library.opcheck(inner_given.given_pair_bwd.operator, (upstream, statistics, *arguments))


class Record(TorchDispatchMode):
    """Names of the inner operators that run, and the shapes they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[torch.Size]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("fuse_losses::divergence", "fuse_losses::divergence_sum"):  # whole in inference mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fuse_losses":
            self.calls[name.split("::")[1]] = [t.shape for t in out]
        return out


@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1, 2), (0, 4), (3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_only_needed_gradients_are_computed(trained):
    pair = make_pair()
    every = pair.leaves()
    shapes = [every[i].shape for i in trained]
    for run, name in ((pair.sum, "paired_fwd_grad"), (pair.rows, "paired_bwd")):
        expected = torch.autograd.grad(run(every, 4).sum(), every)
        leaves = [t.detach().requires_grad_(i in trained) for i, t in enumerate(every)]
        with Record() as record:
            grads = torch.autograd.grad(run(leaves, 4).sum(), [leaves[i] for i in trained])
        made = record.calls[name][1:] if name == "paired_fwd_grad" else record.calls[name]  # the first is d
        assert made == shapes
        for i, grad in zip(trained, grads, strict=True):
            assert torch.equal(grad, expected[i])


def test_no_gradient_work_without_grad():
    pair = make_pair(row_weight=True)
    leaves = pair.leaves()
    expected = pair.sum(leaves, 4)
    for mode, arguments in (
        (torch.no_grad, leaves),
        (torch.inference_mode, leaves),
        (torch.enable_grad, [t.detach() for t in leaves]),
    ):
        with mode(), Record() as record:
            value = pair.sum(arguments, 4)
            pair.rows(arguments, 4)
        assert set(record.calls) == {"paired_fwd"} and not value.requires_grad
        torch.testing.assert_close(value, expected)


def test_ambient_autocast_changes_nothing():
    pair = make_pair(row_weight=True)
    expected = graded(lambda x: pair.sum(x, 4) + pair.rows(x, 4).sum(), pair.leaves(), torch.tensor(1.3))
    with torch.autocast("cpu", torch.bfloat16):
        ours = graded(lambda x: pair.sum(x, 4) + pair.rows(x, 4).sum(), pair.leaves(), torch.tensor(1.3))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_inputs_are_not_written_to():
    for given in GIVEN:
        pair = make_pair(given=given, row_weight=True)
        leaves = pair.leaves()
        before = [t.detach().clone() for t in leaves]
        for value in (pair.sum(leaves, 4), pair.rows(leaves, 4).sum()):
            torch.autograd.grad(value, leaves)
        assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


def _largest_allocation(step) -> int:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("dtype", [F32, B16], ids=str)
@pytest.mark.parametrize("which", ["sum", "rows", "eager_rows"])
def test_no_allocation_is_as_large_as_the_logits(which, dtype):
    """Nor is there a float32 copy of a bfloat16 weight, which is as large."""
    pair = make_pair(rows=256, hidden=(16, 24), vocab=4096, squashes=("tanh", "identity"), dtypes=(dtype, dtype))
    logits = 256 * 4096 * dtype.itemsize

    def step() -> None:
        leaves = pair.leaves()
        run = getattr(pair, which)
        value = run(leaves) if which == "eager_rows" else run(leaves, 32)
        torch.autograd.grad(value.sum(), leaves)

    largest = _largest_allocation(step)
    if which == "eager_rows":
        assert largest >= logits  # the measure sees what it should
    else:
        assert largest <= 32 * 4096 * 4 + 4096


def test_a_wide_copy_of_a_narrow_weight_is_made_in_parts():
    pair = make_pair(rows=64, hidden=(512, 512), vocab=8192, dtypes=(B16, B16), bias=False)
    frozen = [t if t is None else t.detach() for t in pair.tensors]
    largest = _largest_allocation(lambda: OPS.divergence(*frozen, *pair.how(), 16, "float32"))
    assert largest <= 4 * 2**20 < 8192 * 512 * 4


def loss(pair, leaves):
    p, weight, bias, *teacher = leaves
    total = OPS.divergence_sum(2 * p, weight, bias, *teacher, pair.row_weight, *pair.how(), 4, "float32")
    d = OPS.divergence(p, weight, bias, *teacher, *pair.how(), 4, "float32")
    given = OPS.divergence(
        p @ weight.t(), None, None, (teacher[0] @ teacher[1].t()).float().softmax(1), None, None,
        "kl", 0.1, False, "logits", "tanh", 0.5, 2.0, "probs", "identity", 1.0, 1.0, 4, "float32",
    )  # fmt: skip
    total += 1.0  # outputs are fresh tensors
    return 0.3 * total / p.shape[0] + (d * given).sum() - given.mean()


@pytest.mark.parametrize("dynamic, dtype", [(False, F32), (True, B16)], ids=str)
def test_compiled_matches_eager(dynamic, dtype):
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for rows in (13, 22) if dynamic else (13,):
        pair = make_pair("jsd", 0.3, rows=rows, dtypes=(dtype, dtype), row_weight=True)
        upstream = torch.tensor(1.7)
        ours, eager = (
            graded(lambda x, run=run, pair=pair: run(pair, x), pair.leaves(), upstream) for run in (compiled, loss)
        )
        close = {"rtol": 2e-2, "atol": 1e-3} if dtype == B16 else {}  # Inductor rounds sums of gradients less often
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, **close)
    if dynamic:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_frozen_teacher():
    pair = make_pair(row_weight=True)
    compiled = torch.compile(loss, fullgraph=True)
    leaves = pair.leaves()
    arguments = [*leaves[:3], *[t.detach() for t in leaves[3:]]]
    value, expected = compiled(pair, arguments), loss(pair, arguments)
    torch.testing.assert_close(value, expected)
    for a, b in zip(*(torch.autograd.grad(v, leaves[:3]) for v in (value, expected)), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(compiled(pair, leaves), expected)
