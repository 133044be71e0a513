"""The graph of one chunk, run by hand over slices of the rows, makes what the whole makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_losses.graph.products import Product
from fuse_losses.graph.rows import Rowed, analyse
from fuse_losses.rewrite.chunk_graph import KINKS, OF_TENSORS, ChunkGraph
from fuse_losses.rewrite.chunk_inputs import RowInput, WholeInput

B, T, H, V = 2, 5, 6, 37
X, W = torch.randn(B, T, H), torch.randn(V, H)
TEACHER, BIAS, PER_ROW = torch.randn(B, T, V), torch.randn(V), torch.randn(B, T, 1)
C = torch.randint(0, V, (B, T))


class ByHand:
    """fn(z, *plain) for z = X @ W.T: its chunk's graph, and the means to run it on some rows."""

    def __init__(self, fn, *plain: Tensor) -> None:
        mode = FakeTensorMode()
        self.plain = plain
        z = torch.randn(B, T, V)
        gm = make_fx(torch.func.functionalize(fn))(*(mode.from_tensor(t) for t in (z, *plain)))
        self.inputs = gm.graph.find_nodes(op="placeholder")
        self.result = gm.graph.output_node().args[0]
        product = Product(self.inputs[0], self.inputs[0], self.inputs[0])
        analysis = analyse(gm.graph, {self.inputs[0]: 2})
        self.known = analysis.values[self.result]
        self.build = ChunkGraph(analysis, {self.inputs[0]: product}, set())
        self.build.add_output(self.result)
        self.chunk = self.build.finish()

    def rows(self) -> list[Tensor]:
        return [self._laid_out(spec) for spec in self.build.rows]

    def whole(self) -> list[Tensor]:
        return [W if isinstance(s.source, Product) else self._squeezed(s) for s in self.build.whole]

    def run(self, chunk_rows: int) -> Tensor:
        rows, made = self.rows(), []
        for start in range(0, len(rows[0]), chunk_rows):
            (out,) = self.chunk(*[r[start : start + chunk_rows] for r in rows], *self.whole())
            made.append(out)
        return torch.cat(made)

    def _value(self, node: fx.Node) -> Tensor:
        if node in self.inputs:
            return self.plain[self.inputs.index(node) - 1]
        args = fx.node.map_arg(node.args, self._value)
        return node.target(*args, **node.kwargs)

    def _laid_out(self, spec: RowInput) -> Tensor:
        """[N, inner...] of a value whose rows are viewed by the steps."""
        if isinstance(spec.source, Product):
            x, inner = X, 1
        else:
            x = self._value(spec.source)
            x = x[(None,) * (len(spec.shape) - x.dim())]
            rows = [d for d, label in enumerate(spec.labels) if label == "r"]
            inner = x.dim() - len(rows)
            x = x.expand([s if d in rows else -1 for d, s in enumerate(spec.shape)])
            x = x.permute(*rows, *(d for d in range(x.dim()) if d not in rows))
        kept = list(x.shape[x.dim() - inner :])
        for step in spec.steps:
            if step.kind == "reshape":
                x = x.reshape(*step.args, *kept)
            elif step.kind == "permute":
                x = x.permute(*step.args, *range(len(step.args), x.dim()))
            elif step.kind == "slice":
                x = torch.ops.aten.slice(x, *step.args)
            else:
                x = {"select": torch.select, "unsqueeze": torch.unsqueeze}[step.kind](x, *step.args)
        return x.reshape(-1, *kept)

    def _squeezed(self, spec: WholeInput) -> Tensor:
        value = self._value(spec.source)
        return value.squeeze(spec.squeezed) if spec.squeezed else value


def flat(result: Tensor, labels: str) -> Tensor:
    """Rows first, flattened: the form that a chunk's graph has."""
    rows = [d for d, label in enumerate(labels) if label == "r"]
    rest = [d for d in range(result.dim()) if d not in rows]
    return result.permute(*rows, *rest).reshape(-1, *(result.shape[d] for d in rest))


CASES = [
    ("itself", lambda z: z * 1),
    ("softmax", lambda z: z.softmax(-1)),
    ("hand-written log_softmax", lambda z: z - z.amax(-1, keepdim=True) - z.exp().sum(-1, keepdim=True).log()),
    ("teacher", lambda z, t: z - t, TEACHER),
    ("teacher of one sequence", lambda z, t: z * t, TEACHER[:1]),
    ("teacher without a batch", lambda z, t: z * t, TEACHER[0]),
    ("teacher transposed", lambda z, t: z.mT + t, TEACHER.mT.contiguous()),
    ("more dims than the logits", lambda z, t: z + t, torch.randn(3, 1, 1, 1)),
    ("more dims, with rows", lambda z, t: z + t, torch.randn(3, B, T, 1)),
    ("bias", lambda z, b: z + b, BIAS),
    ("per row", lambda z, r: z * r, PER_ROW),
    ("a number", lambda z, q: z / q, torch.tensor(0.5)),
    ("gather", lambda z, c: z.gather(-1, c[..., None]), C),
    ("scatter", lambda z, c: z.scatter(-1, c[..., None], 0.0), C),
    ("flattened rows", lambda z, t: z.view(B * T, V) * t.view(B * T, V), TEACHER),
    ("transposed", lambda z: z.mT.cumsum(1)),
    ("rows swapped", lambda z, t: z.transpose(0, 1) * t.transpose(0, 1), TEACHER),
    ("shifted", lambda z, t: z[:, 1:] * t[:, :-1], TEACHER),
    ("rows with the next ones", lambda z: (z[:, 1:] - z[:, :-1]).abs().sum(-1)),
    ("rows with others", lambda z: z[:, :2].softmax(-1) - z[:, :2].transpose(0, 1)),
    ("one sequence", lambda z: z[1].softmax(-1)),
    ("last positions", lambda z: z[:, -1].logsumexp(-1)),
    ("new dim", lambda z: z.unsqueeze(1).softmax(-1)),
    ("halves of the vocabulary", lambda z: z[..., :36].reshape(B, T, 2, 18).amax(-1)),
    ("stacked", lambda z, t: torch.stack([z, t]).logsumexp(0), TEACHER),
    ("joined", lambda z, r: torch.cat([z, r], -1).softmax(-1), PER_ROW),
    ("sorted", lambda z: z.sort(-1, descending=True).values.cumsum(-1)),
    ("variance", lambda z: z.var(-1, keepdim=True)),
]


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_chunks_make_the_whole(case, chunk_rows: int) -> None:
    _, fn, *plain = case
    made = ByHand(fn, *plain)
    assert isinstance(made.known, Rowed)
    torch.testing.assert_close(made.run(chunk_rows), flat(fn(X @ W.t(), *plain), made.known.labels))


SUMS = [
    ("sum", lambda z: z.sum()),
    ("sum of a softmax squared", lambda z: z.softmax(-1).square().sum()),
    ("sum over rows and classes", lambda z: z.square().sum((0, 1, 2))),
    ("nll", lambda z, c: F.nll_loss(z.log_softmax(-1).view(-1, V), c.view(-1), reduction="sum"), C),
]


@pytest.mark.parametrize("case", SUMS, ids=[c[0] for c in SUMS])
def test_sums_are_finished_behind(case) -> None:
    _, fn, *plain = case
    made = ByHand(fn, *plain).run(3)
    assert made.shape == (B * T,)
    torch.testing.assert_close(made.sum(), fn(X @ W.t(), *plain))


def test_every_input_is_taken_once() -> None:
    made = ByHand(lambda z, t, b: (z * t + b).softmax(-1) * t + b, TEACHER, BIAS)
    assert [type(s.source).__name__ for s in made.build.rows] == ["Product", "Node"]
    assert [s.part for s in made.build.whole] == ["weight", ""]


def test_one_product_for_rows_that_are_viewed_alike() -> None:
    made = ByHand(lambda z: z.view(-1, V).softmax(-1) * z.view(-1, V))
    assert len(made.build.rows) == 1
    linear = made.chunk.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len(linear) == 1


def test_what_is_not_read_is_not_computed() -> None:
    made = ByHand(lambda z: z.sort(-1).values.sum(-1) + 0 * z.logsumexp(-1))
    assert made.chunk.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
    unused = ByHand(lambda z: (z.sort(-1).values, z.logsumexp(-1))[1])
    assert not unused.chunk.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)


def test_the_same_region_is_the_same_code() -> None:
    def fn(z, t):
        return (z.softmax(-1) * t).sum(-1)

    assert ByHand(fn, TEACHER).chunk.code == ByHand(fn, TEACHER).chunk.code
    assert ByHand(fn, TEACHER).chunk.code != ByHand(lambda z, t: (z.softmax(-1) * t).mean(-1), TEACHER).chunk.code


def test_inputs_behind_a_detach_are_frozen() -> None:
    made = ByHand(lambda z, t, b: z.softmax(-1) * (t * z.detach()) + b, TEACHER, BIAS)
    assert made.build.frozen(made.chunk) == set()
    made = ByHand(lambda z, t, b: z.softmax(-1) + (t * z).detach() * b, TEACHER, BIAS)
    names = [n.name for n in made.chunk.graph.find_nodes(op="placeholder")]
    assert [names[i] for i in made.build.frozen(made.chunk)] == ["rows_1"]


def test_a_kink_is_one_whether_of_a_number_or_of_a_tensor() -> None:
    assert all(twin in KINKS for operator, twin in OF_TENSORS.items() if operator in KINKS)
