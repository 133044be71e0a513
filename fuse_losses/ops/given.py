"""Inner operators over given logits and distributions: nothing is projected, and nothing of [N, V] but a gradient made.

They know nothing of autograd: which gradients to compute is an argument. On a GPU each is one launch, which takes less
than the host's time for it where rows are few or short: what they do in Python should be little.
"""

from collections.abc import Callable
from types import ModuleType

from torch import Tensor

from fuse_losses.kernels.side import Side
from fuse_losses.kernels.squash import Squash
from fuse_losses.ops.chunk_loop import cut, cut_those, parts
from fuse_losses.ops.dispatch import indexed_kernels, paired_kernels
from fuse_losses.ops.indexed import per_row
from fuse_losses.ops.inner import inner_operator, no_autocast
from fuse_losses.ops.paired import HOW, STATISTICS, How, values_dtype


def _visit(
    kernels: ModuleType, chunk_rows: int, run: Callable[..., None], statistics: Tensor, *rows: Tensor | None
) -> None:
    """Call `run(statistics, *rows)` for some rows at a time, for all at once where the kernels make no temporaries."""
    if not kernels.TEMPORARIES:
        run(statistics, *rows)
        return
    with no_autocast(statistics):
        for part in parts(statistics.shape[1], chunk_rows):
            run(cut(statistics, part, 1), *cut_those(part, *rows))


def _gradient(like: Tensor) -> Tensor:
    """Memory for a gradient [N, V] of its own, whatever the strides of the given tensor."""
    return like.new_empty(like.shape)


@inner_operator()
def given_fwd(
    logits: Tensor,
    target: Tensor,
    squash: str,
    inner: float,
    outer: float,
    ignore_index: int,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """log_prob [N] of given raw products [N, V], and their statistics [2, N]: row_max and log_sum."""
    kernels, how = indexed_kernels(logits), Squash(squash, inner, outer)
    log_prob, statistics = per_row(logits)

    def run(statistics, logits, target, log_prob):
        kernels.indexed_fwd(logits, target, ignore_index, how, log_prob, statistics)

    _visit(kernels, chunk_rows, run, statistics, logits, target, log_prob)
    return log_prob, statistics


@given_fwd.register_fake
def _(logits, target, squash, inner, outer, ignore_index, chunk_rows):
    return per_row(logits)


@inner_operator()
def given_bwd(
    grad_log_prob: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    squash: str,
    inner: float,
    outer: float,
    ignore_index: int,
    chunk_rows: int,
) -> Tensor:
    """Gradient for given raw products [N, V], in their dtype, from those of log_prob and lse."""
    kernels, how = indexed_kernels(logits), Squash(squash, inner, outer)
    out = _gradient(logits)

    def run(statistics, logits, target, grad_log_prob, grad_lse, out):
        kernels.indexed_bwd(logits, target, ignore_index, grad_log_prob, grad_lse, statistics, how, out)

    _visit(kernels, chunk_rows, run, statistics, logits, target, grad_log_prob, grad_lse, out)
    return out


@given_bwd.register_fake
def _(grad_log_prob, grad_lse, logits, target, statistics, squash, inner, outer, ignore_index, chunk_rows):
    return _gradient(logits)


def _sides(p: Tensor, q: Tensor, how: How) -> tuple[Side, Side]:
    p_squash, q_squash = how.squashes
    return Side(p, how.p_form, p_squash), Side(q, how.q_form, q_squash)


@inner_operator(f"(Tensor p, Tensor q, {HOW}, bool p_needs, bool q_needs) -> (Tensor, Tensor)")
def given_pair_fwd(p, q, *arguments):
    """The divergence [N] of every row of two given sides, and statistics [6, N] for a backward."""
    how, needs = How(*arguments[:-2]), arguments[-2:]
    kernels, divergence = paired_kernels(p.dtype, q.dtype, p.device), how.divergence
    d, statistics = _pair_values(p, q)

    def run(statistics, p, q, d):
        kernels.paired_fwd(*_sides(p, q, how), divergence, how.parameter, d, statistics, needs)

    _visit(kernels, how.chunk_rows, run, statistics, p, q, d)
    return d, statistics


@given_pair_fwd.register_fake
def _pair_values(p, q, *_):
    dtype = values_dtype(p, q)
    return p.new_empty(p.shape[0], dtype=dtype), p.new_empty(STATISTICS, p.shape[0], dtype=dtype)


@inner_operator(
    f"(Tensor grad, Tensor statistics, Tensor p, Tensor q, {HOW}, bool p_needs, bool q_needs) -> Tensor[]"
)  # fmt: skip
def given_pair_bwd(grad, statistics, p, q, *arguments):
    """Gradients for those of the two sides that need one, [N, V] in their dtypes, from that of the divergence [N]."""
    how, needs = How(*arguments[:-2]), arguments[-2:]
    kernels, divergence = paired_kernels(p.dtype, q.dtype, p.device), how.divergence
    outs = [_gradient(side) if need else None for side, need in zip((p, q), needs, strict=True)]

    def run(statistics, p, q, grad, *outs):
        kernels.paired_bwd(*_sides(p, q, how), divergence, how.parameter, grad, statistics, *outs)

    _visit(kernels, how.chunk_rows, run, statistics, p, q, grad, *outs)
    return [out for out in outs if out is not None]


@given_pair_bwd.register_fake
def _(grad, statistics, p, q, *arguments):
    return [_gradient(side) for side, need in zip((p, q), arguments[-2:], strict=True) if need]
