"""Matrix products of the chunk loop: one operand dtype, a result or a running sum that may be wider."""

import torch
from torch import Tensor

ACCUMULATE = ("float32", "native")
_WIDE_ELEMENTS = 1 << 20  # of the right operand that are widened at a time, where the device cannot widen its result


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of per-row values and of running sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _widens_on_device(a: Tensor, out: Tensor) -> bool:
    # cuBLAS multiplies 16-bit operands into a float32 result; torch offers that for CUDA (not ROCm) only
    return (
        a.is_cuda
        and torch.version.hip is None
        and a.dtype in (torch.float16, torch.bfloat16)
        and out.dtype == torch.float32
        and hasattr(torch.ops.aten.addmm, "dtype_out")
    )


def mm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write `a @ b` to `out`, unrounded where `out` is wider."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif _widens_on_device(a, out):
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        wide = a.to(out.dtype)
        columns = max(1, _WIDE_ELEMENTS // max(1, b.shape[0]))
        for start in range(0, b.shape[1], columns):
            part = slice(start, start + columns)
            torch.mm(wide, b[:, part].to(out.dtype), out=out[:, part])


def addmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `out`, unrounded where `out` is wider."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif _widens_on_device(a, out):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


class WeightGradient:
    """Sum of `du^T x` over chunks, shaped and strided like the weight [V, H], returned as `dtype`.

    Chunks add into float32 (float64 for float64), or into the weight's own dtype for accumulate="native"; a
    sum of one chunk needs no running sum. float16 always adds in float32: its unscaled sums overflow.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, chunks: int, accumulate: str) -> None:
        wide = statistics_dtype(weight.dtype)
        narrow = accumulate == "native" and weight.dtype != torch.float16
        self._sum_dtype = dtype if chunks <= 1 else weight.dtype if narrow else wide
        self._dtype = dtype
        self._weight = weight
        self._sum: Tensor | None = None

    def add(self, du: Tensor, x: Tensor) -> None:
        """Add one chunk: du [C, V], x [C, H]."""
        if self._sum is None:  # the first chunk writes, so that no zeros are written and read
            self._sum = torch.empty_like(self._weight, dtype=self._sum_dtype)
            mm_into(self._sum, du.t(), x)
        else:
            addmm_into(self._sum, du.t(), x)

    def result(self) -> Tensor:
        """The sum so far; zeros if there was no chunk."""
        if self._sum is None:
            return torch.zeros_like(self._weight, dtype=self._dtype)
        return self._sum.to(self._dtype)


class BiasGradient:
    """Sum of `du` over rows and chunks [V], added in float32 (float64 for float64), returned as `dtype`."""

    def __init__(self, bias: Tensor, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sum = torch.zeros(bias.shape, dtype=statistics_dtype(bias.dtype), device=bias.device)

    def add(self, du: Tensor) -> None:
        """Add one chunk: du [C, V]."""
        self._sum += du.sum(0, dtype=self._sum.dtype)

    def result(self) -> Tensor:
        """The sum so far."""
        return self._sum.to(self._dtype)
