"""The generic operator on functions of its own: chunks, gradients, keys, memory, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fuse_losses.ops import composite
from fuse_losses.ops.chunked_rows import register_region

OPS = torch.ops.fuse_losses
N, H, V = 10, 6, 37


def region(fn, *args: Tensor) -> str:
    return register_region(make_fx(fn, tracing_mode="symbolic")(*args))


def loss(x, t, w, b, q):
    """One value per row, one of several columns, and an index, from two row inputs and three whole ones."""
    z = torch.nn.functional.linear(x, w) * q + b
    log_probs = z.log_softmax(-1)
    return -(t * log_probs).sum(-1), z.topk(3).values, z.argmax(-1)


def tensors(dtype: torch.dtype = torch.float32, rows: int = N) -> tuple[list[Tensor], list[Tensor]]:
    x, t = torch.randn(rows, H), torch.rand(rows, V).softmax(-1)
    w, b, q = torch.randn(V, H), torch.randn(V), torch.tensor(0.7)
    return [a.to(dtype).requires_grad_() for a in (x, t)], [a.to(dtype).requires_grad_() for a in (w, b, q)]


@pytest.fixture
def key() -> str:
    rows, whole = tensors()
    return region(loss, *(a.detach() for a in (*rows, *whole)))


def gradients(outputs, leaves, **how):
    return torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), leaves, **how)


@pytest.mark.parametrize("chunk_rows", [1, 3, 10, 1000])
@pytest.mark.parametrize("accumulate", ["float32", "native"])
def test_values_and_gradients(key: str, chunk_rows: int, accumulate: str) -> None:
    rows, whole = tensors(torch.float64)
    made = OPS.chunked_rows(key, rows, whole, chunk_rows, accumulate, False)
    expected = loss(*rows, *whole)
    torch.testing.assert_close(tuple(made), expected)
    assert [m.requires_grad for m in made] == [True, True, False]
    torch.testing.assert_close(gradients(made, [*rows, *whole]), gradients(expected, [*rows, *whole]))


def test_a_sum_over_chunks_is_wide(key: str) -> None:
    """In bfloat16, a chunk per row: the weight's gradient is rounded once."""
    rows, whole = tensors(torch.bfloat16, rows=400)
    grads = {}
    for accumulate in ("float32", "native"):
        made = OPS.chunked_rows(key, rows, whole, 1, accumulate, False)
        grads[accumulate] = torch.autograd.grad(made[0].sum(), whole[0])[0].double()
    wide = [[a.detach().double().requires_grad_() for a in some] for some in (rows, whole)]
    exact = torch.autograd.grad(loss(*wide[0], *wide[1])[0].sum(), wide[1][0])[0]
    errors = {name: (g - exact).norm().item() for name, g in grads.items()}
    assert errors["float32"] < errors["native"]


def test_no_rows(key: str) -> None:
    rows, whole = tensors(rows=0)
    made = OPS.chunked_rows(key, rows, whole, 4, "float32", False)
    assert [tuple(m.shape) for m in made] == [(0,), (0, 3), (0,)]
    for grad, leaf in zip(gradients(made, [*rows, *whole]), [*rows, *whole], strict=True):
        assert grad.shape == leaf.shape and not grad.count_nonzero()


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(key: str, grad: bool) -> None:
    rows, whole = tensors()
    rows, whole = ([a.detach().requires_grad_(grad) for a in some] for some in (rows, whole))
    torch.library.opcheck(OPS.chunked_rows.default, (key, rows, whole, 3, "float32", False))


def test_opcheck_forward(key: str) -> None:
    rows, whole = ([a.detach() for a in some] for some in tensors())
    torch.library.opcheck(OPS.rows_fwd.default, (key, rows, whole, 3, False))


@pytest.mark.parametrize("needs", [[True] * 5, [True, False, False, False, False], [False, False, True, False, True]])
@pytest.mark.parametrize("used", [[True, True], [True, False]])
def test_opcheck_backward(key: str, needs: list[bool], used: list[bool]) -> None:
    rows, whole = ([a.detach() for a in some] for some in tensors())
    grads = [g if use else None for g, use in zip([torch.randn(N), torch.randn(N, 3)], used, strict=True)]
    torch.library.opcheck(OPS.rows_bwd.default, (key, [*grads, None], rows, whole, needs, 3, "float32", False))


def test_under_a_dispatch_mode(key: str) -> None:
    """A user who counts operations sees the same numbers."""
    rows, whole = tensors()
    with FlopCounterMode(display=False):
        made = OPS.chunked_rows(key, rows, whole, 3, "float32", False)
        ours = gradients(made, [*rows, *whole])
    torch.testing.assert_close(ours, gradients(loss(*rows, *whole), [*rows, *whole]))


def halved(x: Tensor) -> Tensor:
    """Its operations depend on the number of rows."""
    return x / 2 if x.shape[0] > 2 else x * 0.5 + 0.0


def test_operations_that_depend_on_the_number_of_rows() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.square, (graph.call_function(halved, (x,)),)),))
    key = register_region(fx.GraphModule(torch.nn.Module(), graph))
    x = torch.randn(8, H, requires_grad=True)
    (made,) = OPS.chunked_rows(key, [x], [], 3, "float32", False)
    upstream = torch.randn(8, H)
    (grad,) = torch.autograd.grad(made, x, upstream)
    torch.testing.assert_close(grad, upstream * x.detach() / 2)


def test_a_transform_of_the_caller_takes_one_derivative(key: str) -> None:
    rows, whole = ([a.detach() for a in some] for some in tensors(torch.float64))

    def ours(x, w):
        a, b, _ = composite(OPS.chunked_rows.default)(key, [x, rows[1]], [w, *whole[1:]], 3, "float32", False)
        return a.square().sum() + b.sum()

    def eager(x, w):
        a, b, _ = loss(x, rows[1], w, *whole[1:])
        return a.square().sum() + b.sum()

    x, w = rows[0], whole[0]
    torch.testing.assert_close(torch.func.grad(ours, (0, 1))(x, w), torch.func.grad(eager, (0, 1))(x, w))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.func.grad(lambda w: torch.func.grad(ours)(x, w).sum())(w)


def test_gradcheck(key: str) -> None:
    rows, whole = tensors(torch.float64, rows=4)

    def run(x, t, w, b, q):
        return tuple(OPS.chunked_rows(key, [x, t], [w, b, q], 3, "float32", False)[:2])

    torch.autograd.gradcheck(run, (*rows, *whole))


def test_only_the_gradients_that_are_needed(key: str) -> None:
    rows, whole = tensors()
    whole[0].requires_grad_(False)
    rows[1].requires_grad_(False)
    OPS.chunked_rows(key, rows, whole, 3, "float32", False)[0].sum().backward()
    assert [a.grad is not None for a in (*rows, *whole)] == [True, False, False, True, True]
    with torch.no_grad():
        assert not any(m.requires_grad for m in OPS.chunked_rows(key, rows, whole, 3, "float32", False))


def test_one_output_is_used(key: str) -> None:
    rows, whole = tensors()
    made = OPS.chunked_rows(key, rows, whole, 3, "float32", False)
    ours = torch.autograd.grad(made[1].sum(), [rows[0], *whole])
    torch.testing.assert_close(ours, torch.autograd.grad(loss(*rows, *whole)[1].sum(), [rows[0], *whole]))


def test_backward_twice(key: str) -> None:
    rows, whole = tensors()
    made = OPS.chunked_rows(key, rows, whole, 3, "float32", False)
    first = gradients(made, [*rows, *whole], retain_graph=True)
    second = gradients(made, [*rows, *whole])
    assert all(map(torch.equal, first, second))


def test_double_backward_raises(key: str) -> None:
    rows, whole = tensors()
    made = OPS.chunked_rows(key, rows, whole, 3, "float32", False)
    with pytest.raises(RuntimeError, match="double backward"):
        gradients(made, [*rows, *whole], create_graph=True)


def test_inputs_are_not_written_to(key: str) -> None:
    rows, whole = tensors()
    before = [a.detach().clone() for a in (*rows, *whole)]
    gradients(OPS.chunked_rows(key, rows, whole, 3, "float32", False), [*rows, *whole])
    assert all(map(torch.equal, before, (*rows, *whole)))


def test_outputs_are_fresh() -> None:
    x = torch.randn(N, H)
    key = region(lambda x: (x.view(-1, H), x), x)
    a, b = OPS.chunked_rows(key, [x], [], 100, "float32", False)
    assert len({t.untyped_storage().data_ptr() for t in (x, a, b)}) == 3


def test_autocast_of_the_caller_changes_nothing(key: str) -> None:
    rows, whole = tensors()
    expected = loss(*rows, *whole)
    with torch.autocast("cpu", torch.bfloat16):
        made = OPS.chunked_rows(key, rows, whole, 3, "float32", False)
    torch.testing.assert_close(tuple(made), expected)


def test_strided_inputs(key: str) -> None:
    rows, whole = tensors()
    turned = [a.detach().t().contiguous().t().requires_grad_() for a in rows]
    ours = OPS.chunked_rows(key, turned, whole, 3, "float32", False)
    torch.testing.assert_close(gradients(ours, turned), gradients(loss(*rows, *whole), rows))


# ---------------------------------------------------------------------------------------------------- keys


def test_a_key_is_the_hash_of_the_code() -> None:
    def module(number: float) -> fx.GraphModule:
        return make_fx(lambda x: (x * number,))(torch.ones(3))

    assert register_region(module(0.1)) == register_region(module(0.1))
    assert register_region(module(0.1)) != register_region(module(0.1 + 1e-16 * 2))
    assert register_region(module(float("inf"))) != register_region(module(float("-inf")))


def test_an_unknown_key_says_so() -> None:
    with pytest.raises(RuntimeError, match="no region feedfacefeedface"):
        OPS.chunked_rows("feedfacefeedface", [torch.ones(2, 3)], [], 1, "float32", False)


@pytest.mark.parametrize(("chunk_rows", "accumulate"), [(0, "float32"), (-1, "float32"), (1, "float64")])
def test_impossible_arguments(key: str, chunk_rows: int, accumulate: str) -> None:
    rows, whole = tensors()
    with pytest.raises((ValueError, RuntimeError), match=r"chunk_rows|accumulate"):
        OPS.chunked_rows(key, rows, whole, chunk_rows, accumulate, False)


# ---------------------------------------------------------------------------------------------------- memory


def test_no_allocation_is_as_large_as_the_logits() -> None:
    rows, vocab, chunk = 512, 1000, 16
    x, w = torch.randn(rows, H, requires_grad=True), torch.randn(vocab, H, requires_grad=True)

    def entropy(x, w):
        z = torch.nn.functional.linear(x, w)
        return ((z.softmax(-1) * z.log_softmax(-1)).sum(-1),)

    key = region(entropy, x.detach(), w.detach())

    def step() -> None:
        OPS.chunked_rows(key, [x], [w], chunk, "float32", False)[0].sum().backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    largest = max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    assert chunk * vocab * 4 <= largest < rows * vocab * 4 / 4


# ---------------------------------------------------------------------------------------------------- caches

CACHED = textwrap.dedent(
    """
    import sys
    import torch, torch.nn.functional as F
    torch.manual_seed(0)
    x, w = torch.randn(10, 6, requires_grad=True), torch.randn(37, 6, requires_grad=True)
    y = torch.randint(0, 37, (10,))
    for run in sys.argv[1:]:
        chunk_rows, smoothing = int(run.split(",")[0]), float(run.split(",")[1])
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        def fn(x, w, y):
            return F.cross_entropy(F.linear(x, w), y, label_smoothing=smoothing)
        options = {"fuse_losses.min_vocab": 1, "fuse_losses.chunk_rows": chunk_rows}
        compiled = torch.compile(fn, backend="fuse_losses", options=options)
        ours, eager = compiled(x, w, y), fn(x, w, y)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(eager, (x, w)))
        counters = torch._dynamo.utils.counters
        print(counters["fuse_losses"]["fused"], counters["aot_autograd"]["autograd_cache_hit"])
    """
)


@pytest.mark.slow
def test_a_warm_cache_finds_the_function_that_it_was_compiled_for(tmp_path) -> None:
    """A process that finds the first one's work: the same again, then another chunk, then another loss."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    seen = []
    for runs in (["3,0.1"], ["3,0.1", "4,0.1", "3,0.2"]):
        done = subprocess.run(
            [sys.executable, "-c", CACHED, *runs], capture_output=True, text=True, timeout=200, env=environment
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.splitlines())
    assert seen == [["1 0"], ["1 1", "1 0", "1 0"]]
