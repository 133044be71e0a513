"""The operators that graphs are rewritten to; importing this package registers them. Imports torch only.

    linear_nll_sum   sum_i row_weight_i * -log_prob_i of projected rows, gradients made in the forward
    linear_log_prob  (log_prob, lse) of projected rows, logits recomputed in the backward
    log_prob         (log_prob, lse) of given logits
    divergence       divergence of two distributions per row, logits recomputed in the backward
    divergence_sum   sum_i row_weight_i * divergence_i, gradients of projected sides made in the forward
    chunked_rows     any row-wise function of projected rows, which a graph in a table says

With raw products `u` (`x W^T + bias`, or given), logits are `z = outer * squash(inner * u)`,
`lse = logsumexp(z)` and `log_prob = z[target] - lse`. A row whose target is `ignore_index` has log_prob 0 and
no gradient through it; its lse is real. `logits`, where given next to x and weight, is `u` already computed:
it is read in the forward, and gradients still go to x, weight and bias. `chunk_rows` bounds the rows of
logits alive at a time. `accumulate` is "float32", or "native": the weight gradient adds up in its own dtype.

A divergence (a page of `losses`, by name, with its parameter) has a student p and a teacher q. A side with a weight is
x and its form is "logits"; a side without one is given [N, V] as "logits" (raw products), "log_probs" or "probs".

Each is a composite over an autograd function over inner operators (`indexed`, `paired`, `given`), so that AOTAutograd
sees which gradients are needed.
"""

from collections.abc import Callable
from typing import Any

import torch

from fuse_losses.ops import chunked_rows, divergence, divergence_sum, linear_log_prob, linear_nll_sum, log_prob

_composites: dict[Any, Callable[..., Any]] = {}
_library = torch.library.Library("fuse_losses", "FRAGMENT")
for _name, _module in (
    ("linear_nll_sum", linear_nll_sum),
    ("linear_log_prob", linear_log_prob),
    ("log_prob", log_prob),
    ("divergence", divergence),
    ("divergence_sum", divergence_sum),
    ("chunked_rows", chunked_rows),
):
    _library.define(_module.SCHEMA)
    _library.impl(_name, getattr(_module, _name), "CompositeImplicitAutograd")
    _composites[getattr(torch.ops.fuse_losses, _name).default] = getattr(_module, _name)


def composite(operator: Any) -> Any:
    """What computes one of the four operators, as Python; anything else as it is.

    Under a transform of torch.func an autograd function must be called from Python: inside of an operator, the
    transform has been dispatched already.
    """
    return _composites.get(operator, operator)
