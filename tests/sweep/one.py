"""One class: built, run eagerly, compiled, and compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from fuse_losses.graph import calls
from tests.capture import Capture
from tests.sweep import shrink

TOLERANCE = 1e-4  # of the largest element: the body of the model is the same code on both sides


def sweep_one(name: str) -> dict[str, Any]:
    """What became of the class: `outcome`, and what it rests on."""
    found: dict[str, Any] = {}
    for variant in shrink.VARIANTS:
        try:
            model = shrink.build(name, variant)
            given = shrink.batch(model)
        except Exception as error:
            found = found or {"outcome": "not_built", "reason": _text(error)}
            continue
        try:
            eager = step(model, model, given)
            break
        except Exception as error:
            found = found or {"outcome": "not_run", "reason": _text(error)}
    else:
        return found
    if eager is None:
        return {"outcome": "no_loss", "reason": "the model returns no loss for labels"}
    capture = Capture(min_vocab=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        ours = step(model, capture.compile(model), given)
    except Exception as error:
        return _crashed(model, given, error)
    # under min_vocab=1 routers and attentions are fused too: that tests more, but is no language-model head
    fused = [h.summary for h in capture.report.fused if h.details["vocab"] == shrink.VOCAB]
    declined = [h for h in capture.report.declined if f", {shrink.VOCAB}]" in h.summary]
    found = {
        "graphs": len(capture.before),
        "together": any(together(gm.graph) for gm in capture.before),
        "fused": fused,
        "others_fused": len(capture.report.fused) - len(fused),
        "declined": [f"[{h.decline.code}] {h.decline.reason}" for h in declined if h.decline is not None],
    }
    found["error"] = difference(ours, eager)
    found["outcome"] = _outcome(found)
    if found["outcome"] == "apart":
        found["reason"] = _breaks()
    return found


def _outcome(found: dict[str, Any]) -> str:
    if not found["error"] <= TOLERANCE:
        return "wrong"
    if not found["together"]:
        return "apart"
    if any("linear" in summary for summary in found["fused"]):
        return "fused"
    return "declined" if found["declined"] else "not_found"


def _crashed(model: nn.Module, given: dict[str, Tensor], error: Exception) -> dict[str, Any]:
    """A crash is ours unless torch.compile crashes without us too."""
    torch._dynamo.reset()
    try:
        step(model, torch.compile(model, backend="eager"), given)
    except Exception as without:
        return {"outcome": "not_compiled", "reason": _text(without)}
    return {"outcome": "crashed", "reason": _text(error)}


def step(model: nn.Module, run: Any, given: dict[str, Tensor]) -> list[Tensor | None] | None:
    """The loss and the gradient of every parameter, from one seed; None if there is no loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(4)
    loss = run(**{k: v.clone() for k, v in given.items()}, return_dict=True).loss
    if loss is None:
        return None
    (1.7 * loss.mean()).backward()
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    return [loss.detach().clone(), *gradients]


def difference(ours: list[Tensor | None], eager: list[Tensor | None]) -> float:
    """The largest difference relative to the largest element of its tensor; infinite if one is missing or no number."""
    worst = 0.0
    floor = 1e-3 * max(float(b.abs().max()) for b in eager[1:] if b is not None and b.numel())
    for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if (a is None) != (b is None):
            return math.inf
        if a is None or b is None or not b.numel():
            continue
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return math.inf
        if not b.isfinite().all():
            return math.inf
        scale = float(b.abs().max()) if i == 0 else max(float(b.abs().max()), floor)
        worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def together(graph: fx.Graph) -> bool:
    """Whether a cross entropy of the graph depends on a product with the vocabulary (asked without the pipeline)."""
    below: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_product(node) or any(a in below for a in node.all_input_nodes):
            below.add(node)
            if node.target in calls.HARD_LOSSES:
                return True
    return False


def _is_product(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or not _has_vocab(node):
        return False
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("example_value"), Tensor)]
    weights = [a for a in tensors if _has_vocab(a) and a.meta["example_value"].dim() == 2]
    return bool(weights) and any(not _has_vocab(a) for a in tensors)


def _has_vocab(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, Tensor) and any(isinstance(d, int) and d == shrink.VOCAB for d in value.shape)


def _breaks() -> str:
    """Why Dynamo ended its graphs; the lines behind the first of each reason are hints."""
    reasons = [str(r).strip().splitlines()[0] for r in torch._dynamo.utils.counters["graph_break"]]
    return "graph break: " + "; ".join(dict.fromkeys(reasons))[:200]


def _text(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"[:300]
