"""However a head is spelled, it is fused and as right as eager; where fusing would be wrong, it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capture import Capture
from tests.oracle import assert_as_eager, run
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


@QUIET
@given(programs(), arguments(), st.data())
def test_a_head_is_fused_and_right(program: Program, drawn: dict[str, Any], data: Any) -> None:
    torch._dynamo.reset()
    capture = Capture(**options(data.draw, drawn))
    args = tensors_of(drawn, program.ignore)
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
    drawn = drawn | {"b": max(2, drawn["b"]), "wanted": wanted}
    args = tensors_of(drawn, program.ignore)
    capture = Capture(**options(data.draw, drawn))
    fn = near_miss(program, miss)
    eager, compiled = seeded(fn), seeded(capture.compile(fn))
    if miss.fusable:
        assert_as_eager(compiled, eager, args)
        return
    for a, b in zip(run(compiled, args), run(eager, args), strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert not capture.report.fused, str(capture.report)
    assert capture.codes or miss.silent, "a head that is left alone says why"


def test_the_generators_are_deterministic() -> None:
    """A program is a function of what was drawn: two calls agree, and a copy does."""
    program = programs(exact=True).example()
    drawn = {"b": 2, "t": 4, "h": 3, "v": 13, "seed": 5, "wanted": (True, True, True)}
    args = tensors_of(drawn, program.ignore)
    for a, b in zip(run(program, args), run(replace(program), args), strict=True):
        assert (a is None and b is None) or torch.equal(a.nan_to_num(7), b.nan_to_num(7))
