"""Which nodes are read as a product, and which products are found behind a loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fuse_losses.graph import calls
from fuse_losses.graph.products import MAX_WALK, Product, as_product, find_anchors
from tests.capture import Capture

ROWS, HIDDEN, VOCAB = (2, 5), 6, 37


def graph_of(fn, *args) -> fx.Graph:
    capture = Capture()
    capture.compile(fn, fullgraph=True)(*args)
    return capture.before[0].graph


def products(graph: fx.Graph) -> list[Product]:
    return [p for p in map(as_product, graph.nodes) if p is not None]


X, X1 = torch.randn(*ROWS, HIDDEN), torch.randn(10, HIDDEN)
W, B = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
WT = W.t().contiguous()
LAYER, BARE = nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, VOCAB, bias=False)
CONV, WINDOW = nn.Conv1d(HIDDEN, VOCAB, 1), torch.randn(VOCAB, HIDDEN, 3)

# (what, function, weight is [V, H], has a bias, dim of the vocabulary in the result, dim of the hidden size in x)
PRODUCTS = [
    ("F.linear", lambda: F.linear(X, W), True, False, 2, 2),
    ("F.linear, bias", lambda: F.linear(X1, W, B), True, True, 1, 1),
    ("F.linear, keywords", lambda: F.linear(input=X1, weight=W, bias=B), True, True, 1, 1),
    ("F.linear, no bias", lambda: F.linear(X1, W, bias=None), True, False, 1, 1),
    ("nn.Linear", lambda: LAYER(X), True, True, 2, 2),
    ("nn.Linear, no bias", lambda: BARE(X), True, False, 2, 2),
    ("one row", lambda: F.linear(X1[0], W), True, False, 0, 0),
    ("@", lambda: X @ WT, False, False, 2, 2),
    ("@ w.T", lambda: X @ W.T, False, False, 2, 2),
    ("torch.matmul", lambda: torch.matmul(X, WT), False, False, 2, 2),
    ("torch.matmul, keywords", lambda: torch.matmul(input=X1, other=WT), False, False, 1, 1),
    ("matmul", lambda: X.matmul(WT), False, False, 2, 2),
    ("torch.mm", lambda: torch.mm(X1, WT), False, False, 1, 1),
    ("torch.mm, keywords", lambda: torch.mm(X1, mat2=WT), False, False, 1, 1),
    ("mm", lambda: X1.mm(WT), False, False, 1, 1),
    ("torch.addmm", lambda: torch.addmm(B, X1, WT), False, True, 1, 1),
    ("addmm", lambda: B.addmm(X1, WT), False, True, 1, 1),
    ("einsum vh", lambda: torch.einsum("bth,vh->btv", X, W), True, False, 2, 2),
    ("einsum hv", lambda: torch.einsum("bth,hv->btv", X, WT), False, False, 2, 2),
    ("einsum, spaces", lambda: torch.einsum("b t h, v h -> b t v", X, W), True, False, 2, 2),
    ("einsum, list", lambda: torch.einsum("bth,vh->btv", [X, W]), True, False, 2, 2),
    ("einsum, weight first", lambda: torch.einsum("vh,bth->btv", W, X), True, False, 2, 2),
    ("einsum, vocabulary in the middle", lambda: torch.einsum("bth,vh->bvt", X, W), True, False, 1, 2),
    ("einsum, vocabulary first", lambda: torch.einsum("bth,vh->vbt", X, W), True, False, 0, 2),
    ("einsum, hidden in the middle", lambda: torch.einsum("bht,vh->btv", X.mT, W), True, False, 2, 1),
    ("bmm, expanded weight", lambda: torch.bmm(X, WT.expand(len(X), -1, -1)), False, False, 2, 2),
    ("bmm, repeated weight", lambda: X.bmm(WT.unsqueeze(0).repeat(len(X), 1, 1)), False, False, 2, 2),
    ("conv1d", lambda: F.conv1d(X.mT, W.unsqueeze(-1), B), True, True, 1, 1),
    ("nn.Conv1d", lambda: CONV(X.mT), True, True, 1, 1),
]


@pytest.mark.parametrize(
    ("fn", "weight_is_vh", "bias", "vocab_dim", "hidden_dim"), [p[1:] for p in PRODUCTS], ids=[p[0] for p in PRODUCTS]
)
def test_read(fn, weight_is_vh: bool, bias: bool, vocab_dim: int, hidden_dim: int) -> None:
    (product,) = products(graph_of(fn))
    assert product.weight_is_vh == weight_is_vh
    assert (product.bias is not None) == bias
    assert (product.vocab_dim, product.hidden_dim) == (vocab_dim, hidden_dim)
    assert product.vocab == VOCAB
    assert product.x.meta["example_value"].shape[hidden_dim] == HIDDEN
    assert product.weight.meta["example_value"].shape[:2] == ((VOCAB, HIDDEN) if weight_is_vh else (HIDDEN, VOCAB))


NOT_PRODUCTS = [
    ("einsum that swaps rows", lambda: torch.einsum("bth,vh->tbv", X, W)),
    ("einsum that sums rows", lambda: torch.einsum("bth,vh->bv", X, W)),
    ("einsum that keeps hidden", lambda: torch.einsum("bth,vh->bthv", X, W)),
    ("einsum without an arrow", lambda: torch.einsum("th,vh", X1, W)),
    ("einsum with dots", lambda: torch.einsum("...h,vh->...v", X, W)),
    ("einsum of three", lambda: torch.einsum("th,vh,v->tv", X1, W, B)),
    ("einsum of a diagonal", lambda: torch.einsum("bbh,vh->bv", X[:, :2], W)),
    ("einsum of a batch", lambda: torch.einsum("bth,bvh->btv", X, W.expand(2, -1, -1))),
    ("bmm of a weight for every batch", lambda: torch.bmm(X, WT.expand(len(X), -1, -1).sin())),
    ("bmm of a weight that is repeated along its rows", lambda: torch.bmm(X, WT[:1].repeat(len(X), HIDDEN, 1))),
    ("conv1d over a window", lambda: F.conv1d(X.mT, WINDOW)),
    ("conv1d that leaves rows out", lambda: F.conv1d(X.mT, W.unsqueeze(-1), stride=2)),
    ("conv1d that pads rows", lambda: F.conv1d(X.mT, W.unsqueeze(-1), padding=1)),
    ("conv1d of groups", lambda: F.conv1d(X.mT.repeat(1, 2, 1), WINDOW[:36, :, :1], groups=2)),
    ("batched weight", lambda: X @ WT.expand(2, -1, -1)),
    ("vector", lambda: X1 @ W[0]),
    ("scaled addmm", lambda: torch.addmm(B, X1, WT, beta=0.5)),
    ("addmm of a matrix", lambda: torch.addmm(B.expand(10, -1), X1, WT)),
]


@pytest.mark.parametrize("fn", [p[1] for p in NOT_PRODUCTS], ids=[p[0] for p in NOT_PRODUCTS])
def test_not_read(fn) -> None:
    assert products(graph_of(fn)) == []


def heads(fn, *args) -> list[str]:
    """The line of each anchor's product, without its file."""
    return [calls.user_line(a.product.node).split(": ", 1)[1] for a in find_anchors(graph_of(fn, *args))]


def test_attention_router_and_mlp_are_not_behind_the_loss() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
            self.up, self.down, self.head = (
                nn.Linear(HIDDEN, 12),
                nn.Linear(12, HIDDEN),
                nn.Linear(HIDDEN, VOCAB, bias=False),
            )
            self.norm = nn.LayerNorm(HIDDEN)

        def forward(self, x, y):
            x = x + F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
            x = x + self.down(F.gelu(self.up(self.norm(x))))
            return F.cross_entropy(self.head(self.norm(x)).mT, y)

    assert heads(Block(), X, torch.zeros(ROWS, dtype=torch.int64)) == [
        "return F.cross_entropy(self.head(self.norm(x)).mT, y)"
    ]


def test_softmaxes_in_the_body_are_soft_and_stay_out_of_the_report() -> None:
    def fn(x, w, y):
        router = F.linear(x, w[:4]).softmax(-1)
        scores = torch.bmm(x, x.mT).softmax(-1)
        x = torch.bmm(scores, x) * router.sum(-1, keepdim=True)
        z = F.linear(x, w)
        return F.cross_entropy(z.mT, y)

    args = X, W, torch.zeros(ROWS, dtype=torch.int64)
    anchors = find_anchors(graph_of(fn, *args))
    assert [a.hard for a in anchors] == [False, True]
    capture = Capture(min_vocab=5)
    capture.compile(fn)(*args)
    assert [h.outcome for h in capture.report.heads] == ["fused"]


def test_a_product_with_two_losses_is_found_once_and_hard() -> None:
    def fn(x, w, y):
        z = F.linear(x, w)
        return z.logsumexp(-1).mean() + F.cross_entropy(z, y)

    (anchor,) = find_anchors(graph_of(fn, X1, W, torch.zeros(10, dtype=torch.int64)))
    assert anchor.hard


def test_heads_come_in_the_order_of_the_graph() -> None:
    def fn(x, w, v, y):
        first = F.linear(x, w)
        second = F.linear(x, v)
        return F.cross_entropy(second, y) + F.cross_entropy(first, y)

    assert heads(fn, X1, W, W.flip(0), torch.zeros(10, dtype=torch.int64)) == [
        "first = F.linear(x, w)",
        "second = F.linear(x, v)",
    ]


def test_no_loss_no_anchor() -> None:
    assert heads(lambda x, w: F.linear(x, w).sum(), X1, W) == []


def test_the_walk_back_ends() -> None:
    def fn(x, w, y):
        z = F.linear(x, w)
        for _ in range(2 * MAX_WALK):
            z = z + 1
        return F.cross_entropy(z, y)

    assert heads(fn, X1, W, torch.zeros(10, dtype=torch.int64)) == []


def test_a_loss_on_given_logits_has_them_for_a_head() -> None:
    args = torch.randn(10, VOCAB), torch.zeros(10, dtype=torch.int64)
    (anchor,) = find_anchors(graph_of(lambda z, y: F.cross_entropy(z.float(), y), *args))
    assert anchor.product.given and anchor.hard
    assert anchor.product.node.op == "placeholder"


def test_what_is_behind_a_product_or_a_norm_is_not_given_logits() -> None:
    x, w, y = torch.randn(6, 3), torch.randn(VOCAB, 3), torch.zeros(6, dtype=torch.int64)
    dropped = graph_of(lambda x, w, y: F.cross_entropy(F.dropout(F.linear(x, w), 0.5, True), y), x, w, y)
    assert [a.product.given for a in find_anchors(dropped)] == [False]
    assert heads(lambda x, w, y: F.cross_entropy(F.layer_norm(x, [3]), y), x, w, y) == []


WIDE = torch.randn(5 * HIDDEN, HIDDEN)
BY_HAND = {
    "softmax": (lambda: (lambda e: e / e.sum(-1, keepdim=True))(F.linear(X, WIDE).exp()), 1),
    "logsumexp": (lambda: torch.exp(F.linear(X, WIDE) * 2).sum(dim=2).log(), 1),
    "sigmoids": (lambda: F.binary_cross_entropy_with_logits(F.linear(X1, WIDE), torch.ones(10, len(WIDE))), 1),
    "margins": (lambda: F.multi_margin_loss(F.linear(X1, WIDE), torch.zeros(10, dtype=torch.int64)), 1),
    "squares": (lambda: F.mse_loss(torch.ones(10, len(WIDE)), F.linear(X1, WIDE)), 1),
    "angles": (lambda: F.cosine_similarity(x1=F.linear(X1, WIDE), x2=torch.ones(10, len(WIDE)), dim=-1), 1),
    "squares, as narrow as an MLP": (lambda: F.mse_loss(F.linear(X1, W[:4]), torch.ones(10, 4)), 0),
    "a sum over rows": (lambda: F.linear(X, WIDE).exp().sum(1), 0),
    "a sum of everything": (lambda: F.linear(X, WIDE).exp().sum(), 0),
    "no sum": (lambda: F.linear(X, WIDE).exp() * 2, 0),
    "as narrow as an MLP": (lambda: F.linear(X, WIDE[: 4 * HIDDEN]).exp().sum(-1), 0),
    "narrow, but a logsumexp": (lambda: F.linear(X, WIDE[: 4 * HIDDEN]).exp().sum(-1).log(), 1),
    "attention": (lambda: (X @ X.mT).exp().sum(-1), 0),
    "a sigmoid of one logit": (lambda: F.binary_cross_entropy_with_logits(F.linear(X, W[:1]), torch.ones(2, 5, 1)), 0),
}


@pytest.mark.parametrize(("fn", "count"), BY_HAND.values(), ids=BY_HAND)
def test_what_is_normalised_by_hand(fn, count: int) -> None:
    assert len(find_anchors(graph_of(fn))) == count
