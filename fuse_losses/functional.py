"""Fused losses for eager code, under PyTorch's argument names. They also work inside torch.compile.

The full logits are never allocated. torch.func.grad takes their gradients too.
Gradients of any order above one raise RuntimeError.
"""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuse_losses.ops import composite
from fuse_losses.plan.chunk import default_chunk_rows

_REDUCTIONS = ("none", "mean", "sum")
_FORMS = ("logits", "log_probs", "probs")
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


def linear_kl_div(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    reverse: bool = False,
    skew: float = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """Kullback-Leibler divergence between the classes of a student's head and a teacher's, neither's logits made whole.

    input [..., H], weight [V, H], bias [V]; teacher_input [..., G], teacher_weight [V, G], teacher_bias [V]. Forward is
    `KL(teacher || student)`, as `F.kl_div`; `reverse` is `KL(student || teacher)`. `skew` mixes that much of the first
    argument's distribution into the second's. `mask` [...] holds weights of the positions, bool or float. The mean is
    over positions (by weight), not over classes; "batchmean" divides by the size of the first dim. Logits are
    soft-capped, then divided by `temperature`; no factor makes up for it. Returns float32 (float64 for float64).
    """
    p = _projected(input, weight, bias, softcap, temperature)
    q = _projected(teacher_input, teacher_weight, teacher_bias, teacher_softcap, temperature)
    name = "reverse_kl" if reverse else "kl"
    return _divergence(name, skew, p, q, mask, reduction, chunk_rows, accumulate)


def linear_jsd(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.5,
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """Generalised Jensen-Shannon divergence `beta KL(teacher || m) + (1 - beta) KL(student || m)` with the mixture
    `m = beta teacher + (1 - beta) student`, 0 < beta < 1. Arguments as `linear_kl_div`.
    """
    p = _projected(input, weight, bias, softcap, temperature)
    q = _projected(teacher_input, teacher_weight, teacher_bias, teacher_softcap, temperature)
    return _divergence("jsd", beta, p, q, mask, reduction, chunk_rows, accumulate)


def linear_tvd(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """Total variation distance `sum |student - teacher| / 2`. Arguments as `linear_kl_div`."""
    p = _projected(input, weight, bias, softcap, temperature)
    q = _projected(teacher_input, teacher_weight, teacher_bias, teacher_softcap, temperature)
    return _divergence("tvd", 0.0, p, q, mask, reduction, chunk_rows, accumulate)


def linear_soft_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    target_form: str = "probs",
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    accumulate: str = "float32",
) -> Tensor:
    """`F.cross_entropy` of projected logits with given distributions as targets: target [..., V] as `target_form`,
    "probs", "log_probs" or "logits". Other arguments as `linear_kl_div`; the temperature is the student's.
    """
    p = _projected(input, weight, bias, softcap, temperature)
    q = _given("target", target, target_form, None, 1.0)
    return _divergence("soft_cross_entropy", 0.0, p, q, mask, reduction, chunk_rows, accumulate)


def kl_div(
    input: Tensor,
    target: Tensor,
    *,
    reverse: bool = False,
    skew: float = 0.0,
    input_form: str = "logits",
    target_form: str = "logits",
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """`linear_kl_div` of given student `input` and teacher `target` [..., V], each as "logits", "log_probs" or "probs".

    A temperature divides logits; with another form it raises ValueError. Saves no copy of either for the backward.
    """
    p = _given("input", input, input_form, None, temperature)
    q = _given("target", target, target_form, None, temperature)
    name = "reverse_kl" if reverse else "kl"
    return _divergence(name, skew, p, q, mask, reduction, chunk_rows, "float32")


def jsd(
    input: Tensor,
    target: Tensor,
    *,
    beta: float = 0.5,
    input_form: str = "logits",
    target_form: str = "logits",
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """`linear_jsd` of given student `input` and teacher `target` [..., V]. Options as `kl_div`."""
    p = _given("input", input, input_form, None, temperature)
    q = _given("target", target, target_form, None, temperature)
    return _divergence("jsd", beta, p, q, mask, reduction, chunk_rows, "float32")


def tvd(
    input: Tensor,
    target: Tensor,
    *,
    input_form: str = "logits",
    target_form: str = "logits",
    mask: Tensor | None = None,
    reduction: str = "mean",
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """`linear_tvd` of given student `input` and teacher `target` [..., V]. Options as `kl_div`."""
    p = _given("input", input, input_form, None, temperature)
    q = _given("target", target, target_form, None, temperature)
    return _divergence("tvd", 0.0, p, q, mask, reduction, chunk_rows, "float32")


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    target_form: str = "probs",
    mask: Tensor | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """`F.cross_entropy` of given logits `input` [..., V], classes in the last dim, with distributions as targets."""
    p = _given("input", input, "logits", softcap, 1.0)
    q = _given("target", target, target_form, None, 1.0)
    return _divergence("soft_cross_entropy", 0.0, p, q, mask, reduction, chunk_rows, "float32")


class _Side(NamedTuple):
    """A student or a teacher: what the operators take of it, and the shape of its positions."""

    tensor: Tensor
    weight: Tensor | None
    bias: Tensor | None
    form: tuple[str, str, float, float]
    shape: torch.Size


def _projected(input: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, temperature: float) -> _Side:
    x, w, b = _operands(input, weight, bias)
    return _Side(x, w, b, _form("logits", softcap, temperature), input.shape[:-1])


def _given(name: str, values: Tensor, form: str, softcap: float | None, temperature: float) -> _Side:
    _check_choice(f"{name}_form", form, _FORMS)
    if form != "logits" and temperature != 1.0:
        raise ValueError(f"a temperature divides logits, and {name} is given as {form}")
    return _Side(
        values.reshape(-1, values.shape[-1]), None, None, _form(form, softcap, temperature), values.shape[:-1]
    )  # fmt: skip


def _form(form: str, softcap: float | None, temperature: float) -> tuple[str, str, float, float]:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    name, inner, outer = _squash(softcap, 1.0)
    return form, name, inner, outer / temperature


def _divergence(
    name: str, k: float, p: _Side, q: _Side, mask: Tensor | None, reduction: str, chunk_rows: int | None,
    accumulate: str,
) -> Tensor:  # fmt: skip
    _check_choice("reduction", reduction, (*_REDUCTIONS, "batchmean"))
    for what, shape in (("teacher", q.shape), ("mask", None if mask is None else mask.shape)):
        if shape is not None and shape != p.shape:
            raise ValueError(f"student and {what} must agree in their positions, got {tuple(p.shape)}, {tuple(shape)}")
    vocab = p.tensor.shape[-1] if p.weight is None else p.weight.shape[0]
    wide = sum(8 if side.tensor.dtype == torch.float64 else 4 for side in (p, q) if side.weight is not None)
    chunk_rows = chunk_rows or default_chunk_rows(int(vocab), wide or 4, p.tensor.device.type)
    weight = None if mask is None else mask.reshape(-1).to(torch.promote_types(mask.dtype, torch.float32))
    tensors = (*p[:3], *q[:3])
    how = (name, float(k), False, *p.form, *q.form, chunk_rows, accumulate)
    if reduction == "none":
        d = _operator("divergence")(*tensors, *how)
        return (d if weight is None else torch.where(weight == 0, 0.0, weight * d)).reshape(p.shape)
    total = _operator("divergence_sum")(*tensors, weight, *how)
    if reduction == "mean":
        return total / (p.tensor.shape[0] if weight is None else weight.sum())
    return total / (p.shape[0] if p.shape else 1) if reduction == "batchmean" else total


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        said = ", ".join(repr(choice) for choice in choices[:-1]) + f" or {choices[-1]!r}"
        raise ValueError(f"{name} must be {said}, got {value!r}{hint}")


def _check_reduction(reduction: str) -> None:
    _check_choice("reduction", reduction, _REDUCTIONS)


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
    return *_operands(input, weight, bias), target.reshape(-1)


def _operands(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Checked (x [N, H], weight [V, H], bias [V]), cast as F.linear's arguments are under autocast."""
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
    return input.reshape(-1, input.shape[-1]), weight, bias


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    kind = like.device.type
    if like.dtype == torch.float64 or not torch.is_autocast_enabled(kind):  # autocast leaves float64 alone
        return None
    return torch.get_autocast_dtype(kind)


def _chunk_rows(x: Tensor, vocab: int) -> int:
    return default_chunk_rows(int(vocab), x.element_size(), x.device.type)


def _reduced(total: Tensor, rows: Tensor, ignore_index: int, reduction: str) -> Tensor:
    return total / (rows != ignore_index).sum() if reduction == "mean" else total
