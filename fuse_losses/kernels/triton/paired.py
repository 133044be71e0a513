"""A divergence between two distributions per row, and its gradients, in Triton.

The interface and its contract are those of `kernels.chunked.paired`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuse_losses.kernels.side import Side
from fuse_losses.kernels.triton.launch import Launcher, num_warps
from fuse_losses.kernels.triton.pages import jitted
from fuse_losses.kernels.triton.paired_kernels import paired_bwd_kernel, paired_fwd_bwd_kernel, paired_fwd_kernel
from fuse_losses.kernels.triton.squash import SQUASHES
from fuse_losses.kernels.triton.tile import block_size
from fuse_losses.losses.divergence import Divergence

TEMPORARIES = False  # the functions make no tensor of [C, V]
_LARGEST_BLOCK, _PER_LANE = 2048, 4  # two sides and what is computed of them live in registers


class _How(NamedTuple):
    """What a kernel is compiled for, besides the kinds of its arguments."""

    divergence: Divergence
    k: float
    p_form: str
    p_squash: str
    q_form: str
    q_squash: str
    p_wanted: bool  # the gradient
    q_wanted: bool
    shared: bool = False
    reuse: bool = False


def _constants(vocab: int, device: torch.device, *how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    h = _How(*how)
    page, block = h.divergence, min(block_size(vocab), _LARGEST_BLOCK)
    (p_squash, p_slope), (q_squash, q_slope) = SQUASHES[h.p_squash], SQUASHES[h.q_squash]
    functions = {"PHI": page.phi, "PHI1": page.phi1, "SLOPE1": page.slope1, "PHI2": page.phi2, "SLOPE2": page.slope2}
    a1, a2 = page.scale(h.k)
    constants = {
        **{name: jitted(function) for name, function in functions.items()},
        "K": h.k,
        "A1": a1,
        "A2": a2,
        "SHARED": h.shared,
        "REUSE": h.reuse,
        "BLOCK": block,
        "P_FORM": h.p_form,
        "P_SQUASH": p_squash,
        "P_DZ_DU": p_slope,
        "P_OUT": h.p_wanted,
        "Q_FORM": h.q_form,
        "Q_SQUASH": q_squash,
        "Q_DZ_DU": q_slope,
        "Q_OUT": h.q_wanted,
        "P_SUM": h.p_wanted and h.p_form == "logits",
        "Q_SUM": h.q_wanted and h.q_form == "logits",
    }
    # equal sides must have equal bits, whichever of the two the compiler would merge a product with a sum in
    return constants, {"num_warps": num_warps(block, device, _PER_LANE), "enable_fp_fusion": False}


_fwd = Launcher(paired_fwd_kernel, _constants)
_bwd = Launcher(paired_bwd_kernel, _constants)
_fwd_bwd = Launcher(paired_fwd_bwd_kernel, _constants)


def paired_fwd(
    p: Side, q: Side, divergence: Divergence, k: float, d: Tensor, statistics: Tensor, needed: tuple[bool, bool]
) -> None:
    """Write the divergence `d` and what a backward needs to `statistics`."""
    _fwd(
        (p.values, q.values, d, statistics),
        (statistics.stride(0), p.values.shape[1], *_read(p), *_read(q)),
        _How(divergence, k, p.form, p.squash.name, q.form, q.squash.name, *needed),
    )


def paired_bwd(
    p: Side,
    q: Side,
    divergence: Divergence,
    k: float,
    weight: Tensor,
    statistics: Tensor,
    p_out: Tensor | None,
    q_out: Tensor | None,
) -> None:
    """Write `weight` times the gradients of the divergence; the statistics are `paired_fwd`'s."""
    p_to, q_to = _written(p, p_out), _written(q, q_out)
    wanted, shared = (p_out is not None, q_out is not None), _shared(p, p_out) or _shared(q, q_out)
    _bwd(
        (p.values, q.values, p_to, q_to, weight, statistics),
        (
            weight.stride(0),
            statistics.stride(0),
            p.values.shape[1],
            *_read(p),
            *_read(q),
            *p_to.stride(),
            *q_to.stride(),
        ),
        _How(divergence, k, p.form, p.squash.name, q.form, q.squash.name, *wanted, shared),
    )


def paired_fwd_bwd(
    p: Side,
    q: Side,
    divergence: Divergence,
    k: float,
    weight: Tensor,
    d: Tensor,
    p_out: Tensor | None,
    q_out: Tensor | None,
) -> None:
    """Write the divergence `d` (0 where `weight` is 0) and `weight` times its gradients in one visit."""
    # a frozen teacher's products are nobody's once the sums are known, and the student's phi1 need not be found again
    reuse = q.scratch and q_out is None and p_out is not None and p.form == "logits"
    p_to, q_to = _written(p, p_out), _written(q, q_out)
    wanted, shared = (p_out is not None, q_out is not None), _shared(p, p_out) or _shared(q, q_out)
    _fwd_bwd(
        (p.values, q.values, p_to, q_to, weight, d),
        (p.values.shape[1], *_read(p), *_read(q), *p_to.stride(), *q_to.stride()),
        _How(divergence, k, p.form, p.squash.name, q.form, q.squash.name, *wanted, shared, reuse),
    )


def _read(side: Side) -> tuple[float, ...]:
    return *side.values.stride(), side.squash.inner, side.squash.outer


def _written(side: Side, out: Tensor | None) -> Tensor:
    return side.values if out is None else out  # a pointer that is not used


def _shared(side: Side, out: Tensor | None) -> bool:
    """Whether a gradient is written over its side's values at another place than they are read from."""
    return out is not None and out.dtype != side.values.dtype and out.data_ptr() == side.values.data_ptr()
