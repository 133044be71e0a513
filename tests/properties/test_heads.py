"""However a head is spelled, it is fused and as right as eager; where fusing would be wrong, it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.capture import Capture
from tests.oracle import Float64, assert_as_eager, fresh, outputs_of, run, upstream_like
from tests.properties.heads import Program, arguments, programs, tensors_of
from tests.properties.near_misses import MISSES, near_miss

# the fixture that gives Dynamo a fresh start runs once for all examples; each example starts afresh by itself
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def options(draw: Any, drawn: dict[str, Any]) -> dict[str, Any]:
    rows = drawn["b"] * drawn["t"]
    chunk = draw(st.integers(1, rows + 3))
    return {"chunk_rows": chunk, "accumulate": draw(st.sampled_from(["float32", "native"]))}


def seeded(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same random numbers in every call."""

    def call(*args: Any) -> Any:
        torch.manual_seed(1)
        return fn(*args)

    return call


def cancels(program: Callable[..., Any], args: list[Any]) -> bool:
    """Gradients of two losses that nearly cancel: what is left is the rounding of terms, which eager never makes."""
    doubled = [fresh(a, torch.float64) for a in args]
    leaves = [a for a in doubled if a.requires_grad]
    with Float64():
        outputs = [(i, o) for i, o in enumerate(outputs_of(program(*doubled))) if o.requires_grad]
    terms = [torch.autograd.grad(o, leaves, upstream_like(o, i), True, allow_unused=True) for i, o in outputs]
    for of_leaf in zip(*terms, strict=True):
        parts = [g for g in of_leaf if g is not None]
        if parts and sum(parts).norm() < 0.3 * sum(g.norm() for g in parts):
            return True
    return False


@QUIET
@given(programs(), arguments(), st.data())
def test_a_head_is_fused_and_right(program: Program, drawn: dict[str, Any], data: Any) -> None:
    torch._dynamo.reset()
    capture = Capture(**options(data.draw, drawn))
    args = tensors_of(drawn, program.ignore)
    assume(not cancels(program, args))
    assert_as_eager(capture.compile(lambda *a: program(*a), fullgraph=True), program, args)
    assert capture.codes == [], str(capture.report)
    executors = {h.details["executor"] for h in capture.report.fused}
    if program.exact:
        assert executors == {"kernels"}, str(capture.report)
    assert executors, "no head was found"


@QUIET
@given(programs(exact=True), arguments(learned=False), st.sampled_from(sorted(MISSES)), st.data())
def test_a_near_miss_is_right(program: Program, drawn: dict[str, Any], name: str, data: Any) -> None:
    torch._dynamo.reset()
    miss = MISSES[name]
    wanted = (miss.learned,) * 3
    drawn = drawn | {"b": max(2, drawn["b"]), "t": max(4, drawn["t"]), "wanted": wanted}  # one row mixes with none
    args = tensors_of(drawn, program.ignore)
    capture = Capture(**options(data.draw, drawn))
    fn = near_miss(program, miss)
    eager, compiled = seeded(fn), seeded(capture.compile(fn))
    if miss.fusable:
        assume(not cancels(eager, args))
        assert_as_eager(compiled, eager, args)
        return
    for a, b in zip(run(compiled, args), run(eager, args), strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert not capture.report.fused, str(capture.report)
    assert capture.codes or miss.silent, "a head that is left alone says why"
