"""Problems for one target per row, a float64 oracle in plain PyTorch, and the error that eager makes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

import fuse_losses.ops  # noqa: F401  registers the operators

IGNORE = -100
SQUASHES = {"identity": (1.0, 1.0), "scale": (1.0, 0.3), "tanh": (1 / 2.5, 2.5)}


def squashed(u: Tensor, squash: str, inner: float, outer: float) -> Tensor:
    return outer * (torch.tanh(inner * u) if squash == "tanh" else inner * u)


@dataclasses.dataclass
class Problem:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    row_weight: Tensor | None
    squash: str
    inner: float
    outer: float
    ignore_index: int = IGNORE

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        tensors = [t for t in (self.x, self.weight, self.bias, self.row_weight) if t is not None]
        return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]

    def unpack(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        rest = list(leaves[2:])
        bias = rest.pop(0) if self.bias is not None else None
        return leaves[0], leaves[1], bias, rest.pop(0) if self.row_weight is not None else None

    @property
    def how(self) -> tuple[str, float, float, int]:
        return self.squash, self.inner, self.outer, self.ignore_index

    def eager(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(weighted nll sum, log_prob, lse), logits in the leaves' dtype and the rest at least float32."""
        x, weight, bias, row_weight = self.unpack(leaves)
        u = F.linear(x, weight, bias)
        z = squashed(u if u.dtype == torch.float64 else u.float(), self.squash, self.inner, self.outer)
        kept = self.target != self.ignore_index
        picked = z.log_softmax(1).gather(1, self.target.long().masked_fill(~kept, 0).unsqueeze(1)).squeeze(1)
        log_prob = torch.where(kept, picked, 0.0)
        nll = -log_prob if row_weight is None else -(row_weight.to(z.dtype) * log_prob)
        return nll.sum(), log_prob, z.logsumexp(1)

    def nll_sum(self, leaves: list[Tensor], chunk_rows: int, accumulate: str = "float32") -> Tensor:
        x, weight, bias, row_weight = self.unpack(leaves)
        return torch.ops.fuse_losses.linear_nll_sum(
            x, weight, bias, self.target, row_weight, None, *self.how, chunk_rows, accumulate
        )

    def log_prob(self, leaves: list[Tensor], chunk_rows: int) -> tuple[Tensor, Tensor]:
        x, weight, bias, _ = self.unpack(leaves)
        return torch.ops.fuse_losses.linear_log_prob(
            x, weight, bias, self.target, None, *self.how, chunk_rows, "float32"
        )


@pytest.fixture(autouse=True)
def no_compile_caches():
    """A cached graph would hide a change of an inner operator: its key knows the operator's name only."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def make_problem():
    def make(
        rows=13, hidden=24, vocab=127, dtype=torch.float32, squash="identity", bias=False, row_weight=False,
        ignored=3, spread=1.0, device="cpu",
    ) -> Problem:  # fmt: skip
        inner, outer = SQUASHES[squash]
        target = torch.randint(0, vocab, (rows,), device=device)
        target[torch.randperm(rows, device=device)[:ignored]] = IGNORE
        return Problem(
            x=torch.randn(rows, hidden, device=device).to(dtype),
            weight=(spread * torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype),
            bias=torch.randn(vocab, device=device).to(dtype) if bias else None,
            target=target,
            row_weight=torch.rand(rows, device=device) if row_weight else None,
            squash="identity" if squash == "scale" else squash,
            inner=inner,
            outer=outer,
        )

    return make


@pytest.fixture
def assert_as_good_as_eager():
    """Error against the oracle at most twice eager's own, in norm and in the largest element.

    One rounding of the result's dtype is allowed on top, unless `strict`: gradients at the targets of a large
    vocabulary are all but equal, so that one lucky rounding of eager's serves them all. In float64 eager is
    the oracle, and only roundings of the products are left.
    """

    def check(ours, eager, oracle, strict=False) -> None:
        assert len(ours) == len(eager) == len(oracle)
        for i, (a, b, c) in enumerate(zip(ours, eager, oracle, strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape, (i, a.dtype, b.dtype, a.shape, b.shape)
            if c.numel() == 0:
                continue
            c = c.double()
            slack = 1024 * 2**-53 if a.dtype == torch.float64 else 4 * 2**-23
            slack += 0 if strict else torch.finfo(a.dtype).eps / 2
            error, allowed = a.double() - c, b.double() - c
            for measure in (torch.norm, _largest):
                got, limit = measure(error).item(), (2 * measure(allowed) + slack * measure(c)).item()
                assert got <= limit, f"result {i}, {measure.__name__}: error {got:.3g}, limit {limit:.3g}"

    return check


def _largest(t: Tensor) -> Tensor:
    return t.abs().max()
