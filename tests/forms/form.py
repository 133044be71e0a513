"""A form: a head as its authors write it, and what must become of it.

A form's function (or its module's forward) takes what it names of `tensors`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture import Capture
from tests.oracle import assert_close_to_oracle, run, run64

B, T, H, V = 2, 16, 32, 264
IGNORE = -100


def tensors(dtype: torch.dtype = torch.float32, rows: tuple[int, int] = (B, T)) -> dict[str, Any]:
    """All that a form may name, from the current seed.

    x [B, T, H] hidden states, x1 [B*T, H]; w [V, H], wt [H, V], wk three of them; b [V]; c labels, y labels some of
    which are ignored, y1 and c1 flattened; m [B, T] their mask, zeros and ones; a [B, T] advantages; n, nf and ni
    counts: an integer tensor, a float tensor, a number; a temperature; and without gradients a teacher's hidden states
    xT, its head wT, its logits t, and those as probabilities tp and log-probabilities tlp.
    """
    x, w = torch.randn(*rows, H), torch.randn(V, H) / 4
    c = torch.randint(0, V, rows)
    y = c.clone()
    y[0, : rows[1] // 4] = y[1, -1] = IGNORE
    learned = {"x": x, "w": w, "b": torch.randn(V), "a": torch.randn(rows)}
    learned |= {"x1": x.flatten(0, 1), "wt": w.t().contiguous(), "wk": torch.randn(3, V, H) / 4}
    plain = {"t": torch.randn(*rows, V), "wT": torch.randn(V, H) / 4, "xT": torch.randn(*rows, H)}
    plain |= {"tp": plain["t"].softmax(-1), "tlp": plain["t"].log_softmax(-1)}
    made = {name: value.to(dtype).clone().requires_grad_() for name, value in learned.items()}
    made |= {name: value.to(dtype) for name, value in plain.items()}
    numbers = {"n": (y != IGNORE).sum(), "nf": torch.tensor(23.0), "ni": 23, "temperature": 0.75}
    labels = {"m": (y != IGNORE).to(dtype), "y": y, "y1": y.flatten(), "c": c, "c1": c.flatten()}
    return made | numbers | labels


@dataclass(frozen=True)
class Form:
    """outcome: "kernels", "rows", "fused" (either), "declined: <code>" or "no head".

    missing: why that is not reached yet.
    """

    id: str
    what: str
    outcome: str
    made: Callable[..., Any]
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    unbacked: bool = False
    graphs: int | None = 1
    missing: str = ""

    def build(self, rows: tuple[int, int] = (B, T)) -> tuple[Callable[..., Any], list[Any]]:
        available = tensors(self.dtype, rows)
        fn = self.made
        if inspect.isclass(fn):
            fn = fn().to(self.dtype)
            names = list(inspect.signature(fn.forward).parameters)
        else:
            names = list(inspect.signature(fn).parameters)
        return fn, [available[name] for name in names]

    def compile(self, capture: Capture, fn: Callable[..., Any]) -> Callable[..., Any]:
        how = {"fullgraph": self.graphs == 1, "dynamic": None} | self.how
        return capture.compile(fn, **how)

    def __str__(self) -> str:
        return f"{self.id}: {self.what}"


FORMS: list[Form] = []


def form(id: str, what: str, outcome: str, **more: Any) -> Callable[[Any], Any]:
    """Add the function or module to the table."""

    def register(made: Any) -> Any:
        FORMS.append(Form(id, what, outcome, made, **more))
        return made

    return register


def with_parameters(runner: Callable[..., Any], fn: Any, compiled: Any, args: list[Any], *more: Any) -> list[Any]:
    """Values and gradients of a run, those of the module's parameters after those of the arguments."""
    parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    for p in parameters:
        p.grad = None
    results = runner(compiled, args, *more)
    return [*results, *(None if p.grad is None else p.grad.clone() for p in parameters)]


def assert_as_eager(compiled: Callable[..., Any], fn: Callable[..., Any], args: list[Any], **how: Any) -> None:
    """Values and gradients, of parameters too, as eager has them, measured against float64."""
    eager = with_parameters(run, fn, fn, args)
    exact = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    oracle = with_parameters(_run64, exact, exact, args, eager)
    assert_close_to_oracle(with_parameters(run, fn, compiled, args), eager, oracle, **how)


def _run64(fn: Callable[..., Any], args: list[Any], like: list[Tensor | None]) -> list[Tensor | None]:
    """The oracle, also of what starts from `torch.zeros(())`."""
    torch.set_default_dtype(torch.float64)
    try:
        return run64(fn, args, like)
    finally:
        torch.set_default_dtype(torch.float32)


def outcome_of(capture: Capture) -> str:
    """What became of all heads, in the words of the table."""
    fused = {h.details["executor"] for h in capture.report.fused}
    if capture.codes:
        return f"declined: {', '.join(sorted(set(capture.codes)))}" + (f" and {fused}" if fused else "")
    return "rows" if "rows" in fused else "kernels" if fused else "no head"


def assert_outcome(capture: Capture, form: Form) -> None:
    """What became of the form's heads is what the table says."""
    found = outcome_of(capture)
    if form.outcome == "fused":
        assert found in ("kernels", "rows"), str(capture.report)
    else:
        assert found == form.outcome, str(capture.report)


def largest(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the largest allocation of a step, and of the most that was alive at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return max(e.nbytes() for e in events), peak


def stepped(fn: Callable[..., Any], args: list[Any]) -> Callable[[], list[Tensor | None]]:
    return lambda: run(fn, args)
