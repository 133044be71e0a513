"""Launch parameters that depend on the device."""

import functools

import torch

_PER_LANE = 16  # elements of a tile per thread: two 16-byte loads of a 16-bit dtype
_MOST_THREADS = 1024


@functools.cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def num_warps(block: int, device: torch.device, per_lane: int = _PER_LANE) -> int:
    """Warps for a tile of `block` columns; a warp has 64 lanes on some AMD devices, and a program 1024 threads."""
    warp = _warp_size(device)
    return max(1, min(block // (per_lane * warp), _MOST_THREADS // warp))
