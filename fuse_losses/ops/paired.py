"""Inner operators for two distributions per row, one or both of them projected. They know nothing of autograd: which
gradients to compute is an argument, `needs`, one bool for each of p, p_weight, p_bias, q, q_weight, q_bias.

A side with a weight is projected: its tensor is x [N, H], and its logits are made chunk by chunk, in float32 (float64
for float64) whatever x's dtype, because a divergence of close distributions lives in their last digits. The gradient
with respect to them is written over them, in x's dtype. A side without a weight is given, [N, V] in its form. Per-row
values are float32, float64 if a side is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuse_losses.kernels.side import Side
from fuse_losses.kernels.squash import Squash
from fuse_losses.losses import page
from fuse_losses.losses.divergence import Divergence
from fuse_losses.ops.chunk_loop import chunk_buffer, cut, parts, rows_per_chunk
from fuse_losses.ops.dispatch import paired_kernels
from fuse_losses.ops.gemm import BiasGradient, WeightGradient, mm_into, statistics_dtype
from fuse_losses.ops.indexed import row_gain, saved_dtypes
from fuse_losses.ops.inner import inner_operator, no_autocast

TENSORS = "Tensor p, Tensor? p_weight, Tensor? p_bias, Tensor q, Tensor? q_weight, Tensor? q_bias"
HOW = (
    "str name, float parameter, bool masked, str p_form, str p_squash, float p_inner, float p_outer, "
    "str q_form, str q_squash, float q_inner, float q_outer, SymInt chunk_rows"
)
STATISTICS = 6  # rows of the kernels' `statistics`


class How(NamedTuple):
    """The arguments of `HOW`."""

    name: str
    parameter: float
    masked: bool
    p_form: str
    p_squash: str
    p_inner: float
    p_outer: float
    q_form: str
    q_squash: str
    q_inner: float
    q_outer: float
    chunk_rows: int

    @property
    def divergence(self) -> Divergence:
        return page(self.name, self.masked)

    @property
    def squashes(self) -> tuple[Squash, Squash]:
        """Those of p and of q."""
        return Squash(self.p_squash, self.p_inner, self.p_outer), Squash(self.q_squash, self.q_inner, self.q_outer)


class _Rows:
    """The rows of one side, a chunk at a time, and what adds up of their gradients."""

    def __init__(self, tensor: Tensor, weight: Tensor | None, bias: Tensor | None, form: str, squash: Squash) -> None:
        self.tensor, self.weight, self.bias = tensor, weight, bias
        self._form, self._squash = form, squash
        self.values_dtype = tensor.dtype if weight is None else statistics_dtype(tensor.dtype)
        self.row_bytes = 0 if weight is None else weight.shape[0] * self.values_dtype.itemsize
        self._memory: Tensor | None = None
        self._kept: Tensor | None = None
        self._needs = (False, False, False)

    def start(self, chunk_rows: int) -> None:
        """Allocate the chunk of logits."""
        if self.weight is not None:
            self._memory = chunk_buffer(self.tensor, self.weight.shape[0], chunk_rows, self.values_dtype)

    def keep_gradients(self) -> Tensor:
        """Let the gradient with respect to the logits go to a tensor [N, V] of its own, which is returned."""
        assert self.weight is not None
        self._kept = self.tensor.new_empty(self.tensor.shape[0], self.weight.shape[0])
        return self._kept

    def start_gradients(
        self, needs: tuple[bool, bool, bool], dtype: torch.dtype, bias_dtype: torch.dtype, chunks: int, accumulate: str
    ) -> None:
        """Prepare the gradients, in `dtype`, the bias's in `bias_dtype`."""
        self._needs, self._dtypes = needs, (dtype, bias_dtype)
        like, weight, bias = self.tensor, self.weight, self.bias
        if weight is None:  # a gradient [N, V] of its own, whatever the strides of the given tensor
            self._grad = torch.empty(like.shape, dtype=dtype, device=like.device) if needs[0] else None
        else:
            self._grad = torch.empty_like(like, dtype=dtype) if needs[0] else None
        need_weight, need_bias = weight is not None and needs[1], bias is not None and needs[2]
        self._weight_sum = WeightGradient(weight, dtype, chunks, accumulate) if need_weight else None  # type: ignore
        self._bias_sum = BiasGradient(bias, bias_dtype) if need_bias else None  # type: ignore

    def read(self, part: slice) -> Side:
        """The values of some rows [C, V]."""
        if self.weight is None or self._memory is None:
            return Side(cut(self.tensor, part), self._form, self._squash)
        out = self._memory[: part.stop - part.start, : self.weight.shape[0]]
        mm_into(out, self.tensor[part], self.weight.t())
        if self.bias is not None:
            out += self.bias
        return Side(out, self._form, self._squash, scratch=out.dtype == torch.float32)

    def gradient_of(self, part: slice) -> Tensor | None:
        """Where the gradient with respect to the values of `read(part)` goes: over them if they are products."""
        if self._kept is not None:
            return self._kept[part]
        if not any(self._needs):
            return None
        if self.weight is None or self._memory is None:
            return None if self._grad is None else cut(self._grad, part)
        memory = self._memory.view(self.tensor.dtype)
        return memory[: part.stop - part.start, : self.weight.shape[0]]

    def add(self, part: slice, du: Tensor | None) -> None:
        """Take a chunk's gradient `du`, which `gradient_of` gave out, to x, weight and bias."""
        if self.weight is None or du is None or self._kept is not None:
            return
        if self._grad is not None:
            mm_into(self._grad[part], du, self.weight)
        if self._weight_sum is not None:
            self._weight_sum.add(du, self.tensor[part])
        if self._bias_sum is not None:
            self._bias_sum.add(du)

    def gradients(self) -> list[Tensor]:
        """Gradients of tensor, weight and bias; only those that are needed."""
        sums = [each.result() for each in (self._weight_sum, self._bias_sum) if each is not None]
        return sums if self._grad is None else [self._grad, *sums]


def values_dtype(p: Tensor, q: Tensor) -> torch.dtype:
    """Dtype of the per-row values of two sides."""
    return torch.float64 if torch.float64 in (p.dtype, q.dtype) else torch.float32


class _Loop:
    """Both sides, cut into the same chunks."""

    def __init__(self, tensors: tuple[Tensor | None, ...], how: How, few: bool = False) -> None:
        p, p_weight, p_bias, q, q_weight, q_bias = tensors
        assert p is not None and q is not None
        p_squash, q_squash = how.squashes
        self.p = _Rows(p, p_weight, p_bias, how.p_form, p_squash)
        self.q = _Rows(q, q_weight, q_bias, how.q_form, q_squash)
        self.rows = p.shape[0]
        self.dtype = values_dtype(p, q)
        self.divergence, self.k = how.divergence, how.parameter
        self.kernels = paired_kernels(self.p.values_dtype, self.q.values_dtype, p.device)
        row_bytes = self.p.row_bytes + self.q.row_bytes
        if few:  # their logits are smaller than the weight's gradient, and are gone before it is made
            self.chunk_rows = how.chunk_rows
        else:
            sides = (self.p.row_bytes > 0) + (self.q.row_bytes > 0)
            self.chunk_rows = rows_per_chunk(self.rows, how.chunk_rows, row_bytes, sides)
        self.p.start(self.chunk_rows)
        self.q.start(self.chunk_rows)

    def start_gradients(self, needs: tuple[bool, ...], accumulate: str, waiting: bool) -> None:
        """Prepare gradients; those that are `waiting` for an upstream gradient may have wider dtypes."""
        chunks = -(-self.rows // self.chunk_rows)
        for side, need in ((self.p, needs[:3]), (self.q, needs[3:])):
            dtype = side.tensor.dtype
            dtypes = saved_dtypes(dtype) if waiting else (dtype, dtype)
            side.start_gradients(tuple(need), *dtypes, chunks, accumulate)  # type: ignore[arg-type]

    def visit_weighted(self, weight: Tensor, d: Tensor) -> None:
        """Write the divergence of every row to `d`, and its gradients times `weight`, which is contiguous."""
        self.visit(
            lambda part, p, q, p_out, q_out: self.kernels.paired_fwd_bwd(
                p, q, self.divergence, self.k, cut(weight, part), cut(d, part), p_out, q_out
            )
        )

    def gradients(self) -> list[Tensor]:
        """Those of the six gradients that are needed."""
        return [*self.p.gradients(), *self.q.gradients()]

    def visit(self, kernel) -> None:
        """Call `kernel(part, p, q, p_out, q_out)` for every chunk."""
        for part in parts(self.rows, self.chunk_rows):
            p, q = self.p.read(part), self.q.read(part)
            p_out, q_out = self.p.gradient_of(part), self.q.gradient_of(part)
            kernel(part, p, q, p_out, q_out)
            self.p.add(part, p_out)
            self.q.add(part, q_out)


@inner_operator(f"({TENSORS}, {HOW}, bool[] needs) -> (Tensor, Tensor)")
def paired_fwd(*args):
    """The divergence [N] of every row, and `statistics` [6, N] for a backward that needs gradients."""
    tensors, how, needs = args[:6], How(*args[6:-1]), args[-1]
    with no_autocast(args[0]):
        loop = _Loop(tensors, how)
        d = args[0].new_empty(loop.rows, dtype=loop.dtype)
        statistics = d.new_empty(STATISTICS, loop.rows)
        needed = (any(needs[:3]), any(needs[3:]))
        for part in parts(loop.rows, loop.chunk_rows):
            p, q = loop.p.read(part), loop.q.read(part)
            loop.kernels.paired_fwd(p, q, loop.divergence, loop.k, cut(d, part), cut(statistics, part, 1), needed)
    return d, statistics


@paired_fwd.register_fake
def _(*args):
    d = args[0].new_empty(args[0].shape[0], dtype=values_dtype(args[0], args[3]))
    return d, d.new_empty(STATISTICS, d.shape[0])


@inner_operator(f"(Tensor grad, Tensor statistics, {TENSORS}, {HOW}, str accumulate, bool[] needs) -> Tensor[]")
def paired_bwd(grad, statistics, *args):
    """Gradients of those of the six tensors that need one, from that of the divergence [N]."""
    tensors, how, (accumulate, needs) = args[:6], How(*args[6:-2]), args[-2:]
    with no_autocast(args[0]):
        loop = _Loop(tensors, how)
        loop.start_gradients(tuple(needs), accumulate, waiting=False)

        def kernel(part, p, q, p_out, q_out) -> None:
            loop.kernels.paired_bwd(
                p, q, loop.divergence, loop.k, cut(grad, part), cut(statistics, part, 1), p_out, q_out
            )  # fmt: skip

        loop.visit(kernel)
        return loop.gradients()


@paired_bwd.register_fake
def _(grad, statistics, *args):
    return _fake_gradients(args[:6], args[-1], waiting=False)


@inner_operator(f"({TENSORS}, Tensor? row_weight, {HOW}, str accumulate, bool[] needs) -> Tensor[]")
def paired_fwd_grad(*args):
    """The divergence [N], 0 where the row's weight is 0, and the gradients of `sum(row_weight * divergence)` for those
    of the six tensors that need one.

    float16 gradients come back in float32 (unscaled, they leave float16's range), a bias's always do.
    """
    tensors, row_weight, how, (accumulate, needs) = args[:6], args[6], How(*args[7:-2]), args[-2:]
    with no_autocast(args[0]):
        loop = _Loop(tensors, how)
        loop.start_gradients(tuple(needs), accumulate, waiting=True)
        d = args[0].new_empty(loop.rows, dtype=loop.dtype)
        weight = torch.ones_like(d) if row_weight is None else row_weight.to(d.dtype).contiguous()
        gain = _gain(weight, loop, how)
        if gain is not None:
            weight = weight * gain

        loop.visit_weighted(weight, d)
        grads = loop.gradients()
        if gain is not None:
            for g in grads:
                g.div_(gain)
    return [d, *grads]


@paired_fwd_grad.register_fake
def _(*args):
    d = args[0].new_empty(args[0].shape[0], dtype=values_dtype(args[0], args[3]))
    return [d, *_fake_gradients(args[:6], args[-1], waiting=True)]


@inner_operator(f"({TENSORS}, Tensor? row_weight, {HOW}, bool p_needs, bool q_needs) -> (Tensor, Tensor, Tensor)")
def paired_fwd_keep(*args):
    """The divergence [N], 0 where the row's weight is 0, and the gradients of `sum(row_weight * divergence)` for the
    logits of both sides, [N, V] in the dtype of the side ([0] for one that needs none). For few rows.
    """
    tensors, row_weight, how, needs = args[:6], args[6], How(*args[7:-2]), args[-2:]
    with no_autocast(args[0]):
        loop = _Loop(tensors, how, few=True)
        sides = zip((loop.p, loop.q), needs, strict=True)
        kept = [side.keep_gradients() if need else side.tensor.new_empty(0) for side, need in sides]
        d = args[0].new_empty(loop.rows, dtype=loop.dtype)
        weight = torch.ones_like(d) if row_weight is None else row_weight.to(d.dtype).contiguous()

        loop.visit_weighted(weight, d)
    return d, *kept


@paired_fwd_keep.register_fake
def _(*args):
    d = args[0].new_empty(args[0].shape[0], dtype=values_dtype(args[0], args[3]))
    kept = []
    for (x, weight), need in (((args[0], args[1]), args[-2]), ((args[3], args[4]), args[-1])):
        kept.append(x.new_empty((x.shape[0], weight.shape[0]) if need else 0))
    return d, *kept


def _gain(weight: Tensor, loop: _Loop, how: How) -> Tensor | None:
    """`row_gain` for float16, less the slope of the logits: a temperature of 0.1 makes gradients ten times larger."""
    if torch.float16 not in (loop.p.tensor.dtype, loop.q.tensor.dtype):
        return None
    steepest = max(abs(how.p_inner * how.p_outer), abs(how.q_inner * how.q_outer), 1.0)
    return row_gain(weight * steepest)


def _fake_gradients(tensors: Sequence[Tensor | None], needs: Sequence[bool], waiting: bool) -> list[Tensor]:
    grads = []
    for (x, weight, bias), need in ((tensors[:3], needs[:3]), (tensors[3:], needs[3:])):
        assert x is not None
        dtype, bias_dtype = saved_dtypes(x.dtype) if waiting else (x.dtype, x.dtype)
        if need[0]:  # given: a gradient of its own, whatever its strides
            grads.append(x.new_empty(x.shape, dtype=dtype) if weight is None else torch.empty_like(x, dtype=dtype))
        if need[1] and weight is not None:
            grads.append(torch.empty_like(weight, dtype=dtype))
        if need[2] and bias is not None:
            grads.append(x.new_empty(bias.shape, dtype=bias_dtype))
    return grads
