"""What happens to the dims of the logits, operator by operator: r rows, v vocabulary, i anything else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fuse_losses.graph.parts import PARTS
from fuse_losses.graph.row_views import view_groups
from fuse_losses.graph.rows import Loose, Lost, Rowed, analyse
from fuse_losses.head.sizes import arange_along

B, T, V = 2, 5, 37
T3 = torch.randn(B, T, V)
C = torch.randint(0, V, (B, T))
IDS = torch.tensor([1, 5, 9])


def trace(fn, shape=(B, T, V)) -> fx.GraphModule:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return make_fx(fn, PARTS, tracing_mode="real")(mode.from_tensor(torch.randn(shape)))


def label(fn, vocab_dim: int = 2, shape=(B, T, V)):
    """What is known of fn(z): its labels, or the name of the class and, if it is lost, the code."""
    gm = trace(torch.func.functionalize(fn), shape)
    logits = next(iter(gm.graph.nodes))
    state = analyse(gm.graph, {logits: vocab_dim})
    found = state.values[gm.graph.output_node().args[0]]
    if isinstance(found, Rowed):
        return found.labels
    return found.code if isinstance(found, Lost) else type(found).__name__


KEPT = [
    ("nothing", lambda z: z.clone(), "rrv"),
    ("float", lambda z: z.double(), "rrv"),
    ("number", lambda z: z * 2 + 1, "rrv"),
    ("bias", lambda z: z + T3[0, 0], "rrv"),
    ("tensor of rows", lambda z: z * T3[..., :1], "rrv"),
    ("tensor of some dims", lambda z: z * T3[:, :1, :1], "rrv"),
    ("itself", lambda z: z * z.tanh(), "rrv"),
    ("row value", lambda z: z - z.amax(-1, keepdim=True), "rrv"),
    ("row value from the left", lambda z: z.logsumexp(-1).unsqueeze(-1) - z, "rrv"),
    ("new dim in front", lambda z: z + torch.ones(3, 1, 1, 1), "irrv"),
    ("masked_fill", lambda z: z.masked_fill(T3 > 0, -1), "rrv"),
    ("where", lambda z: torch.where(z > 0, z, T3), "rrv"),
    ("softmax", lambda z: z.softmax(-1), "rrv"),
    ("log_softmax", lambda z: z.log_softmax(2), "rrv"),
    ("cumsum", lambda z: z.cumsum(-1), "rrv"),
    ("sort", lambda z: z.sort(-1).values, "rrv"),
    ("sort's indices", lambda z: z.sort(-1).indices, "rrv"),
    ("top-k", lambda z: z.topk(3).values, "rri"),
    ("sum", lambda z: z.sum(-1), "rr"),
    ("sum, keepdim", lambda z: z.sum(-1, keepdim=True), "rri"),
    ("variance", lambda z: z.var(-1), "rr"),
    ("norm", lambda z: z.norm(dim=-1), "rr"),
    ("max", lambda z: z.max(-1).values, "rr"),
    ("argmax", lambda z: z.argmax(-1), "rr"),
    ("any", lambda z: (z > 0).any(-1), "rr"),
    ("logsumexp", lambda z: z.logsumexp(2), "rr"),
    ("gather", lambda z: z.gather(-1, C[..., None]), "rri"),
    ("gather of what was sorted", lambda z: z.gather(-1, z.argsort(-1)), "rrv"),
    ("scatter", lambda z: z.scatter(-1, C[..., None], 0.0), "rrv"),
    ("index of the vocabulary", lambda z: z[..., torch.arange(20)], "rrv"),
    ("index of a few classes", lambda z: z[..., IDS], "rri"),
    ("index of rows", lambda z: z[:, IDS], "rrv"),
    ("index of rows' values", lambda z: z.logsumexp(-1)[:, IDS], "rr"),
    ("index of rows by a matrix", lambda z: z[:, C], "rrrv"),
    ("index of rows by two", lambda z: z[C[0] % B, C[1] % T], "rv"),
    ("index of rows and classes", lambda z: z[C % B, C % T, C], "rr"),
    ("index_select of rows", lambda z: z.index_select(1, IDS), "rrv"),
    ("index_select of the vocabulary", lambda z: z.index_select(2, torch.arange(20)), "rrv"),
    ("rows set by a mask", lambda z: _set(z.clone(), C > 3), "rrv"),
    ("rows set by a mask of sequences", lambda z: _set(z.clone(), C[:, 0] > 3), "rrv"),
    ("flip", lambda z: z.flip(0, 2), "rrv"),
    ("roll", lambda z: z.roll(1, 1), "rrv"),
    ("median", lambda z: z.median(-1).values, "rr"),
    ("k-th value", lambda z: z.kthvalue(3).indices, "rr"),
    ("cummax", lambda z: z.cummax(-1).values, "rrv"),
    ("product with a matrix", lambda z: z @ T3[0, 0, :, None].expand(V, 4), "rri"),
    ("product with a wide matrix", lambda z: z @ T3[0, 0, :, None].expand(V, 30), "rrv"),
    ("product with a vector", lambda z: z @ T3[0, 0], "rr"),
    ("product with itself", lambda z: torch.einsum("btv,btv->bt", z, z), "rr"),
    ("product with a teacher", lambda z: torch.einsum("btv,btv->bt", z, T3), "rr"),
    ("view", lambda z: z.view(B * T, V), "rv"),
    ("view of the vocabulary", lambda z: z[..., :36].view(B, T, 6, 6), "rrvv"),
    ("flatten and back", lambda z: z.flatten(0, 1).view(T, B, V), "rrv"),
    ("transpose", lambda z: z.mT, "rvr"),
    ("rows swapped", lambda z: z.transpose(0, 1), "rrv"),
    ("permute", lambda z: z.permute(2, 0, 1), "vrr"),
    ("unsqueeze", lambda z: z.unsqueeze(1), "rirv"),
    ("unsqueeze, squeeze", lambda z: z.unsqueeze(0).squeeze(0), "rrv"),
    ("expand", lambda z: z.unsqueeze(0).expand(3, B, T, V), "irrv"),
    ("slice of rows", lambda z: z[:, 1:], "rrv"),
    ("slice of the vocabulary", lambda z: z[..., :30], "rrv"),
    ("a few classes", lambda z: z[..., :2], "rri"),
    ("one sequence", lambda z: z[1], "rv"),
    ("one class", lambda z: z[..., 1], "rr"),
    ("stack", lambda z: torch.stack([z, z * 2]), "irrv"),
    ("stack with a teacher", lambda z: torch.stack([T3, z], -1), "rrvi"),
    ("cat of the vocabulary", lambda z: torch.cat([z, z], -1), "rrv"),
    ("cat with another class", lambda z: torch.cat([z, T3[..., :1]], -1), "rrv"),
    ("set slice", lambda z: _set(z.clone(), (..., slice(30, None))), "rrv"),
    # each keeps the rows that it chose: the chunk's graph computes both
    ("rows with others", lambda z: z[:, :2] - z[:, :2].transpose(0, 1), "rrv"),
    ("kl_div", lambda z: F.kl_div(z.log_softmax(-1), T3, reduction="none"), "rrv"),
]
GONE = [
    ("sum of all", lambda z: z.sum(), "Loose"),
    ("mean of all", lambda z: z.mean(), "Loose"),
    ("mean over sequences and classes", lambda z: z.mean((0, 2)), "Loose"),
    ("sum of rows' values", lambda z: z.logsumexp(-1).sum(0), "Loose"),
    ("sorted rows' values", lambda z: z.logsumexp(-1).flatten().sort().values, "Loose"),
    ("mean cross entropy", lambda z: F.cross_entropy(z.mT, C), "Loose"),
]
LOST = [
    ("sum of rows", lambda z: z.sum(0), "rows_mix"),
    ("max of rows", lambda z: z.amax((0, 2)), "rows_mix"),
    ("batch statistics", lambda z: z - z.mean(0), "rows_mix"),
    ("a mean is read again", lambda z: z - z.mean(), "rows_mix"),
    ("softmax of rows", lambda z: z.softmax(1), "wrong_axis"),
    ("cumsum of rows", lambda z: z.cumsum(0), "wrong_axis"),
    ("top-k of rows", lambda z: z.topk(1, 0).values, "wrong_axis"),
    ("gather of rows", lambda z: z.gather(1, C[..., None]), "wrong_axis"),
    ("nll over rows", lambda z: F.nll_loss(z.log_softmax(-1), torch.zeros(B, V, dtype=torch.int64)), "wrong_axis"),
    ("index of some of the rows", lambda z: z[z[:, 0].argmax(-1) % B], "rows_mix"),
    ("padding of rows", lambda z: F.pad(z, (0, 0, 1, 0)), "rows_mix"),
    ("flat roll", lambda z: z.roll(1), "rows_mix"),
    ("median of rows", lambda z: z.median(1).values, "rows_mix"),
    ("cummax of rows", lambda z: z.cummax(1).values, "wrong_axis"),
    ("product over rows", lambda z: torch.einsum("btv,bt->bv", z, T3[..., 0]), "rows_mix"),
    ("product of all pairs", lambda z: torch.einsum("btv,bsv->bts", z, z), "rows_mix"),
    ("rows with the vocabulary", lambda z: z.flatten(1), "rows_mix"),
    ("flat", lambda z: z.view(-1), "rows_mix"),
    ("rows repeated", lambda z: z[:, :1].expand(B, T, V), "rows_mix"),
    ("rows joined", lambda z: torch.cat([z, z], 0), "rows_mix"),
    ("product", lambda z: z @ z.mT, "rows_mix"),
    ("set rows", lambda z: _set(z.clone(), (slice(None), slice(1, None))), "rows_mix"),
    ("noise", lambda z: z + torch.rand_like(z), "rows_mix"),
]


def _set(z, index):
    z[index] = 0
    return z


TABLE = [*KEPT, *GONE, *LOST]


@pytest.mark.parametrize(("fn", "expected"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_labels(fn, expected: str) -> None:
    assert label(fn) == expected


@pytest.mark.parametrize(
    ("fn", "vocab_dim", "expected"),
    [
        (lambda z: z.softmax(1), 1, "rvr"),
        (lambda z: z.softmax(2), 1, "wrong_axis"),
        (lambda z: z.logsumexp(0), 0, "rr"),
        (lambda z: z.mT.sum(-1), 1, "rr"),
    ],
)
def test_the_vocabulary_may_be_any_dim(fn, vocab_dim: int, expected: str) -> None:
    assert label(fn, vocab_dim, shape=(5, 5, 5)) == expected


def test_square_logits_are_not_confused() -> None:
    """All dims of one size: only what happens to them tells them apart."""
    cube = (5, 5, 5)
    assert label(lambda z: z.transpose(0, 1), shape=cube) == "rrv"
    assert label(lambda z: z + z.transpose(1, 2), shape=cube) == "rows_mix"
    assert label(lambda z: z.logsumexp(-1)[..., None] + z, shape=cube) == "rrv"
    assert label(lambda z: z.logsumexp(-1) + z, shape=cube) == "rows_mix"


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ((2, 5, 37), (10, 37), [([0, 1], [0]), ([2], [1])]),
        ((10, 37), (2, 5, 37), [([0], [0, 1]), ([1], [2])]),
        ((2, 5, 36), (2, 5, 6, 6), [([0], [0]), ([1], [1]), ([2], [2, 3])]),
        ((4, 6), (6, 4), [([0, 1], [0, 1])]),
        ((), (), []),
    ],
)
def test_view_groups(old, new, groups) -> None:
    assert view_groups(old, new) == groups


def test_an_arange_is_recognised_by_what_made_it() -> None:
    def find(fn):
        gm = trace(lambda z: z[0, 0, 0] + fn(z))
        return gm.graph.output_node().args[0].args[1]

    assert arange_along(find(lambda x: torch.arange(5)), 0, (5,))
    assert arange_along(find(lambda x: torch.arange(5)[:, None]), 0, (5, 3))
    assert not arange_along(find(lambda x: torch.arange(1, 6)), 0, (5,))
    assert not arange_along(find(lambda x: torch.arange(0, 10, 2)), 0, (5,))
    assert not arange_along(find(lambda x: torch.arange(5)), 0, (4,))
    assert not arange_along(find(lambda x: torch.arange(5).flip(0)), 0, (5,))


def test_what_does_not_read_the_logits_is_plain() -> None:
    gm = trace(lambda z: (z.sum(), T3.softmax(0)))
    state = analyse(gm.graph, {next(iter(gm.graph.nodes)): 2})
    total, plain = gm.graph.output_node().args[0]
    assert isinstance(state.values[total], Loose)
    assert not state.depends(plain)
