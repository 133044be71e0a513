"""What is lifted: every functional found in a tail is worth, in the reference evaluator, what the graph computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuse_losses.graph.products import Product, find_anchors
from fuse_losses.graph.tail import Tail, retrace
from fuse_losses.head.algebra import Functional, LogitMap, Logits, LogProb, LogSumExp, NllLoss, Selected
from fuse_losses.head.lift import lift
from fuse_losses.head.reference import evaluate
from fuse_losses.head.values import Lifted, Unlifted, Wide
from tests.head.spellings import SPELLINGS, VOCAB, Spelling

INT64_MAX = 2**63 - 1  # what an open slice ends at


class Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node was when it ran, before anything wrote to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.kept[n] = result.detach().clone() if isinstance(result, torch.Tensor) else result
        return result


@dataclasses.dataclass
class Found:
    """The first product of a graph, its tail, what was lifted, and the values of all nodes in one run."""

    product: Product
    tail: Tail
    values: dict[fx.Node, Lifted]
    dynamo: dict[fx.Node, Any]
    aten: dict[fx.Node, Any]

    @property
    def functionals(self) -> list[Functional]:
        return [v for v in self.values.values() if not isinstance(v, (Wide, Unlifted))]

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        p = self.product
        weight = self.dynamo[p.weight]
        x = self.dynamo[p.x].movedim(p.hidden_dim, -1)
        return x, weight.flatten(1) if p.weight_is_vh else weight.t(), p.bias and self.dynamo[p.bias]

    def with_tensors(self, functional: Functional) -> Functional:
        """The functional with values in place of the nodes it refers to."""
        logits = functional.logits
        rows = [dataclasses.replace(s, args=fx.node.map_arg(s.args, self.aten.__getitem__)) for s in logits.rows]
        logits = dataclasses.replace(logits, rows=tuple(rows))
        if logits.bias is not None:
            logits = dataclasses.replace(logits, bias=self.aten[logits.bias])
        functional = dataclasses.replace(functional, logits=logits)
        if isinstance(functional, LogSumExp):
            return functional
        return dataclasses.replace(functional, target=self.aten[functional.target])


def read(fn, *args) -> Found:
    found: list[Found] = []

    def backend(gm, example_inputs):
        product = find_anchors(gm.graph)[0].product
        tail = retrace(gm, [product])
        values = lift(tail.graph, {n: (None, p.vocab_dim) for n, p in tail.sources.items()}, [])
        dynamo = Recorder(gm)
        dynamo.run(*(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in example_inputs))
        aten = Recorder(fx.GraphModule(tail.graph.owning_module or {}, tail.graph))
        aten.run(*(dynamo.kept[node] for node in tail.inputs.values()))
        by_name = {n.name: v for n, v in aten.kept.items()}
        found.append(Found(product, tail, values, dynamo.kept, {n: by_name.get(n.name) for n in tail.graph.nodes}))
        return gm.forward

    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    return found[0]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_the_algebra_is_worth_what_the_graph_computes(spelling: Spelling) -> None:
    found = read(spelling.fn, *spelling.args())
    assert found.functionals
    for node, lifted in found.values.items():
        if isinstance(lifted, (Wide, Unlifted)):
            continue
        actual = found.aten[node]
        actual = actual[0] if isinstance(actual, (tuple, list)) else actual
        expected = evaluate(found.with_tensors(lifted), *found.operands()).reshape(actual.shape)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def functionals(fn) -> list[Functional]:
    return read(fn, *Spelling("", fn, "").args()).functionals


def test_cross_entropy_is_one_functional() -> None:
    first, *same = functionals(
        lambda x1, w, y1: F.cross_entropy(F.linear(x1, w), y1, ignore_index=-100, reduction="sum")
    )
    assert isinstance(first, NllLoss)
    assert (first.logits, first.ignore_index, first.mean, first.factor) == (Logits(), -100, False, 1.0)
    assert all(f == first for f in same)


def test_a_negated_log_softmax_is_a_factor() -> None:
    (picked,) = functionals(lambda x1, w, c1: (F.linear(x1, w).log_softmax(-1) * -2).gather(1, c1[:, None]))
    assert isinstance(picked, LogProb)
    assert (picked.logits.map, picked.factor, picked.ignore_index, picked.wraps) == (LogitMap(), -2.0, None, False)


def test_an_index_may_count_from_the_end_and_a_gather_may_not() -> None:
    (indexed,) = functionals(lambda x1, w, c1: F.linear(x1, w).log_softmax(-1)[torch.arange(10), c1])
    (gathered,) = functionals(lambda x1, w, c1: F.linear(x1, w).log_softmax(-1).gather(1, c1[:, None]))
    assert (indexed.wraps, gathered.wraps) == (True, False)


def test_a_difference_is_the_log_prob() -> None:
    def fn(x1, w, c1):
        z = F.linear(x1, w) / 2
        return z.gather(1, c1[:, None]).squeeze(1) - z.logsumexp(1)

    kinds = {type(f): f for f in functionals(fn)}
    assert set(kinds) == {Selected, LogSumExp, LogProb}
    assert kinds[LogProb].logits == Logits(LogitMap(outer=0.5))


def test_a_difference_with_another_logsumexp_is_not() -> None:
    def fn(x1, w, c1):
        z = F.linear(x1, w)
        return z.gather(1, c1[:, None]).squeeze(1) - (z / 2).logsumexp(1)

    assert {type(f) for f in functionals(fn)} == {Selected, LogSumExp}


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda z: z, LogitMap()),
        (lambda z: z * 2 / 8, LogitMap(outer=0.25)),
        (lambda z: -z, LogitMap(outer=-1.0)),
        (lambda z: torch.tanh(z / 4) * 4, LogitMap("tanh", 0.25, 4.0)),
        (lambda z: torch.tanh(z / 4) * 4 / 2, LogitMap("tanh", 0.25, 2.0)),
        (lambda z: (z * 3).float().tanh(), LogitMap("tanh", 3.0, 1.0)),
    ],
)
def test_maps(fn, expected: LogitMap) -> None:
    first, *_ = functionals(lambda x1, w, y1: F.cross_entropy(fn(F.linear(x1, w)), y1))
    assert first.logits.map == expected


@pytest.mark.parametrize(
    ("fn", "steps"),
    [
        (lambda z: z.mT.logsumexp(1), []),
        (lambda z: z[:, :5].logsumexp(-1), []),
        (lambda z: z[:, 1:].logsumexp(-1), [("slice", (1, 1, INT64_MAX, 1), (2, 4))]),
        (lambda z: z.mT[:, :, 1:].logsumexp(1), [("slice", (1, 1, INT64_MAX, 1), (2, 4))]),
        (lambda z: z[1].logsumexp(-1), [("select", (0, 1), (5,))]),
        (lambda z: z.flatten(0, 1).logsumexp(-1), [("reshape", (10,), (10,))]),
        (lambda z: z.view(-1, VOCAB).logsumexp(-1), [("reshape", (-1,), (10,))]),
        (lambda z: z.permute(1, 2, 0).logsumexp(1), [("permute", (1, 0), (5, 2))]),
        (lambda z: z.unsqueeze(1).logsumexp(-1), [("unsqueeze", (1,), (2, 1, 5))]),
        (lambda z: z.unsqueeze(-1).logsumexp(2), [("unsqueeze", (2,), (2, 5, 1))]),
    ],
)
def test_rows(fn, steps: list[tuple[str, tuple, tuple]]) -> None:
    (lse,) = functionals(lambda x, w: fn(F.linear(x, w)))
    assert [(s.kind, s.args, s.shape) for s in lse.logits.rows] == steps
