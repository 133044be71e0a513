"""Random heads and their spellings, for hypothesis: what is drawn is a program, its tensors and the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

Step = Callable[[Tensor, "Data"], Tensor]


@dataclass
class Data:
    """Tensors of a program: x [B, T, H], w [V, H], b [V], labels c, labels y some of which are ignored, a mask m."""

    x: Tensor
    w: Tensor
    b: Tensor
    y: Tensor
    c: Tensor
    m: Tensor
    ignore: int = -100


# name -> spelling; a projection gives logits [B, T, V] without bias
PROJECTIONS: dict[str, Step] = {
    "F.linear": lambda h, d: F.linear(h, d.w),
    "h @ w.T": lambda h, d: h @ d.w.T,
    "matmul w.t()": lambda h, d: torch.matmul(h, d.w.t()),
    "mT": lambda h, d: h.matmul(d.w.mT),
    "einsum": lambda h, d: torch.einsum("bth,vh->btv", h, d.w),
    "rows flat": lambda h, d: (h.reshape(-1, h.size(-1)) @ d.w.t()).view(h.size(0), h.size(1), -1),
    "mm": lambda h, d: torch.mm(h.flatten(0, 1), d.w.t()).unflatten(0, h.shape[:2]),
    "scaled weight": lambda h, d: F.linear(h, d.w * 0.5),
    "cast weight": lambda h, d: F.linear(h, d.w.to(h.dtype)),
    "normalised": lambda h, d: F.linear(F.normalize(h, dim=-1), F.normalize(d.w, dim=-1)),
}
BEFORE: dict[str, Step] = {
    "as it is": lambda h, d: h,
    "tanh": lambda h, d: torch.tanh(h),
    "scaled": lambda h, d: h * 0.7,
    "whole slice": lambda h, d: h[:, slice(0, None), :],
    "last rows": lambda h, d: h,
}
BIASES: dict[str, Step] = {
    "z + b": lambda z, d: z + d.b,
    "b + z": lambda z, d: d.b + z,
    "torch.add": lambda z, d: torch.add(z, d.b),
    "add_": lambda z, d: z.add_(d.b),
    "[1, V]": lambda z, d: z + d.b[None],
}


def _inplace_scale(z: Tensor, d: Data) -> Tensor:
    z.div_(1.5)
    return z


def _imul(z: Tensor, d: Data) -> Tensor:
    z *= 0.8
    return z


# steps that have a form in the algebra, those that write in place apart (what made their input may need it)
MAPS: dict[str, Step] = {
    "times": lambda z, d: z * 0.7,
    "times from the left": lambda z, d: 1.3 * z,
    "over": lambda z, d: z / 0.9,
    "torch.mul": lambda z, d: torch.mul(z, 0.6),
    "negated": lambda z, d: -z,
    "float": lambda z, d: z.float(),
    "to": lambda z, d: z.to(torch.float32),
    "contiguous": lambda z, d: z.contiguous(),
    "there and back": lambda z, d: z.flatten(0, 1).view(z.shape),
    "unsqueezed": lambda z, d: z.unsqueeze(0).squeeze(0),
    "permuted twice": lambda z, d: z.permute(0, 2, 1).transpose(1, 2),
}
INPLACE: dict[str, Step] = {"div_": _inplace_scale, "*=": _imul}
SOFTCAPS: dict[str, Step] = {
    "tanh": lambda z, d: 3.0 * torch.tanh(z / 3.0),
    "method": lambda z, d: (z / 2.5).tanh().mul(2.5),
    "F.tanh": lambda z, d: F.tanh(z / 4) * 4,
}
# steps that have none, and keep the rows apart
ROW_MAPS: dict[str, Step] = {
    "sigmoid": lambda z, d: 4 * torch.sigmoid(z / 2),
    "rsqrt": lambda z, d: 5 * z * torch.rsqrt(z.square() + 25),
    "clamp": lambda z, d: z.clamp(-3, 3),
    "class masked": lambda z, d: z.masked_fill(torch.arange(z.size(-1)) == z.size(-1) - 1, -1e4),
    "scaled by class": lambda z, d: z * d.b,
    "centred": lambda z, d: z - z.mean(-1, keepdim=True),
    "standardised": lambda z, d: z / (z.std(-1, keepdim=True) + 0.1),
    "by sequence": lambda z, d: z / (1 + torch.arange(z.size(0))[:, None, None]).to(z.dtype),
}


def _flat(z: Tensor) -> Tensor:
    return z.reshape(-1, z.size(-1))


def _logprob(z: Tensor, d: Data) -> Tensor:
    return z.log_softmax(-1).gather(-1, d.c.unsqueeze(-1)).squeeze(-1)


def _lse_minus(z: Tensor, d: Data) -> Tensor:
    return torch.gather(z, -1, d.c[..., None])[..., 0] - torch.logsumexp(z, dim=-1)


def _indexed(z: Tensor, d: Data) -> Tensor:
    return F.log_softmax(_flat(z), dim=1)[torch.arange(d.c.numel()), d.c.flatten()]


def _looped(z: Tensor, d: Data) -> Tensor:
    return torch.stack([r.log_softmax(-1).gather(-1, i[:, None])[:, 0] for r, i in zip(z, d.c, strict=True)])


def _smoothed(z: Tensor, d: Data) -> Tensor:
    lp = z.log_softmax(-1)
    return 0.9 * lp.gather(-1, d.c.unsqueeze(-1)).squeeze(-1) + 0.1 * lp.mean(-1)


LOSSES: dict[str, Step] = {
    "mean": lambda z, d: F.cross_entropy(_flat(z), d.y.reshape(-1), ignore_index=d.ignore),
    "sum": lambda z, d: F.cross_entropy(z.transpose(1, 2), d.y, ignore_index=d.ignore, reduction="sum"),
    "none": lambda z, d: F.cross_entropy(_flat(z), d.y.flatten(), None, None, d.ignore, None, "none"),
    "none, classes in dim 1": lambda z, d: F.cross_entropy(
        z.permute(0, 2, 1), d.y, ignore_index=d.ignore, reduction="none"
    ),
    "nll": lambda z, d: F.nll_loss(F.log_softmax(_flat(z), -1), d.y.reshape(-1), ignore_index=d.ignore),
    "module": lambda z, d: torch.nn.CrossEntropyLoss(ignore_index=d.ignore)(_flat(z), d.y.reshape(-1)),
    "gather": _logprob,
    "take_along_dim": lambda z, d: torch.take_along_dim(torch.log_softmax(z, -1), d.c[..., None], -1)[..., 0],
    "gather less logsumexp": _lse_minus,
    "indexed": _indexed,
    "sequence by sequence": _looped,
    "logsumexp": lambda z, d: z.logsumexp(-1),
    "z-loss": lambda z, d: torch.logsumexp(z, dim=-1).square().mean() * 1e-1,
}
ROW_LOSSES: dict[str, Step] = {
    "entropy": lambda z, d: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "entropy by logsumexp": lambda z, d: z.logsumexp(-1) - (F.softmax(z, -1) * z).sum(-1),
    "smoothed": _smoothed,
    "label_smoothing": lambda z, d: F.cross_entropy(
        _flat(z), d.y.reshape(-1), ignore_index=d.ignore, label_smoothing=0.2
    ),
    "probs squared": lambda z, d: torch.softmax(z, dim=-1).pow(2).sum(-1),
    "two classes": lambda z, d: z.log_softmax(-1).gather(-1, torch.stack([d.c, d.c.flip(1)], -1)).sum(-1),
    "KL to the uniform": lambda z, d: F.kl_div(
        z.log_softmax(-1), torch.full_like(z, 1 / z.size(-1)), reduction="batchmean"
    ),
}
# metrics are indices or have no gradient
METRICS: dict[str, Step] = {
    "argmax": lambda z, d: z.argmax(-1),
    "accuracy": lambda z, d: (z.max(-1).indices == d.c).float().mean(),
    "entropy, detached": lambda z, d: -(z.detach().softmax(-1) * z.detach().log_softmax(-1)).sum(-1),
}
AFTER: dict[str, Step] = {
    "as it is": lambda v, d: v,
    "scaled": lambda v, d: 0.3 * v,
    "over a tensor": lambda v, d: v / d.m.sum().clamp(min=1),
    "sum": lambda v, d: v.sum(),
    "mean": lambda v, d: v.mean(),
    "exp of mean": lambda v, d: (0.1 * v.mean()).exp(),
    "in place": lambda v, d: (v * 1.0).mul_(0.5),
    "plus an auxiliary": lambda v, d: v + 0.1 * d.x.square().mean(),
    "times what came before": lambda v, d: v * d.w.sum().tanh(),
}


@dataclass(frozen=True)
class Program:
    """Steps from hidden states to the outputs; `exact` if all of it has a form in the algebra."""

    words: tuple[str, ...]
    before: Step
    project: Step
    maps: tuple[Step, ...]
    losses: tuple[tuple[Step, Step], ...]
    rows: slice
    ignore: int
    exact: bool
    logits: tuple[Step, ...] = field(default=())  # what a near miss does between the map and the losses

    def __call__(self, x: Tensor, w: Tensor, b: Tensor, y: Tensor, c: Tensor, m: Tensor) -> Any:
        d = Data(x, w, b, y[:, self.rows], c[:, self.rows], m[:, self.rows], self.ignore)
        z = self.project(self.before(x, d), d)
        for step in self.maps:
            z = step(z, d)
        z = z[:, self.rows]
        return tuple(after(loss(z, d), d) for loss, after in self.losses)

    def __repr__(self) -> str:
        return " | ".join(self.words)


def _pick(draw: Any, table: dict[str, Step], words: list[str]) -> Step:
    name = draw(st.sampled_from(sorted(table)))
    words.append(name)
    return table[name]


@st.composite
def programs(draw: Any, exact: bool | None = None) -> Program:
    """A head of the algebra where `exact`, one that keeps its rows apart where not."""
    words: list[str] = []
    exact = draw(st.booleans()) if exact is None else exact
    before, project = _pick(draw, BEFORE, words), _pick(draw, PROJECTIONS, words)
    maps: list[Step] = []
    if draw(st.booleans()):
        maps.append(_pick(draw, BIASES, words))
    if draw(st.booleans()):
        maps.append(_pick(draw, INPLACE, words))
    maps += [_pick(draw, MAPS, words) for _ in range(draw(st.integers(0, 2)))]
    if draw(st.booleans()):
        maps.append(_pick(draw, SOFTCAPS, words))
        maps += [_pick(draw, MAPS, words) for _ in range(draw(st.integers(0, 1)))]
    losses = [(_pick(draw, LOSSES, words), _pick(draw, AFTER, words)) for _ in range(draw(st.integers(1, 2)))]
    if not exact:
        kind = draw(st.sampled_from(["map", "loss", "metric"]))
        if kind == "map":
            maps.append(_pick(draw, ROW_MAPS, words))
        elif kind == "loss":
            losses.append((_pick(draw, ROW_LOSSES, words), _pick(draw, AFTER, words)))
        else:
            losses.append((_pick(draw, METRICS, words), AFTER["as it is"]))
    rows = draw(st.sampled_from([slice(None), slice(None, -1), slice(1, None), slice(-2, None), slice(1, -1)]))
    ignore = draw(st.sampled_from([-100, -1, 0, 3, 255]))
    words.append(f"rows {rows.start}:{rows.stop}, ignore_index={ignore}")
    return Program(tuple(words), before, project, tuple(maps), tuple(losses), rows, ignore, exact)


@st.composite
def arguments(draw: Any, learned: bool = True) -> dict[str, Any]:
    """Sizes, a seed, and which of hidden states, weight and bias want gradients."""
    sizes = {"b": draw(st.integers(1, 3)), "t": draw(st.integers(3, 6)), "h": draw(st.integers(2, 8))}
    sizes |= {"v": draw(st.integers(11, 41)), "seed": draw(st.integers(0, 2**16))}
    wanted = draw(st.lists(st.booleans(), min_size=3, max_size=3)) if learned else [False] * 3
    return sizes | {"wanted": tuple(wanted)}


def tensors_of(drawn: dict[str, Any], ignore: int) -> list[Tensor]:
    torch.manual_seed(drawn["seed"])
    b, t, h, v = (drawn[k] for k in "bthv")
    floats = [torch.randn(b, t, h), torch.randn(v, h), torch.randn(v)]
    c = torch.randint(0, v, (b, t))
    y = torch.where(torch.rand(b, t) < 0.3, ignore, c)
    m = (torch.rand(b, t) < 0.7).float()
    return [*(f.requires_grad_(g) for f, g in zip(floats, drawn["wanted"], strict=True)), y, c, m]
