"""What is launched again, and what is left to Triton, with a stand-in for a compiled kernel."""

import pytest
import torch

from fuse_losses.kernels.triton.launch import Launcher


class Kernel:
    """Counts the launches through Triton, and those of what it compiled."""

    arg_names = ("x_ptr", "out_ptr", "stride", "scale", "FORM", "BLOCK")

    def __init__(self, compiles=True):
        self.compiles, self.launched, self.again = compiles, [], []

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launched.append((grid, arguments, options))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.again.append((grid, arguments))


class Elsewhere:
    """A tensor as another device would hold it."""

    def __init__(self, x):
        self.dtype, self.data_ptr, self.device = x.dtype, x.data_ptr, torch.device("cuda:1")


def constants(vocab, device, form):
    return {"BLOCK": 2 * vocab, "OTHERS": 0, "FORM": form}, {"num_warps": 4}


def same(left, right):
    return all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True))


def test_the_second_launch_of_a_kind_is_direct():
    kernel = Kernel()
    launcher = Launcher(kernel, constants)
    for rows in (3, 5):
        x = torch.randn(rows, 16)
        launcher((x, None), (16, 0.5), ("logits",))
        arguments = (x.data_ptr() if kernel.again else x, None, 16, 0.5, "logits", 32)
        if rows == 3:
            assert not kernel.again
            ((grid, launched, options),) = kernel.launched
            assert grid == (3,) and same(launched, arguments) and options == {"num_warps": 4}
        else:
            ((grid, again),) = kernel.again
            assert grid == (5, 1, 1) and same(again, arguments) and len(kernel.launched) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x.half(), x), (16, 0.5), ("logits",)),
        lambda x: ((x, x.half()), (16, 0.5), ("logits",)),
        lambda x: ((x, None), (16, 0.5), ("logits",)),
        lambda x: ((x, x), (17, 0.5), ("logits",)),
        lambda x: ((x, x), (16, 0.25), ("logits",)),
        lambda x: ((x, x), (16, 0.5), ("probs",)),
        lambda x: ((x[:, :8], x), (16, 0.5), ("logits",)),
        lambda x: ((x, x.flatten()[1:]), (16, 0.5), ("logits",)),  # not where 16 bytes begin
        lambda x: ((x, Elsewhere(x)), (16, 0.5), ("logits",)),
    ],
    ids=["dtype", "other dtype", "none", "integer", "float", "constant", "vocab", "alignment", "device"],
)
def test_another_kind_is_left_to_triton(other):
    kernel = Kernel()
    launcher = Launcher(kernel, constants)
    x = torch.randn(3, 16)
    launcher((x, x), (16, 0.5), ("logits",))
    launcher(*other(x))
    assert len(kernel.launched) == 2 and not kernel.again


@pytest.mark.parametrize("hip", [None, "6.3"])
def test_nothing_is_kept_of_what_is_interpreted_or_for_amd(monkeypatch, hip):
    """AMD's compiler also asks for the size of a tensor's memory."""
    monkeypatch.setattr(torch.version, "hip", hip)
    kernel = Kernel(compiles=hip is not None)
    launcher = Launcher(kernel, constants)
    for _ in range(2):
        launcher((torch.randn(3, 16), None), (16, 0.5), ("logits",))
    assert len(kernel.launched) == 2


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("fuse_losses.kernels.triton.launch._MOST_KINDS", 10)
    kernel = Kernel()
    launcher = Launcher(kernel, constants)
    x = torch.randn(3, 16)
    for stride in range(25):
        launcher((x, None), (stride, 0.5), ("logits",))
        assert len(launcher._compiled) <= 10
    launcher((x, None), (24, 0.5), ("logits",))
    assert len(kernel.launched) == 25 and len(kernel.again) == 1
