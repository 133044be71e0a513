"""What a node calls, what it writes to, and which line of the user's made it."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from fuse_losses.graph import calls
from tests.capture import Capture


def nodes_of(fn, *args):
    capture = Capture()
    capture.compile(fn, fullgraph=True)(*args)
    return list(capture.before[0].graph.nodes)


def iadd(x):
    x += 1
    return x


def setitem(x):
    x[0] = 1
    return x


WRITES = [
    ("iadd", iadd, True),
    ("setitem", setitem, True),
    ("method", lambda x: x.mul_(2), True),
    ("torch.relu_", lambda x: torch.relu_(x), True),
    ("F.relu inplace", lambda x: F.relu(x, inplace=True), True),
    ("out=", lambda x: torch.exp(x * 2, out=x), True),
    ("operator", lambda x: torch.ops.aten.mul_.Tensor(x, x), True),
    ("zero_", lambda x: x.zero_(), True),
    ("pure method", lambda x: x.mul(2), False),
    ("pure function", lambda x: torch.exp(x), False),
    ("a name with underscores", lambda x: x.__add__(1), False),
    ("relu", lambda x: F.relu(x, inplace=False), False),
]


@pytest.mark.parametrize(("fn", "writes"), [w[1:] for w in WRITES], ids=[w[0] for w in WRITES])
def test_writes_to(fn, writes: bool) -> None:
    nodes = nodes_of(lambda x: fn(x), torch.rand(3))
    written = {target for node in nodes for target in calls.writes_to(node)}
    assert written == ({nodes[0]} if writes else set())


def test_operators_with_an_underscore_for_a_keyword_write_to_nothing() -> None:
    """`a | b` is operator.or_, which only its name makes look like a method that writes."""
    nodes = nodes_of(lambda x: (x > 0) | (x < 1) & (x != 2), torch.rand(3))
    assert {operator.or_, operator.and_} <= {n.target for n in nodes}
    assert not any(calls.writes_to(n) for n in nodes)


def test_arguments_by_position_and_keyword() -> None:
    nodes = nodes_of(lambda x, w: F.linear(x, weight=w), torch.rand(2, 3), torch.rand(4, 3))
    (linear,) = [n for n in nodes if calls.is_call(n, calls.LINEAR)]
    assert calls.arguments(linear, "input", "weight", "bias") == [nodes[0], nodes[1], None]


def test_user_line_is_outside_of_pytorch() -> None:
    loss = torch.nn.CrossEntropyLoss()
    nodes = nodes_of(lambda z, y: loss(z, y), torch.rand(2, 3), torch.tensor([0, 1]))
    (node,) = [n for n in nodes if calls.is_call(n, calls.HARD_LOSSES)]
    path, number, code = calls.user_line(node).split(":", 2)
    assert path == __file__ and int(number) == test_user_line_is_outside_of_pytorch.__code__.co_firstlineno + 2
    assert "loss(z, y)" in code


def test_user_line_without_a_trace_is_empty() -> None:
    node = torch.fx.Graph().placeholder("x")
    assert calls.user_line(node) == ""
