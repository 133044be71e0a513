"""Which PyTorch callables a Dynamo node may name: functions by identity, methods by name."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

LINEAR = {F.linear}
MATMUL = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm", "__matmul__"}
ADDMM = {torch.addmm, "addmm"}
EINSUM = {torch.einsum, torch.functional.einsum}
BMM, CONV1D = {torch.bmm, "bmm"}, {torch.conv1d, F.conv1d}
OTHER_PRODUCTS = BMM | CONV1D | {torch.baddbmm, torch.inner, torch.tensordot, "inner"}
EXPANSIONS = {"expand", "unsqueeze", torch.unsqueeze, "repeat"}

# A loss is looked for behind every one of these.
HARD_LOSSES = {F.cross_entropy, F.nll_loss}
LOG_NORMALISERS = {
    F.log_softmax,
    torch.log_softmax,
    torch.logsumexp,
    torch.special.logsumexp,
    torch.special.log_softmax,
    "log_softmax",
    "logsumexp",
}
NORMALISERS = LOG_NORMALISERS | {F.softmax, torch.softmax, "softmax"}
# Losses between distributions that may be given as they are; what is only a distance may be no loss of classes at all.
DIVERGENCES = {F.kl_div, torch.kl_div}
DISTANCES = {torch.abs, "abs", F.l1_loss, torch.norm, torch.functional.norm, "norm", torch.linalg.vector_norm}
EXP, SUM, LOG = {torch.exp, "exp"}, {torch.sum, "sum"}, {torch.log, "log"}
# all but a softmax, which anything may take
LOSSES_OF_LOGITS = HARD_LOSSES | LOG_NORMALISERS | DIVERGENCES | DISTANCES | SUM
# What stands between distributions that are given and their divergence.
ELEMENTWISE = {
    *(getattr(torch, n) for n in ("exp", "log", "add", "sub", "mul", "div", "lerp", "where", "clamp", "clip", "neg")),
    *(getattr(torch, n) for n in ("logaddexp", "stack", "logsumexp", "reshape", "flatten", "squeeze", "unsqueeze")),
    *("exp", "log", "add", "sub", "mul", "div", "lerp", "where", "clamp", "neg", "float", "double", "to", "type_as"),
    *("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze", "detach", "clone", "masked_fill"),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.getitem),
}
# What a teacher goes through before it is compared with the logits, class by class.
_STEPS = ("abs", "sign", "sigmoid", "tanh", "sqrt", "rsqrt", "square", "pow", "log1p", "expm1")
PREPARATIONS = ELEMENTWISE | {*_STEPS, *(getattr(torch, n) for n in _STEPS), "bfloat16", "half", operator.pow}
TRANSPOSES = {torch.t, torch.transpose, torch.permute, "t", "transpose", "permute", getattr}  # getattr: x.T, x.mT
# What gives the same wherever it stands, in its own modes.
MOVABLE = PREPARATIONS | NORMALISERS | TRANSPOSES
# Losses that need no normaliser, and what a normaliser written by hand is made of: found behind a wide product only.
WIDE_LOSSES = {
    *(F.multi_margin_loss, F.multilabel_soft_margin_loss, F.soft_margin_loss, F.binary_cross_entropy_with_logits),
    *(F.binary_cross_entropy, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.cosine_similarity, torch.cosine_similarity),
}
# Walking back from a loss never crosses these: what is behind them is the body of the model.
BODY = {F.embedding, F.layer_norm, F.rms_norm, F.scaled_dot_product_attention, F.group_norm}

RANDOM = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.bernoulli,
    torch.multinomial,
    torch.poisson,
    torch.dropout,
    F.dropout,
    F.gumbel_softmax,
    "bernoulli",
    "multinomial",
}
CONSTANTS = {torch.tensor, torch.as_tensor, torch.asarray}

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
# An order of the graph without edges: whether gradients are recorded, and in which dtype.
MODES = {torch._C._set_grad_enabled, ENTER_AUTOCAST, EXIT_AUTOCAST}

_FILE = 'File "'
_TORCH = os.path.dirname(torch.__file__) + os.sep

INPLACE_OPERATORS = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.iand,
    operator.ior,
    operator.ixor,
    operator.setitem,
}


def is_call(node: fx.Node, targets: set[Any]) -> bool:
    """True if the node calls one of `targets` (a function by identity or a tensor method by name)."""
    return node.op in ("call_function", "call_method") and node.target in targets


def arguments(node: fx.Node, *names: str) -> list[Any]:
    """The node's arguments by position or keyword, in the order of `names`; None where not given."""
    bound = list(node.args) + [None] * (len(names) - len(node.args))
    return [node.kwargs.get(name, value) for name, value in zip(names, bound, strict=False)]


def writes_to(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors this node writes to in place (Dynamo does not functionalise)."""
    if node.op == "call_method":
        name = str(node.target)
        inplace = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        return [node.args[0]] if inplace and isinstance(node.args[0], fx.Node) else []
    if node.op != "call_function":
        return []
    written: list[Any] = []
    if node.target in INPLACE_OPERATORS or node.kwargs.get("inplace") is True or _inplace_name(node.target):
        written.append(node.args[0] if node.args else node.kwargs.get("input"))
    out = node.kwargs.get("out")
    written.extend(out if isinstance(out, (tuple, list)) else [out])
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        for index, arg in enumerate(schema.arguments):
            if arg.alias_info is not None and arg.alias_info.is_write:
                written.append(node.args[index] if index < len(node.args) else node.kwargs.get(arg.name))
    return [w for w in written if isinstance(w, fx.Node)]


def _inplace_name(target: Callable[..., Any] | str) -> bool:
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    from_torch = module.startswith("torch") or (
        inspect.isbuiltin(target) and not module
    )  # not operator.or_, and_, not_
    return from_torch and name.endswith("_") and not name.endswith("__")


def user_line(node: fx.Node) -> str:
    """`file.py:12: code` of the innermost frame outside of PyTorch that made this node; "" if Dynamo kept none."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    users = [i for i in frames if not lines[i].startswith(f'File "{_TORCH}')] or frames
    if not users:
        return ""
    path, number = lines[users[-1]].split(", ")[:2]
    code = lines[users[-1] + 1] if users[-1] + 1 < len(lines) else ""
    return f"{path.removeprefix(_FILE)[:-1]}:{number.removeprefix('line ')}: {code}"
