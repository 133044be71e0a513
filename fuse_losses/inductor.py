"""Handing a graph to Inductor, with its own validation of modes and options."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass

Compiled = Callable[..., Any]
_PASS = "joint_custom_post_pass"


class KeptForBackward(CustomGraphPass):
    """Changes no graph: its uuid keeps Inductor's caches apart from graphs that would be compiled otherwise.

    The caches know an operator by its name, not by what this version of it returns; and they do not tell donated
    buffers from kept ones, while a backward compiled for donated buffers writes into what a second backward reads.

    A graph with a Python float among its inputs is kept out of the caches. Where such a float is no factor or term
    (`ratio.clamp(1 - eps, 1 + eps)`), Inductor compiles for its present value, with a guard that the caches forget.
    """

    def __init__(self, inner: CustomGraphPass | None = None, cached: bool = True) -> None:
        self.inner, self.cached = inner, cached

    def __call__(self, graph: fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self) -> Any:
        theirs = "" if self.inner is None else self.inner.uuid()
        if theirs is None or not self.cached:
            return None  # a pass without an identity keeps its graph out of the caches
        return ("fuse_losses", "kept_for_backward", _fingerprint(), theirs)


@functools.cache
def _fingerprint() -> str:
    """A digest of the operators' sources."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for path in sorted([*root.glob("ops/*.py"), *root.glob("kernels/**/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any], fused: bool
) -> Compiled:
    """What `torch.compile(backend="inductor", mode=mode, options=options)` makes of the graph.

    A graph with a fused head keeps what it saved: its gradients are made in the forward, and users call backward
    twice on them (retain_graph), which Inductor refuses while saved tensors are donated to the backward.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    passed = dict(options)
    theirs = passed.get(_PASS)
    keep = fused and (theirs is None or isinstance(theirs, CustomGraphPass))
    if keep:
        floats = any(isinstance(n.meta.get("example_value"), torch.SymFloat) for n in gm.graph.nodes)
        passed[_PASS] = KeptForBackward(theirs, cached=not floats)
    inductor = torch._TorchCompileInductorWrapper(mode, passed or None, None)
    if not keep:
        return cast(Compiled, inductor(gm, list(example_inputs)))

    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        _donate_nothing()
        return compile_fx_inner(*args, **kwargs)

    return cast(
        Compiled, compile_fx(gm, list(example_inputs), inner_compile=inner_compile, config_patches=inductor.config)
    )


def _donate_nothing() -> None:
    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    if metadata is not None and getattr(metadata, "bw_donated_idxs", None):
        metadata.bw_donated_idxs = []
