"""Target indices: checked, and rewritten for the row kernels."""

import torch
from torch import Tensor


def target_columns(target: Tensor, ignore_index: int, vocab: int, checked: bool = False) -> Tensor:
    """Contiguous int64 [N]: the target of each row, -1 where it is `ignore_index`; `checked`: by the forward already.

    A target that is neither in [0, vocab) nor `ignore_index` raises IndexError on the CPU; elsewhere it trips
    a device assert, without a host sync.
    """
    kept = target != ignore_index
    if not checked:
        wrong = kept & ((target < 0) | (target >= vocab))
        if target.device.type != "cpu":
            torch._assert_async(~wrong.any(), f"a target is out of bounds, expected 0 <= target < {vocab}")
        elif wrong.any():
            raise IndexError(f"Target {int(target[wrong][0])} is out of bounds. Expected 0 <= target < {vocab}.")
    return torch.where(kept, target, -1).to(torch.int64).contiguous()
