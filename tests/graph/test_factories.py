"""Tensors that are made of no other tensor, beside a head: read as they are, made once."""

import pytest
import torch
import torch.nn.functional as F

from tests.capture import Capture
from tests.oracle import run

V = 13


def noise(x, w, c):
    z = F.linear(x, w)
    return F.cross_entropy(z + torch.rand(z.shape), c)


def noise_that_is_returned(x, w, c):
    gumbel = -torch.log(-torch.log(torch.rand(c.size(0), V)))
    return F.cross_entropy(F.linear(x, w) + gumbel, c, reduction="none"), gumbel


def noise_for_each_row(x, w, c):
    return F.cross_entropy(F.linear(x, w) * torch.randint(1, 5, (c.size(0), 1)), c)


def random_targets(x, w):
    return F.cross_entropy(F.linear(x, w), torch.randint(0, V, (x.size(0),)))


def classes_dropped(x, w, c):
    return F.cross_entropy(F.linear(x, w) * F.dropout(torch.ones(V), 0.4), c)


def classes_drawn(x, w, c):
    return F.cross_entropy(F.linear(x, w) + torch.full((V,), 0.5).bernoulli() + torch.rand_like(torch.ones(V)), c)


def filled(x, w, c):
    u = torch.empty(V)
    u.uniform_()
    return F.cross_entropy(F.linear(x, w) + u, c)


def mask_written(x, w, c):
    mask = torch.zeros(V)
    mask[10:] = -50.0
    return F.cross_entropy(F.linear(x, w) + mask, c % 10, reduction="none")


def view_of_mask_written(x, w, c):
    mask = torch.zeros(2, V)
    mask[0].fill_(3.0)
    mask.view(-1)[:4] = -2
    return F.cross_entropy(F.linear(x, w) + mask[0], c)


def targets_written(x, w, c):
    targets = torch.full((x.size(0),), -100)
    targets[2:4] = 5
    return F.cross_entropy(F.linear(x, w), targets)


FUNCTIONS = [
    noise,
    noise_that_is_returned,
    noise_for_each_row,
    random_targets,
    classes_dropped,
    classes_drawn,
    filled,
    mask_written,
    view_of_mask_written,
    targets_written,
]


def seeded(fn, args):
    torch.manual_seed(7)
    return run(fn, args)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_factories(fn) -> None:
    args = [torch.randn(6, 3, requires_grad=True), torch.randn(V, 3, requires_grad=True), torch.randint(0, V, (6,))]
    args = args[: fn.__code__.co_argcount]
    capture = Capture(chunk_rows=2)
    for ours, eager in zip(seeded(capture.compile(fn), args), seeded(fn, args), strict=True):
        torch.testing.assert_close(ours, eager)
    assert len(capture.report.fused) == 1, str(capture.report)


def test_a_dropout_of_the_logits_is_drawn_once() -> None:
    def fn(x, w, c):
        z = F.linear(x, w)
        dropped = F.dropout(z, 0.5, True)
        with torch.no_grad():
            metric = dropped.logsumexp(-1)
        return F.cross_entropy(z, c), metric, dropped.logsumexp(-1), F.cross_entropy(dropped, c)

    args = [torch.randn(6, 3, requires_grad=True), torch.randn(V, 3, requires_grad=True), torch.randint(0, V, (6,))]
    capture = Capture(chunk_rows=2)
    for ours, eager in zip(seeded(capture.compile(fn), args), seeded(fn, args), strict=True):
        torch.testing.assert_close(ours, eager)
    assert capture.codes == ["rows_mix"], str(capture.report)
