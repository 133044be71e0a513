"""Fused losses for eager code, under PyTorch's argument names. They also work inside torch.compile.

The full logits are never allocated. torch.func.grad takes their gradients too.
Gradients of any order above one raise RuntimeError.
"""

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuse_losses.ops import composite
from fuse_losses.plan.chunk import default_chunk_rows

_REDUCTIONS = ("none", "mean", "sum")
_NO_INDEX = -(2**31)  # stands for "no row is ignored": no vocabulary has such a target


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """`F.cross_entropy(F.linear(input, weight, bias), target)`, with logits scaled and then soft-capped if asked.

    input [..., H], weight [V, H], bias [V], all of one float dtype; target [...] int64 or int32. Returns what
    PyTorch returns, in the same dtype: a scalar, or target's shape for reduction="none". The mean over no
    rows is NaN with zero gradients. `softcap=c` makes logits `c * tanh(logit_scale * u / c)`. `chunk_rows`
    rows of logits live at a time. `accumulate="native"` adds the weight gradient in the weight's dtype, which
    is faster and less precise. Raises ValueError for shapes that do not fit, TypeError for mixed dtypes,
    IndexError for a target out of range.
    """
    _check_reduction(reduction)
    squash = _squash(softcap, logit_scale)
    x, weight, bias, rows = _projection(input, weight, bias, target)
    chunk_rows = chunk_rows or _chunk_rows(x, weight.shape[0])
    dtype = torch.float32 if _autocast_dtype(input) is not None else input.dtype
    how = (*squash, ignore_index, chunk_rows, accumulate)
    if reduction == "none":
        log_prob, _ = _operator("linear_log_prob")(x, weight, bias, rows, None, *how)
        return (-log_prob).to(dtype).reshape(target.shape)
    total = _operator("linear_nll_sum")(x, weight, bias, rows, None, None, *how)
    return _reduced(total, rows, ignore_index, reduction).to(dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """Cross entropy of given logits [..., V], classes in the last dim; target [...]. Options as
    `linear_cross_entropy`.

    Saves no copy of the logits for the backward, which writes one gradient in their dtype.
    """
    _check_reduction(reduction)
    squash = _squash(softcap, logit_scale)
    _check_target(input, target, "input", "[..., V]")
    vocab = input.shape[-1]
    rows = target.reshape(-1)
    chunk_rows = chunk_rows or _chunk_rows(input, vocab)
    dtype = torch.float32 if _autocast_dtype(input) is not None else input.dtype
    log_prob, _ = _operator("log_prob")(input.reshape(-1, vocab), rows, *squash, ignore_index, chunk_rows)
    if reduction == "none":
        return (-log_prob).to(dtype).reshape(target.shape)
    return _reduced(-log_prob.sum(), rows, ignore_index, reduction).to(dtype)


def linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = None,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """`log_softmax(logits / temperature)` at the target, in target's shape, in float32 (float64 for float64).

    input [..., H], weight [V, H], bias [V]; logits are soft-capped before the temperature. Positions whose
    target is `ignore_index` give 0 and no gradient.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    name, inner, outer = _squash(softcap, 1.0)
    x, weight, bias, rows = _projection(input, weight, bias, target)
    chunk_rows = chunk_rows or _chunk_rows(x, weight.shape[0])
    ignored = _NO_INDEX if ignore_index is None else ignore_index
    log_prob, _ = _operator("linear_log_prob")(
        x, weight, bias, rows, None, name, inner, outer / temperature, ignored, chunk_rows, accumulate
    )
    return log_prob.reshape(target.shape)


def _operator(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.fuse_losses, name).default
    eager = not torch.compiler.is_compiling()
    return composite(operator) if eager and torch._C._are_functorch_transforms_active() else operator


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        close = difflib.get_close_matches(str(reduction), _REDUCTIONS, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}{hint}")


def _squash(softcap: float | None, logit_scale: float) -> tuple[str, float, float]:
    if softcap is None:
        return "identity", 1.0, float(logit_scale)
    if not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {softcap}")
    return "tanh", float(logit_scale) / softcap, float(softcap)


def _check_target(input: Tensor, target: Tensor, name: str, form: str) -> None:
    if input.shape[:-1] != target.shape:
        raise ValueError(
            f"target must have the shape of {name} {form} without its last dim: "
            f"{name} is {tuple(input.shape)}, target is {tuple(target.shape)}"
        )


def _projection(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Checked (x [N, H], weight [V, H], bias [V], rows [N]), cast as F.linear's arguments are under autocast."""
    _check_target(input, target, "input", "[..., H]")
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        raise ValueError(
            f"weight must be [V, H] with input's last size H: input is {tuple(input.shape)}, "
            f"weight is {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V]: weight is {tuple(weight.shape)}, bias is {tuple(bias.shape)}")
    dtype = _autocast_dtype(input)
    if dtype is not None:
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != input.dtype:
            raise TypeError(f"input and {name} must have one dtype, got {input.dtype} and {other.dtype}")
    return input.reshape(-1, input.shape[-1]), weight, bias, target.reshape(-1)


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    kind = like.device.type
    if like.dtype == torch.float64 or not torch.is_autocast_enabled(kind):  # autocast leaves float64 alone
        return None
    return torch.get_autocast_dtype(kind)


def _chunk_rows(x: Tensor, vocab: int) -> int:
    return default_chunk_rows(int(vocab), x.element_size(), x.device.type)


def _reduced(total: Tensor, rows: Tensor, ignore_index: int, reduction: str) -> Tensor:
    return total / (rows != ignore_index).sum() if reduction == "mean" else total
