"""Argument checks of the operators; they hold for symbolic sizes too."""

import torch
from torch import Tensor

from fuse_losses.kernels.chunked.squash import NAMES
from fuse_losses.kernels.side import FORMS
from fuse_losses.losses import DIVERGENCES
from fuse_losses.ops.gemm import ACCUMULATE


def check_how(squash: str, chunk_rows: int, accumulate: str = "float32") -> None:
    """Raise ValueError for an unknown squash or accumulate, or fewer than one row per chunk."""
    if squash not in NAMES:
        raise ValueError(f"squash must be one of {NAMES}, got {squash!r}")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate must be one of {ACCUMULATE}, got {accumulate!r}")
    torch._check_value(chunk_rows >= 1, lambda: f"chunk_rows must be at least 1, got {chunk_rows}")


def check_projection(x: Tensor, weight: Tensor, bias: Tensor | None, logits: Tensor | None) -> None:
    """Raise TypeError for mixed or non-float dtypes, ValueError for shapes that are not [N, H], [V, H], [V],
    [N, V].
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be a float tensor, got {x.dtype}")
    for name, other in (("weight", weight), ("bias", bias), ("logits", logits)):
        if other is not None and other.dtype != x.dtype:
            raise TypeError(f"x and {name} must have one dtype, got {x.dtype} and {other.dtype}")
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"x and weight must be [N, H] and [V, H], got {tuple(x.shape)} and {tuple(weight.shape)}")
    torch._check_value(
        x.shape[1] == weight.shape[1],
        lambda: f"x and weight must agree in their last size, got {tuple(x.shape)} and {tuple(weight.shape)}",
    )
    if bias is not None:
        torch._check_value(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: f"bias must be [V] for a weight {tuple(weight.shape)}, got {tuple(bias.shape)}",
        )
    if logits is not None:
        torch._check_value(
            logits.dim() == 2 and logits.shape[0] == x.shape[0] and logits.shape[1] == weight.shape[0],
            lambda: f"logits must be [N, V] = {(x.shape[0], weight.shape[0])}, got {tuple(logits.shape)}",
        )


def check_rows(rows: int, target: Tensor | None, row_weight: Tensor | None = None) -> None:
    """Raise TypeError unless the target is int32 or int64, ValueError unless per-row tensors are [rows]."""
    if target is not None and target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int64 or int32, got {target.dtype}")
    for name, values in (("target", target), ("row_weight", row_weight)):
        if values is not None:
            torch._check_value(
                values.dim() == 1 and values.shape[0] == rows,
                lambda name=name, values=values: f"{name} must be [{rows}], one per row, got {tuple(values.shape)}",
            )


def check_divergence(name: str, parameter: float) -> None:
    """Raise ValueError for a divergence that is not listed, or a parameter out of its range."""
    if name not in DIVERGENCES:
        raise ValueError(f"the divergence must be one of {tuple(DIVERGENCES)}, got {name!r}")
    DIVERGENCES[name].check(parameter)


def check_side(
    side: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, form: str, squash: tuple[str, float, float]
) -> None:
    """Raise ValueError or TypeError for an operand of a divergence that is neither a projection nor [N, V]."""
    if form not in FORMS:
        raise ValueError(f"{side}_form must be one of {FORMS}, got {form!r}")
    if form != "logits" and (weight is not None or squash != ("identity", 1.0, 1.0)):
        raise ValueError(f"{side} is given as {form}: it takes no weight and no squash but ('identity', 1.0, 1.0)")
    if weight is not None:
        check_projection(x, weight, bias, None)
        return
    if bias is not None:
        raise ValueError(f"{side}_bias needs {side}_weight")
    if not x.is_floating_point():
        raise TypeError(f"{side} must be a float tensor, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{side} must be [N, V], got {tuple(x.shape)}")


def check_sides(p: Tensor, p_weight: Tensor | None, q: Tensor, q_weight: Tensor | None) -> None:
    """Raise ValueError unless both sides have as many rows, classes and one device."""
    p_vocab = p.shape[1] if p_weight is None else p_weight.shape[0]
    q_vocab = q.shape[1] if q_weight is None else q_weight.shape[0]
    torch._check_value(
        p.shape[0] == q.shape[0], lambda: f"p and q must have as many rows, got {p.shape[0]} and {q.shape[0]}"
    )
    torch._check_value(p_vocab == q_vocab, lambda: f"p and q must have as many classes, got {p_vocab} and {q_vocab}")
    if p.device != q.device:
        raise ValueError(f"p and q must be on one device, got {p.device} and {q.device}")
