"""The oracle of these tests, the same function in float64: what is compiled may be twice as wrong as eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NARROW = (torch.float16, torch.bfloat16, torch.float32)


class Float64(TorchDispatchMode):
    """Casts and factories that ask for a narrower float give float64, so that `.float()` does not round the oracle."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def fresh(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy that is a leaf: nothing that a run does to it is seen by the next one."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if dtype is not None and copy.is_floating_point():
        copy = copy.to(dtype)
    return copy.requires_grad_(value.requires_grad)


def upstream_like(output: Tensor, index: int) -> Tensor:
    """A gradient for the output: random, so never the 1 that hides a wrong scale, and in the output's own dtype."""
    generator = torch.Generator().manual_seed(1234 + index)
    noise = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return (noise + noise.sign()).to(output.dtype)


def outputs_of(result: Any) -> list[Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


def backward(outputs: Sequence[Tensor], like: Sequence[Tensor], **how: Any) -> None:
    """Backward from all outputs, with upstream gradients of `like` (the outputs of the run that is imitated)."""
    roots = [i for i, out in enumerate(outputs) if out.requires_grad]
    gradients = [upstream_like(like[i], i).to(outputs[i].dtype) for i in roots]
    if roots:
        torch.autograd.backward([outputs[i] for i in roots], gradients, **how)


def run(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor | None]:
    """Outputs, and the gradient of every argument that wants one (None where there is none)."""
    args = [fresh(a) for a in args]
    outputs = outputs_of(fn(*args))
    values = [out.detach().clone() for out in outputs]  # before backward: a view or an alias would show
    backward(outputs, outputs)
    return [*values, *(a.grad for a in args if isinstance(a, Tensor) and a.requires_grad)]


def run64(fn: Callable[..., Any], args: Sequence[Any], like: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`run` in float64, with the upstream gradients that `like`, a run in the real dtypes, had."""
    args = [fresh(a, torch.float64) for a in args]
    with Float64():
        outputs = outputs_of(fn(*args))
        values = [out.detach().clone() for out in outputs]
        backward(outputs, [t for t in like[: len(outputs)] if t is not None])
    return [*values, *(a.grad for a in args if isinstance(a, Tensor) and a.requires_grad)]


def assert_close_to_oracle(
    ours: Sequence[Tensor | None],
    eager: Sequence[Tensor | None],
    oracle: Sequence[Tensor | None],
    *,
    computed_in: torch.dtype | None = None,
    largest: bool = True,
) -> None:
    """Dtype, shape and absence as eager; the error against the oracle at most twice eager's and a few roundings.

    The norm of the error is judged, and its largest element. How one element is rounded is luck, so each is allowed
    one rounding of the dtype; over many elements luck evens out, and the norm is allowed little of it. `computed_in`:
    the dtype of what came before, if it is rounder than the results; `largest=False` judges the norm alone.
    """
    assert len(ours) == len(eager) == len(oracle)
    for i, (a, b, c) in enumerate(zip(ours, eager, oracle, strict=True)):
        assert (a is None) == (b is None), f"result {i} is {'missing' if a is None else 'one too many'}"
        if a is None or b is None or c is None:
            continue
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), f"result {i}"
        if not a.is_floating_point():
            assert torch.equal(a, b), f"result {i}"
            continue
        eps = max(torch.finfo(a.dtype).eps, torch.finfo(computed_in or a.dtype).eps)
        a, b = a.double(), b.double()
        assert torch.equal(a.isnan(), b.isnan()), f"result {i}: NaN where eager has none, or the reverse"
        finite = b.isfinite() & c.isfinite()
        assert torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()), f"result {i}"
        a, b, c = a[finite], b[finite], c[finite]
        if not a.numel():
            continue
        tiny = 64 * 2**-53 if eps < 2**-40 else 4 * 2**-23
        for measure, luck in ((_norm, eps / 2 / a.numel() ** 0.5), (_largest, eps / 2))[: 1 + largest]:
            got, limit = measure(a - c), 2 * measure(b - c) + (tiny + luck) * measure(c)
            assert got <= limit, f"result {i}: {measure.__name__[1:]} of the error {got:.3g}, limit {limit:.3g}"


def assert_as_eager(
    compiled: Callable[..., Any], fn: Callable[..., Any], args: Sequence[Any], *, largest: bool = True
) -> None:
    """Values and gradients of `compiled` against float64, with those of `fn` as the measure; arguments untouched."""
    eager = run(fn, args)
    assert_close_to_oracle(run(compiled, args), eager, run64(fn, args, eager), largest=largest)


def _norm(t: Tensor) -> float:
    return t.norm().item()


def _largest(t: Tensor) -> float:
    return t.abs().max().item()
