"""V-wide products: the nodes that make logits, whatever they are called, and the losses they are found from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch._C._functorch import get_unwrapped, is_gradtrackingtensor

from fuse_losses.graph import calls
from fuse_losses.head.sizes import hint, same

HEAD_RATIO = 5
MAX_WALK = 64  # nodes between a loss and its head; real tails have about ten


@dataclass(frozen=True)
class Product:
    """logits = x . weight (+ bias): `node` has the vocabulary at `vocab_dim`, its other dims are x's rows in order.

    Without a weight, the logits are given to this graph: x is the node itself.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None = None
    weight_is_vh: bool = True  # [V, H] (of a convolution [V, H, 1]), else [H, V]
    vocab_dim: int = -1  # non-negative once built
    hidden_dim: int = -1  # of x, non-negative once built

    @property
    def given(self) -> bool:
        return self.weight is None

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """The nodes that the logits are made of."""
        return tuple(n for n in (self.x, self.weight, self.bias) if n is not None)

    @property
    def vocab(self) -> int | torch.SymInt:
        return value(self.node).shape[self.vocab_dim]


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that Dynamo recorded for the node."""
    return node.meta["example_value"]


def is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def outside(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the levels of torch.func.grad have wrapped, itself if none has."""
    while is_gradtrackingtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def storage(node: fx.Node) -> Any:
    """What nodes that share memory have in common; a value without memory of its own (of a vmap) shares none."""
    try:
        return outside(value(node)).untyped_storage()._cdata
    except NotImplementedError:
        return id(node)


def as_product(node: fx.Node) -> Product | None:
    """Read the node as a product with one two-dimensional weight, or None."""
    if not is_tensor(node):
        return None
    if calls.is_call(node, calls.LINEAR):
        x, weight, bias = calls.arguments(node, "input", "weight", "bias")
        return _product(node, x, weight, bias, weight_is_vh=True)
    if calls.is_call(node, calls.MATMUL):
        x, weight = (
            calls.arguments(node, "input", "other")
            if "other" in node.kwargs
            else calls.arguments(node, "input", "mat2")
        )
        return _product(node, x, weight, None, weight_is_vh=False)
    if calls.is_call(node, calls.ADDMM):
        bias, x, weight = calls.arguments(node, "input", "mat1", "mat2")
        if set(node.kwargs) & {"alpha", "beta", "out"} or len(node.args) > 3:
            return None
        if not is_tensor(bias) or value(bias).dim() != 1:
            return None
        return _product(node, x, weight, bias, weight_is_vh=False)
    if calls.is_call(node, calls.EINSUM):
        return _einsum(node)
    if calls.is_call(node, calls.BMM):
        x, weight = calls.arguments(node, "input", "mat2")
        return _product(node, x, _of_every_batch(weight), None, weight_is_vh=False)
    return _pointwise_convolution(node) if calls.is_call(node, calls.CONV1D) else None


def _of_every_batch(weight: object) -> object:
    """The matrix that `weight` [B, H, V] repeats for every batch, itself if it is none."""
    node = weight
    while isinstance(node, fx.Node) and is_tensor(node) and value(node).dim() == 3:
        if not calls.is_call(node, calls.EXPANSIONS):
            return weight
        before = node.args[0] if node.args else None
        if not is_tensor(before) or not same(value(cast(fx.Node, before)).shape[-2:], value(node).shape[-2:]):
            return weight
        node = before
    return node


def _pointwise_convolution(node: fx.Node) -> Product | None:
    """conv1d of x [B, H, T] with a weight [V, H, 1] is a product with its matrix."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, stride, padding, _, groups = calls.arguments(node, *names)
    plain = stride in (None, 1, (1,), [1]) and padding in (None, 0, (0,), [0], "valid", "same") and groups in (None, 1)
    if not (plain and is_tensor(x) and is_tensor(weight)) or value(x).dim() != 3 or not same(value(weight).shape[2], 1):
        return None
    if bias is not None and not is_tensor(bias):
        return None
    return Product(node, x, weight, bias, vocab_dim=1, hidden_dim=1)


def _product(node: fx.Node, x: object, weight: object, bias: object, weight_is_vh: bool) -> Product | None:
    if not (is_tensor(x) and is_tensor(weight)):
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if value(weight).dim() != 2 or value(x).dim() < 1 or "out" in node.kwargs:
        return None
    if bias is not None and not is_tensor(bias):
        return None
    last = value(node).dim() - 1
    return Product(
        node,
        x,
        weight,
        bias if isinstance(bias, fx.Node) else None,
        weight_is_vh,
        vocab_dim=last,
        hidden_dim=value(x).dim() - 1,
    )


def _einsum(node: fx.Node) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    if not all(is_tensor(o) for o in operands):
        return None
    left, out = equation.replace(" ", "").split("->")
    letters = left.split(",")
    # the weight is the two-dimensional operand that brings the letter of the vocabulary; of two such, the last letter
    found: list[Product] = []
    for at, other in ((1, 0), (0, 1)):
        weight, x = letters[at], letters[other]
        if len(weight) != 2 or len(set(weight)) != 2 or len(set(x)) != len(x):
            continue
        vocab = [c for c in weight if c in out and c not in x]
        hidden = [c for c in weight if c in x and c not in out]
        if len(vocab) != 1 or len(hidden) != 1:
            continue
        v, h = vocab[0], hidden[0]
        if out.replace(v, "", 1) != x.replace(h, "", 1):
            continue
        x_node, weight_node = operands[other], operands[at]
        assert isinstance(x_node, fx.Node) and isinstance(weight_node, fx.Node)
        found.append(
            Product(
                node,
                x_node,
                weight_node,
                weight_is_vh=weight[0] == v,
                vocab_dim=out.index(v),
                hidden_dim=x.index(h),
            )
        )
    return max(found, key=lambda p: p.vocab_dim, default=None)


@dataclass(frozen=True)
class Anchor:
    """A product and the loss behind which it was found.

    hard: that loss is a cross entropy by name; quiet: it may be no loss of classes at all, and nobody wants to hear
    why it is left alone.
    """

    product: Product
    loss: fx.Node
    hard: bool
    quiet: bool = False


def find_anchors(graph: fx.Graph) -> list[Anchor]:
    """Every product that a loss leads back to, in the order of the graph, each once."""
    found: dict[fx.Node, Anchor] = {}
    teachers: list[Anchor] = []
    for loss in graph.nodes:
        hard, quiet = calls.is_call(loss, calls.HARD_LOSSES), False
        if calls.is_call(loss, calls.DIVERGENCES | calls.DISTANCES | calls.SUM):
            products = _distributions_given_to(loss)
            quiet = not calls.is_call(loss, calls.DIVERGENCES)
        elif hard or calls.is_call(loss, calls.NORMALISERS):
            products = _of_its_classes(loss, list(_walk_back(loss))) or list(_given_to(loss))
        else:
            classes = _classes_by_hand(loss)
            products = [] if classes is None else [p for p in _walk_back(loss) if same(p.vocab, classes)]
            wide = [p for p in products if _is_as_wide_as_a_head(p)]
            quiet = not wide and _is_logged(loss)
            products = products if quiet else wide
        for product in products:
            if product.given and not calls.is_call(loss, calls.LOSSES_OF_LOGITS):
                teachers.append(Anchor(product, loss, hard))
                continue
            known = found.get(product.node)
            if known is None or (hard and not known.hard) or (known.quiet and not quiet):
                found[product.node] = Anchor(product, loss, hard, quiet)
    if found:  # a softmax of an input is a teacher's where there is a student, else anything
        found |= {a.product.node: a for a in teachers if a.product.node not in found}
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(found.values(), key=lambda a: order[a.product.node])


def _classes_by_hand(node: fx.Node) -> Any:
    """The number of classes of an `exp` that is summed over them, or of a loss that needs no such sum; else None."""
    if calls.is_call(node, calls.WIDE_LOSSES):
        compared = [a for a in node.all_input_nodes if is_tensor(a)]
        return value(compared[0]).shape[-1] if compared and value(compared[0]).dim() else None
    if not calls.is_call(node, calls.EXP) or not is_tensor(node):
        return None
    for user in node.users:
        if calls.is_call(user, calls.SUM):
            source, dim = calls.arguments(user, "input", "dim")
            dims = dim if isinstance(dim, (tuple, list)) else [dim]
            if source is node and len(dims) == 1 and isinstance(dims[0], int):
                return value(node).shape[dims[0]]
    return None


def _is_logged(exp: fx.Node) -> bool:
    """Whether the logarithm of a sum of the exponentials is taken."""
    return calls.is_call(exp, calls.EXP) and any(
        calls.is_call(total, calls.SUM) and any(calls.is_call(u, calls.LOG) for u in total.users) for total in exp.users
    )


def _is_as_wide_as_a_head(product: Product) -> bool:
    """A projection of the body is four times as wide at most."""
    hidden = hint(value(product.x).shape[product.hidden_dim]) or 0
    return (hint(product.vocab) or 0) >= HEAD_RATIO * hidden


def _of_its_classes(loss: fx.Node, products: list[Product]) -> list[Product]:
    """Without what only scales the logits (a norm of the weight B @ A), if others have the classes of the loss."""
    source, dim = calls.arguments(loss, "input", "dim")
    if not is_tensor(source) or not value(source).dim():
        return products
    if calls.is_call(loss, calls.HARD_LOSSES):
        dim = min(1, value(source).dim() - 1)
    if not isinstance(dim, int):
        return products
    classes = value(source).shape[dim]
    fitting = [p for p in products if same(p.vocab, classes)]
    return fitting or products


def _given_to(loss: fx.Node) -> Iterator[Product]:
    """Logits that are an input of the graph, where the loss is compiled on its own."""
    node, steps = loss, 0
    while node.op in ("call_function", "call_method") and steps < MAX_WALK:
        if as_product(node) is not None or calls.is_call(node, calls.BODY | calls.OTHER_PRODUCTS | calls.MATMUL):
            return  # the end of a model, not of a loss
        before = node.args[0] if node.args else node.kwargs.get("input")
        if not is_tensor(before):
            return
        assert isinstance(before, fx.Node)
        node, steps = before, steps + 1
    if node.op == "placeholder" and value(node).is_floating_point() and value(node).dim() > 0:
        last = value(node).dim() - 1
        read = value(loss.all_input_nodes[0]).shape
        if any(same(size, value(node).shape[last]) for size in read):  # else it is no [*, V] at all
            yield Product(node, node, None, vocab_dim=last, hidden_dim=last)


def _distributions_given_to(loss: fx.Node) -> list[Product]:
    """Inputs of the graph that a divergence compares as they are, two at least, with elementwise steps in between.

    A sum is one only of exponentials: it is the end of much else.
    """
    found: list[fx.Node] = []
    exponential = not calls.is_call(loss, calls.SUM)
    stack, seen = list(loss.all_input_nodes), set(loss.all_input_nodes)
    while stack and len(seen) < MAX_WALK:
        node = stack.pop()
        if node.op == "placeholder":
            if is_tensor(node) and value(node).is_floating_point() and value(node).dim() > 1:
                found.append(node)
            continue
        if is_tensor(node) and not calls.is_call(node, calls.ELEMENTWISE | calls.NORMALISERS):
            return []
        exponential |= calls.is_call(node, calls.EXP)
        for parent in node.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    if not exponential:
        return []
    whole = [n for n in found if same(tuple(value(n).shape), tuple(value(found[0]).shape))]
    last = value(found[0]).dim() - 1 if found else 0
    return [Product(n, n, None, vocab_dim=last, hidden_dim=last) for n in whole] if len(whole) > 1 else []


def _walk_back(loss: fx.Node) -> Iterator[Product]:
    stack, seen = list(loss.all_input_nodes), set(loss.all_input_nodes)
    while stack and len(seen) < MAX_WALK:
        node = stack.pop()
        held = node.meta.get("example_value")  # a tuple of a split, an unbind, a max
        if node.op not in ("call_function", "call_method") or not isinstance(held, (torch.Tensor, tuple, list)):
            continue
        product = as_product(node)
        if product is not None:
            yield product
            continue
        if calls.is_call(node, calls.BODY) or calls.is_call(node, calls.OTHER_PRODUCTS | calls.MATMUL):
            continue
        for parent in node.all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)


def returned_logits(graph: fx.Graph) -> Iterator[Product]:
    """Products that look like a head, are trained, and are returned, but for a cast or a scale, without a loss."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node in output.all_input_nodes:
        product = as_product(node)
        while product is None and is_tensor(node) and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
            product = as_product(node)
        if product is None or product.weight is None or not value(product.node).requires_grad:
            continue
        if _is_as_wide_as_a_head(product):
            yield product
