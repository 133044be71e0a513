"""Random heads of a student and a teacher: what is drawn is a program, its tensors and the options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.properties.divergences import DIVERGENCES, REDUCED, Element, Reduced, Side

Project = Callable[[Tensor, Tensor], Tensor]
Map = Callable[[Tensor], Tensor]
Rows = Callable[[Tensor, Tensor], Tensor]  # values, a mask [*rows] -> a loss

PROJECTIONS: dict[str, Project] = {
    "F.linear": F.linear,
    "@": lambda x, w: x @ w.T,
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "mT": lambda x, w: x.matmul(w.mT),
    "scaled weight": lambda x, w: F.linear(x, w * 0.5),
    "rows flat": lambda x, w: (x.reshape(-1, x.size(-1)) @ w.t()).view(*x.shape[:-1], -1),
    "normalised": lambda x, w: F.linear(x, F.normalize(w, dim=-1)),
}


def _divided(z: Tensor) -> Tensor:
    z.div_(0.7)
    return z


# with and without the upcast, before it and after it
TEMPERATURES: dict[str, Map] = {
    "none": lambda z: z,
    "over": lambda z: z / 2.0,
    "times": lambda z: 1.5 * z,
    "method": lambda z: z.div(4),
    "in place": _divided,
}
SOFTCAPS: dict[str, Map] = {
    "none": lambda z: z,
    "tanh": lambda z: 3.0 * torch.tanh(z / 3.0),
    "method": lambda z: (z / 2.5).tanh().mul(2.5),
}
UPCASTS: dict[str, Map] = {
    "none": lambda z: z,
    "float": lambda z: z.float(),
    "to": lambda z: z.to(torch.float32),
}
LOG_PROBS: dict[str, Map] = {
    "method": lambda z: z.log_softmax(-1),
    "F": lambda z: F.log_softmax(z, dim=-1),
    "F, float32": lambda z: F.log_softmax(z, dim=-1, dtype=torch.float32),
    "torch": lambda z: torch.log_softmax(z, z.dim() - 1),
    "module": lambda z: torch.nn.LogSoftmax(dim=-1)(z),
    "less logsumexp": lambda z: z - z.logsumexp(-1, keepdim=True),
    "less torch.logsumexp": lambda z: z - torch.logsumexp(z, dim=-1)[..., None],
}
PROBS: dict[str, Map] = {
    "method": lambda z: z.softmax(-1),
    "F": lambda z: F.softmax(z, dim=-1),
    "F, float32": lambda z: F.softmax(z, dim=-1, dtype=torch.float32),
    "torch": lambda z: torch.softmax(z, -1),
    "exp of log_softmax": lambda z: z.log_softmax(-1).exp(),
    "module": lambda z: torch.nn.Softmax(dim=-1)(z),
}


def _zeroed(v: Tensor, m: Tensor) -> Tensor:
    v = v * 1.0
    v[m == 0] = 0
    return v


# element [*rows, V] -> a loss; the sum over classes first, or a reduction of everything
REDUCTIONS: dict[str, Rows] = {
    "per row": lambda e, m: e.sum(-1),
    "torch.sum": lambda e, m: torch.sum(e, dim=-1),
    "mean of classes": lambda e, m: e.mean(dim=-1),
    "keepdim": lambda e, m: e.sum(-1, keepdim=True).squeeze(-1) * m,
    "sum": lambda e, m: e.sum(),
    "mean": lambda e, m: e.mean(),
    "batchmean": lambda e, m: e.sum() / e.size(0),
    "mean of rows": lambda e, m: e.sum(-1).mean(),
    "times a mask": lambda e, m: e.sum(-1) * m,
    "masked mean": lambda e, m: (e.sum(-1) * m).sum() / m.sum(),
    "masked mean, clamped": lambda e, m: (e.sum(-1) * m).sum() / m.sum().clamp(min=1),
    "masked mean, flat": lambda e, m: -torch.sum(e.sum(-1).view(-1) * m.view(-1).int(), dim=0) / torch.sum(m.view(-1)),
    "element masked": lambda e, m: (e * m.unsqueeze(-1)).sum() / m.sum().clamp_min(1),
    "where": lambda e, m: torch.where(m != 0, e.sum(-1), 0.0).sum(),
    "element where": lambda e, m: torch.where(m[..., None] > 0, e, torch.zeros_like(e)).sum(-1),
    "masked_fill": lambda e, m: e.masked_fill(m[..., None] == 0, 0.0).sum() / m.sum(),
    "set to zero": lambda e, m: _zeroed(e.sum(-1), m).mean(),
    "weighted in place": lambda e, m: (e.sum(-1) * 1.0).mul_(m),
}


@dataclass(frozen=True)
class Made:
    """How a side's logits become a distribution: projection, bias, then the steps in their order."""

    project: Project
    bias: bool
    steps: tuple[Map, ...]
    log_probs: Map
    probs: Map

    def logits(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = self.project(x, w)
        return self.mapped(z + b if self.bias else z)

    def mapped(self, z: Tensor) -> Tensor:
        for step in self.steps:
            z = step(z)
        return z

    def side(self, z: Tensor) -> Side:
        return Side(z, self.log_probs, self.probs)


# where the teacher's distribution comes from: of hidden states tx with a weight tw, or of the student's weight w, or
# given as a tensor; some of them learn
TEACHERS = (
    "under no_grad",
    "frozen",
    "detached",
    "trainable",
    "student's weight",
    "student's weight, trainable",
    "student's hidden states",
    "given logits",
    "given logits, trainable",
    "given log-probs",
    "given probs",
    "given probs, transposed",
)


@dataclass(frozen=True)
class PairProgram:
    """A student's and a teacher's distribution and the loss between them; (alpha, T) of a cross entropy beside it."""

    words: tuple[str, ...]
    divergence: str
    student: Made
    teacher: Made
    source: str
    element: Element | None
    reduced: Reduced | None
    reduction: Rows
    k: float
    beside: float | None

    def sides(self, x: Tensor, w: Tensor, b: Tensor, tx: Tensor, tw: Tensor, given: Tensor) -> tuple[Side, Side]:
        student = self.student.side(self.student.logits(x, w, b))
        source, made = self.source, self.teacher
        if source == "given log-probs":
            return student, Side(given, lambda z: z, torch.exp)
        if source == "given probs":
            return student, Side(given, torch.log, lambda z: z)
        if source == "given probs, transposed":
            return student, Side(given.transpose(0, -2), torch.log, lambda z: z)
        if source.startswith("given logits"):
            return student, made.side(made.mapped(given * 1.0))  # times one: a step may write in place
        if source == "student's hidden states":
            tx = x
        if source.startswith("student's weight"):
            tw = w
        if source in ("under no_grad", "student's weight"):
            with torch.no_grad():
                z = made.logits(tx, tw, b)
        else:
            z = made.logits(tx, tw, b)
        return student, made.side(z.detach() if source == "detached" else z)

    def loss(self, s: Side, t: Side, m: Tensor) -> Tensor:
        if self.reduced is not None:
            return self.reduced(s, t, self.k)
        assert self.element is not None
        return self.reduction(self.element(s, t, self.k), m)

    def __call__(self, x, w, b, tx, tw, given, y, m) -> Any:
        s, t = self.sides(x, w, b, tx, tw, given)
        loss = self.loss(s, t, m)
        if self.beside is None:
            return loss
        hard = F.cross_entropy(s.z.reshape(-1, s.z.size(-1)), y.reshape(-1))
        return self.beside * hard + (1 - self.beside) * 4.0 * loss

    def __repr__(self) -> str:
        return " | ".join(self.words)


def _pick(draw: Any, table: dict[str, Any], words: list[str], what: str = "") -> Any:
    name = draw(st.sampled_from(sorted(table)))
    words.append(f"{what} {name}".strip())
    return table[name]


def _made(draw: Any, words: list[str], who: str) -> Made:
    project = _pick(draw, PROJECTIONS, words, who)
    bias = draw(st.booleans())
    maps = [("temperature", _pick(draw, TEMPERATURES, words, "temperature"))]
    maps.append(("softcap", _pick(draw, SOFTCAPS, words, "softcap")))
    upcast = ("upcast", _pick(draw, UPCASTS, words, "upcast"))
    at = draw(st.integers(0, 2))
    words.append(f"at {at}, bias {bias}")
    maps.insert(at, upcast)
    steps = tuple(step for _, step in maps)
    return Made(project, bias, steps, _pick(draw, LOG_PROBS, words), _pick(draw, PROBS, words))


@st.composite
def pair_programs(draw: Any) -> PairProgram:
    words: list[str] = []
    divergence = draw(st.sampled_from(sorted(DIVERGENCES)))
    words.append(divergence)
    student = _made(draw, words, "student")
    source = draw(st.sampled_from(TEACHERS))
    words.append(f"teacher {source}")
    teacher = _made(draw, words, "teacher")
    element = reduced = None
    reduction = REDUCTIONS["sum"]
    if divergence in REDUCED and draw(st.booleans()):
        reduced = _pick(draw, REDUCED[divergence], words, "reduced by")
    else:
        element = _pick(draw, DIVERGENCES[divergence], words)
        reduction = _pick(draw, REDUCTIONS, words)
    k = draw(st.one_of(st.sampled_from([0, 1, 0.5]), st.floats(0.02, 0.98)))
    beside = draw(st.sampled_from([None, None, 0.3]))
    words.append(f"k={k}, cross entropy {beside}")
    return PairProgram(tuple(words), divergence, student, teacher, source, element, reduced, reduction, k, beside)


@st.composite
def pair_arguments(draw: Any) -> dict[str, Any]:
    """Rows, sizes, dtypes of both sides, a seed, and which of the student's tensors want gradients."""
    rows = draw(st.sampled_from([(5,), (8,), (2, 4), (1, 3), (3, 3), (5, 2), (2, 2, 3)]))
    sizes: dict[str, Any] = {"rows": rows, "h": draw(st.integers(2, 8)), "ht": draw(st.integers(2, 8))}
    sizes |= {"v": draw(st.integers(11, 41)), "seed": draw(st.integers(0, 2**16))}
    sizes["dtypes"] = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in range(2)]
    sizes["wanted"] = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    sizes["infinite"] = draw(st.booleans())
    return sizes


def pair_tensors(drawn: dict[str, Any], source: str) -> list[Tensor]:
    """x, w, b, tx, tw, given, y, m for a program whose teacher comes from `source`."""
    torch.manual_seed(drawn["seed"])
    rows, h, v = drawn["rows"], drawn["h"], drawn["v"]
    mine, theirs = drawn["dtypes"]
    shared = source.startswith("student's weight")
    if shared or source == "student's hidden states":
        theirs = mine
    ht = h if shared or source == "student's hidden states" else drawn["ht"]
    x, w, b = torch.randn(*rows, h), torch.randn(v, h), torch.randn(v)
    tx, tw, given = torch.randn(*rows, ht), torch.randn(v, ht), 2 * torch.randn(*rows, v)
    y, m = torch.randint(0, v, rows), (torch.rand(rows) < 0.7).float()
    m.view(-1)[0] = 1
    if drawn["infinite"] and source == "given logits":
        given[..., v // 2] = -float("inf")
    if source == "given log-probs":
        given = given.log_softmax(-1)
    elif source.startswith("given probs"):
        given = given.softmax(-1)
    if source.endswith("transposed"):
        given = given.transpose(0, -2).contiguous()
    learned = [(x, drawn["wanted"][0], mine), (w, drawn["wanted"][1], mine), (b, False, mine)]
    trainable = source.endswith("trainable") or source == "student's hidden states"
    learned += [(tx, trainable, theirs), (tw, trainable or source == "under no_grad", theirs)]
    learned.append((given, trainable and source.startswith("given"), theirs))
    return [*(t.to(to).requires_grad_(wants) for t, wants, to in learned), y, m]
