"""Losses without a kernel: any loss that keeps its rows apart runs a chunk of rows at a time, as right as eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fuse_losses.rewrite.slices import Slicer
from tests.capture import Capture, operators
from tests.head.spellings import HIDDEN, SPELLINGS, VOCAB, Spelling
from tests.oracle import assert_as_eager, assert_close_to_oracle, run, run64
from tests.rewrite.row_wise import ROW_WISE, row_args, row_tensors

CHUNKED = torch.ops.fuse_losses.chunked_rows.default
BY_NAME = dict(ROW_WISE)
names = pytest.mark.parametrize("name", BY_NAME)
# some of each kind, where all would take too long
SOME = [
    "targets: label smoothing",
    "targets: class weights",
    "targets: several classes",
    "transforms: slice set to -inf",
    "transforms: LoRA",
    "transforms: subset by index",
    "distributions: reverse KL to a teacher's head",
    "distributions: nucleus",
    "distributions: TVD, sum",
    "distributions: JSD",
    "values: top-k and its indices",
    "values: two exits with different rows",
    "values: logits returned",
]
some = pytest.mark.parametrize("name", SOME)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch) -> None:
    """What lifts into the algebra runs by rows here too: the generic executor is the kernels' oracle."""
    monkeypatch.setattr(Slicer, "lifted", lambda self, region, exit, dead=(): None)


class Rechunked(Capture):
    """What it made can be given another chunk size and run again."""

    def __call__(self, gm, example_inputs):
        super().__call__(gm, example_inputs)
        return lambda *args: self.after[-1](*args)

    def set_chunk_rows(self, rows: int) -> None:
        for module in self.after[-1].modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.find_nodes(op="call_function", target=CHUNKED):
                    node.update_arg(3, rows)
                module.recompile()


def assert_by_rows(capture: Capture, graphs: int = 1) -> None:
    assert capture.codes == [], str(capture.report)
    assert capture.report.fused
    assert len(capture.after) == graphs
    assert all("chunked_rows" in operators(gm) for gm in capture.after), str(capture.report)


@names
def test_every_chunk_size(name: str) -> None:
    fn, args, capture = BY_NAME[name], row_args(BY_NAME[name]), Rechunked()
    eager = run(fn, args)
    oracle = run64(fn, args, eager)
    compiled = capture.compile(fn, fullgraph=True)
    assert_close_to_oracle(run(compiled, args), eager, oracle)
    assert_by_rows(capture)
    for rows in (1, 3, 7):
        capture.set_chunk_rows(rows)
        assert_close_to_oracle(run(compiled, args), eager, oracle)
    assert len(capture.after) == 1


@names
def test_symbolic_shapes(name: str) -> None:
    fn, capture = BY_NAME[name], Capture(chunk_rows=4)
    compiled = capture.compile(fn, fullgraph=True, dynamic=True)
    assert_as_eager(compiled, fn, row_args(fn))
    assert_as_eager(compiled, fn, row_args(fn, rows=(3, 8)))
    # a Python loop over sequences is unrolled: one graph for each number of them
    assert_by_rows(capture, graphs=2 if name == "values: loop over sequences" else 1)


@some
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    fn, capture = BY_NAME[name], Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn, dtype))
    assert_by_rows(capture)


@some
@pytest.mark.parametrize("rows", [(1, 1), (1, 4), (3, 1), (0, 4)], ids=str)
def test_few_rows(name: str, rows: tuple[int, int]) -> None:
    """One sequence, one position and none at all, each as sizes that the graph is compiled for."""
    if name == "values: two exits with different rows" and rows[1] == 1:
        rows = (rows[0], 2)
    fn, named = BY_NAME[name], row_tensors(rows=(4, 5))
    names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    args = []
    for n in names:
        full = named[n]
        if full.shape[:2] == (4, 5):
            cut = full[: rows[0], : rows[1]]
        else:
            cut = full[: rows[0] * rows[1]] if full.shape[:1] == (20,) else full
        args.append(cut.detach().clone().requires_grad_(full.requires_grad))
    capture = Capture(chunk_rows=3)
    eager = run(fn, args)
    ours = run(capture.compile(fn, fullgraph=True, dynamic=False), args)
    assert_close_to_oracle(ours, eager, run64(fn, args, eager), largest=False)
    if 0 not in rows:  # a view of nothing does not say which dims are rows
        assert_by_rows(capture)


@pytest.mark.parametrize("name", ["transforms: subset by index", "distributions: TVD", "values: top-k and its indices"])
def test_with_inductor(name: str) -> None:
    fn = BY_NAME[name]
    compiled = torch.compile(fn, backend="fuse_losses", fullgraph=True, options={"fuse_losses.min_vocab": 1})
    assert_as_eager(compiled, fn, row_args(fn))
    assert torch._dynamo.utils.counters["fuse_losses"]["fused"] >= 1
    assert not torch._dynamo.utils.counters["fuse_losses"]["declined"]


def test_the_vocabulary_is_followed_by_its_dim_not_by_its_size() -> None:
    """Rows, hidden, vocabulary and sequences of one size."""
    size = 5

    def fn(x, w, t, y):
        z = F.linear(x, w)
        swapped = (t.transpose(0, 1).softmax(-1) * z.transpose(0, 1).log_softmax(-1)).sum(-1)
        smoothed = F.cross_entropy(z.transpose(1, 2), y, label_smoothing=0.1, reduction="none")
        return (
            swapped,
            smoothed,
            z.softmax(-1).square().sum((1, 2)),
            z.logsumexp(-1, keepdim=True) * z.sum(-1)[..., None],
        )

    args = [
        torch.randn(size, size, size, requires_grad=True),
        torch.randn(size, size, requires_grad=True),
        torch.randn(size, size, size),
        torch.randint(0, size, (size, size)),
    ]
    for dynamic in (False, True):
        torch._dynamo.reset()
        capture = Capture(chunk_rows=4)
        assert_as_eager(capture.compile(fn, dynamic=dynamic), fn, args)
        assert_by_rows(capture)


def test_a_vocabulary_of_another_size_runs_the_same_graph() -> None:
    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w), y1, label_smoothing=0.1)

    capture = Capture(chunk_rows=4)
    compiled = capture.compile(fn, dynamic=True)
    for rows, vocab, hidden in ((10, 37, 6), (4, 40, 9), (9, 9, 9)):
        args = [torch.randn(rows, hidden), torch.randn(vocab, hidden)]
        args = [*(a.requires_grad_() for a in args), torch.randint(0, vocab, (rows,))]
        assert_as_eager(compiled, fn, args)
    assert_by_rows(capture)


@pytest.mark.parametrize("temperature", [2.0, 0.7])
def test_a_temperature_that_is_an_argument(temperature: float) -> None:
    def fn(x1, w, t1, temperature):
        return -(t1.softmax(-1) * (F.linear(x1, w) / temperature).log_softmax(-1)).sum(-1)

    named, capture = row_tensors(), Capture(chunk_rows=4)
    compiled = capture.compile(fn, dynamic=True)
    for number in (temperature, temperature + 1):
        assert_as_eager(compiled, fn, [named["x1"], named["w"], named["t1"], number])
    assert capture.codes == [] and all(operators(gm) == ["chunked_rows"] for gm in capture.after)


def test_logits_in_float64() -> None:
    """The products are float32's, as eager's are: the error is theirs."""

    def fn(x1, w, y1):
        return F.cross_entropy(F.linear(x1, w).double(), y1)

    args, capture = row_args(fn), Capture(chunk_rows=4)
    eager = run(fn, args)
    oracle = run64(fn, args, eager)
    assert_close_to_oracle(run(capture.compile(fn), args), eager, oracle, computed_in=torch.float32)
    assert_by_rows(capture)


def test_the_gradient_of_a_temperature_in_bfloat16() -> None:
    """One number, summed over chunks and rounded: no more wrong than eager's, over many draws."""
    fn = BY_NAME["transforms: learned temperature, divisor"]
    compiled = Capture(chunk_rows=4).compile(fn)
    ours = eagers = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        args = row_args(fn, torch.bfloat16)
        eager = run(fn, args)
        exact = run64(fn, args, eager)[-1]
        ours += (run(compiled, args)[-1].double() - exact).square().item()
        eagers += (eager[-1].double() - exact).square().item()
    assert ours**0.5 <= 2 * eagers**0.5


@some
def test_without_gradients(name: str) -> None:
    fn = BY_NAME[name]
    args, capture = row_args(fn), Capture(chunk_rows=3)
    with torch.no_grad():
        made, expected = capture.compile(fn)(*args), fn(*args)
    torch.testing.assert_close(made, expected)
    assert_by_rows(capture)


def test_only_what_needs_a_gradient_has_one() -> None:
    """A teacher's head that could have a gradient gets none under no_grad: None, not zeros."""
    fn = BY_NAME["distributions: teacher under no_grad"]
    args = row_args(fn)
    Capture().compile(fn)(*args).sum().backward()
    assert [a.grad is not None for a in args] == [True, True, False, False]


def test_one_of_two_outputs_is_used() -> None:
    fn = BY_NAME["values: two exits of one loop"]
    grads = []
    for f in (fn, Capture(chunk_rows=3).compile(fn)):
        torch.manual_seed(0)
        args = row_args(fn)
        f(*args)[1].sum().backward()
        grads.append([a.grad for a in args if a.requires_grad])
    torch.testing.assert_close(*grads)


def test_exits_with_the_same_rows_share_a_loop() -> None:
    capture = Capture()
    fn = BY_NAME["values: two exits of one loop"]
    capture.compile(fn)(*row_args(fn))
    assert operators(capture.after[0]) == ["chunked_rows"]


def test_exits_with_other_rows_have_a_loop_each() -> None:
    capture = Capture()
    fn = BY_NAME["values: two exits with different rows"]
    capture.compile(fn)(*row_args(fn))
    assert operators(capture.after[0]) == ["chunked_rows"] * 2


def test_a_metric_without_gradients_has_a_loop_of_its_own() -> None:
    """Its values are not kept for a backward that never comes."""
    capture = Capture()
    fn = BY_NAME["values: entropy without gradients"]
    capture.compile(fn)(*row_args(fn))
    assert operators(capture.after[0]) == ["chunked_rows"] * 2
    assert [h.details["gradients"] for h in capture.report.fused] == ["recompute", "none are needed"]


def test_an_operand_written_to_in_between_is_declined() -> None:
    def fn(x1, w, t1):
        teacher = t1 * 2
        z = F.linear(x1, w)
        p = teacher.sigmoid() + teacher
        probs = z.log_softmax(-1) * teacher
        teacher.zero_()
        return (probs + p).sum(-1).detach()

    capture = Capture()
    assert_as_eager(capture.compile(fn), fn, row_args(fn))
    assert capture.codes == ["mutated"], str(capture.report)


def test_the_report_says_how() -> None:
    capture = Capture(chunk_rows=3)
    fn = BY_NAME["distributions: entropy by logsumexp"]
    capture.compile(fn)(*row_args(fn))
    (head,) = capture.report.fused
    assert head.summary.startswith("linear + row-wise loss of ")
    assert (head.details["executor"], head.details["chunk_rows"], head.details["gradients"]) == ("rows", 3, "recompute")
    assert "distributions.py" in head.where


# --------------------------------------------------------------------------------------------- the other executor


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_heads_with_kernels_give_the_same_by_rows(spelling: Spelling) -> None:
    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(spelling.fn, fullgraph=True), spelling.fn, spelling.args())
    assert_by_rows(capture)
    assert not {o for gm in capture.after for o in operators(gm)} - {"chunked_rows"}


# ---------------------------------------------------------------------------------------------------- a random tail

STEPS = [
    lambda z: z * 0.5,
    lambda z: z.tanh(),
    lambda z: z.softmax(-1),
    lambda z: z - z.mean(-1, keepdim=True),
    lambda z: z.sort(-1).values,
    lambda z: z.cumsum(-1),
    lambda z: z[..., 2:],
    lambda z: torch.where(z > 0, z, 0.1 * z),
    lambda z: torch.cat([z, z.square()], -1),
    lambda z: z.transpose(0, 1),
]


@pytest.mark.parametrize("seed", range(24))
def test_chains_of_operations(seed: int) -> None:
    """Any of these in any order: fused by rows or declined, and right."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [STEPS[i] for i in torch.randint(len(STEPS), (4,), generator=generator)]

    def fn(x, w):
        z = F.linear(x, w)
        for step in chosen:
            z = step(z)
        return z.logsumexp(-1), z.amax(-1)

    capture = Capture(chunk_rows=3)
    args = [torch.randn(2, 5, HIDDEN).requires_grad_(), torch.randn(VOCAB, HIDDEN).requires_grad_()]
    assert_as_eager(capture.compile(fn), fn, args)
    assert capture.codes == [], str(capture.report)


def test_an_operator_whose_fake_kernel_takes_no_symbolic_sizes() -> None:
    """Its backward is traced for each number of rows."""

    def fn(x, w, t, m):
        p, q = F.linear(x, w).softmax(-1), t.softmax(-1)
        return (q * torch.lerp(p, q, m.unsqueeze(-1).sigmoid()).log()).sum(-1)

    capture = Capture(chunk_rows=4)
    assert_as_eager(capture.compile(fn, fullgraph=True), fn, row_args(fn))
    assert_by_rows(capture)
