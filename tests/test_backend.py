"""The backend as a user meets it: found by name, beside Inductor, in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fuse_losses
from fuse_losses.backend import backend
from tests.oracle import assert_as_eager

OPTIONS = {"fuse_losses.min_vocab": 1}


class Model(nn.Module):
    def __init__(self, vocab: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocab, bias=False)

    def forward(self, tokens, labels):
        return F.cross_entropy(self.head(self.body(self.embed(tokens)).tanh()).mT, labels)


def loss(x, w, y):
    return F.cross_entropy(x @ w.T, y)


def args(rows: int = 4):
    return (
        torch.randn(rows, 6, requires_grad=True),
        torch.randn(37, 6, requires_grad=True),
        torch.randint(0, 37, (rows,)),
    )


def fused() -> int:
    return torch._dynamo.utils.counters["fuse_losses"]["fused"]


def test_it_is_found_by_name() -> None:
    assert "fuse_losses" in torch._dynamo.list_backends(None)
    assert torch._dynamo.lookup_backend("fuse_losses") is backend


def test_it_may_be_given_itself() -> None:
    assert_as_eager(torch.compile(loss, backend=backend, options=OPTIONS), loss, args())
    assert fused() == 1


def test_a_module_compiled_in_place() -> None:
    model, tokens = Model(), torch.randint(0, 37, (2, 5))
    expected = model(tokens, tokens)
    model.compile(backend="fuse_losses", options=OPTIONS)
    torch.testing.assert_close(model(tokens, tokens), expected)
    assert fused() == 1


def test_a_few_steps_of_training_follow_eager() -> None:
    torch.manual_seed(1)
    eager, ours = Model(), Model()
    ours.load_state_dict(eager.state_dict())
    compiled = torch.compile(ours, backend="fuse_losses", options=OPTIONS)
    tokens = torch.randint(0, 37, (2, 5))
    for model, run in ((eager, eager), (ours, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            run(tokens, tokens).backward()
            optimizer.step()
    assert fused() == 1
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_accumulate_over_micro_batches() -> None:
    model = Model()
    compiled = torch.compile(model, backend="fuse_losses", options=OPTIONS)
    batches = [torch.randint(0, 37, (2, 5)) for _ in range(3)]
    sum(model(b, b) for b in batches).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for b in batches:
        compiled(b, b).backward()
    for p, e in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e)


def test_a_gradient_scaler_passes_through() -> None:
    x, w, y = args()
    compiled = torch.compile(loss, backend="fuse_losses", options=OPTIONS)
    (compiled(x, w, y) * 2**16).backward()
    x.grad, scaled = None, x.grad
    loss(x, w, y).backward()
    torch.testing.assert_close(scaled / 2**16, x.grad)


def test_runs_are_bitwise_equal() -> None:
    compiled = torch.compile(loss, backend="fuse_losses", options=OPTIONS)
    x, w, y = args(rows=64)
    runs = [(v := compiled(x, w, y), *torch.autograd.grad(v, (x, w))) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_new_row_counts_take_one_more_compilation() -> None:
    compiled = torch.compile(loss, backend="fuse_losses", options=OPTIONS)
    for rows in (4, 5, 9, 12, 30):
        assert_as_eager(compiled, loss, args(rows))
    assert fused() == 2


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    compiled = torch.compile(loss, backend="fuse_losses", options=OPTIONS)
    assert_as_eager(compiled, loss, args(rows))
    assert fused() == 1


def test_without_a_head_it_is_inductor() -> None:
    fn = lambda x: (x.sin() * 2).sum()  # noqa: E731
    compiled = torch.compile(fn, backend="fuse_losses")
    assert_as_eager(compiled, fn, [torch.randn(4, requires_grad=True)])
    assert not torch._dynamo.utils.counters["fuse_losses"]


def test_double_backward_is_refused_not_wrong() -> None:
    x, w, y = args()
    compiled = torch.compile(loss, backend="fuse_losses", options=OPTIONS)
    with pytest.raises(RuntimeError, match="double backward"):
        (gradient,) = torch.autograd.grad(compiled(x, w, y), x, create_graph=True)
        gradient.sum().backward()


def test_backward_twice_needs_retain_graph() -> None:
    x, w, y = args()
    value = torch.compile(loss, backend="fuse_losses", options=OPTIONS)(x, w, y)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_inputs_are_not_written_to() -> None:
    inputs = args()
    kept = [t.detach().clone() for t in inputs]
    torch.compile(loss, backend="fuse_losses", options=OPTIONS)(*inputs).backward()
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_changed_weights_are_read_anew() -> None:
    model, tokens = Model(), torch.randint(0, 37, (2, 5))
    compiled = torch.compile(model, backend="fuse_losses", options=OPTIONS)
    first = compiled(tokens, tokens)
    with torch.no_grad():
        model.head.weight.mul_(2)
    second = compiled(tokens, tokens)
    assert first != second
    torch.testing.assert_close(second, model(tokens, tokens))


def test_a_restart_that_dynamo_asks_for_is_no_failure() -> None:
    """With dynamic shapes AOTAutograd makes tensors of Python floats, and starts the capture anew for it."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = torch.nn.Embedding(40, 16), torch.nn.Linear(16, 16)
            self.head, self.loss = torch.nn.Linear(16, 40, bias=False), torch.nn.CrossEntropyLoss()

        def forward(self, ids, labels):
            z = self.head(torch.tanh(self.body(self.embed(ids))))
            return self.loss(z.view(-1, 40), labels.view(-1))

    ids = torch.randint(0, 40, (2, 12))
    compiled = torch.compile(Model(), backend="fuse_losses", dynamic=True, options={"fuse_losses.min_vocab": 1})
    compiled(ids, ids).backward()
    assert "failed" not in {h.decline.code for h in fuse_losses.last_report().heads if h.decline is not None}
    assert torch._dynamo.utils.counters["fuse_losses"]["fused"] >= 1
