"""What kernels over one row share: the tile size and the online softmax."""

import triton
import triton.language as tl

_LARGEST_BLOCK = 8192


def block_size(vocab: int) -> int:
    """Columns of one tile: a power of two that covers a small row and bounds the registers of a large one."""
    return min(_LARGEST_BLOCK, max(128, triton.next_power_of_2(vocab)))


@triton.jit
def load_logits(row_ptr, cols, vocab, col_stride, inner, outer, SQUASH: tl.constexpr, MASKED: tl.constexpr):
    """Tile of `z` in float32, -inf beyond the row's end. Only the last tile of a row needs MASKED: a mask by
    an odd vocabulary would break every load into single elements.
    """
    offsets = cols.to(tl.int64) * col_stride
    if MASKED:
        u = tl.load(row_ptr + offsets, mask=cols < vocab, other=0.0).to(tl.float32)
        # after the squash, which need not keep -inf
        return tl.where(cols < vocab, SQUASH(u, inner, outer), float("-inf"))
    else:
        return SQUASH(tl.load(row_ptr + offsets).to(tl.float32), inner, outer)


@triton.jit
def online_softmax_step(z, top, total):
    """Add a tile to (running maximum, per-lane sums of exp(z - maximum)). Only an exact -inf maximum is
    guarded, so that a NaN still reaches the sums.
    """
    new_top = tl.maximum(top, tl.max(z, 0))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, total * tl.exp(top - safe) + tl.exp(z - safe)


@triton.jit
def row_statistics(row_ptr, vocab, col_stride, inner, outer, SQUASH: tl.constexpr, BLOCK: tl.constexpr):
    """(maximum, log(sum(exp(z - maximum)))) of a row; a maximum of -inf is returned as 0."""
    cols = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    whole = vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        z = load_logits(row_ptr, start + cols, vocab, col_stride, inner, outer, SQUASH, False)
        top, total = online_softmax_step(z, top, total)
    z = load_logits(row_ptr, whole + cols, vocab, col_stride, inner, outer, SQUASH, True)
    top, total = online_softmax_step(z, top, total)
    return tl.where(top == float("-inf"), 0.0, top), tl.log(tl.sum(total, 0))
