"""Why a head was left to Inductor: typed codes, each with what to change."""

from __future__ import annotations

from dataclasses import dataclass

# code -> (what it means, what the user can do about it). The documentation page is generated from this table.
CODES: dict[str, tuple[str, str]] = {
    "small_vocab": (
        "the vocabulary is smaller than fuse_losses.min_vocab, so the logits are cheap",
        "nothing, or lower fuse_losses.min_vocab",
    ),
    "logits_used": (
        "another operation needs the logits or log-probabilities whole",
        "compute that term from the loss's own values, or compile it apart",
    ),
    "log_probs_returned": (
        "the log-probabilities of the whole vocabulary leave the graph",
        "return only the log-probabilities that are read",
    ),
    "loss_elsewhere": (
        "the graph ends in the logits: the loss is in another graph, or outside of what is compiled",
        "compile model and loss together; look for a graph break between them (TORCH_LOGS=graph_breaks): a logger or "
        "print, .item(), a branch on data, a boolean mask, a hook; in transformers, a class whose loss_type is unknown "
        "(set model.loss_type), or a Trainer that computes the loss itself",
    ),
    "no_gain": (
        "the logits exist before this graph begins, and running the loss chunk by chunk would save nothing",
        "compile head and loss together",
    ),
    "logits_sliced": (
        "the loss is compiled apart from the head and takes only some rows of the logits, or takes them in another "
        "order, and they would be copied",
        "compile head and loss together, or pad, shift and transpose the labels instead of the logits",
    ),
    "wrong_axis": (
        "an operation meant for the vocabulary runs over another axis",
        "check the dim argument; if it is meant, nothing can be fused here",
    ),
    "rows_mix": (
        "an operation combines or reorders rows while the vocabulary is alive, or may do so",
        "select or combine rows before the head, or after the loss",
    ),
    "unsupported_loss": (
        "nothing is computed from these logits but other logits",
        "compile the loss together with the head",
    ),
    "unsupported_dtype": (
        "hidden states, weight and logits have dtypes that the fused operators do not take",
        "use one of float16, bfloat16, float32 or float64 for hidden states and weight",
    ),
    "opaque": (
        "an operation behind the head cannot be read (autograd.Function, a higher-order operator, ...)",
        "write the loss in plain PyTorch operations",
    ),
    "functorch": (
        "the graph maps over the loss (vmap), or differentiates inside of itself what is differentiated again outside",
        "detach what torch.func.grad is called with, or call .backward() outside of the compiled function",
    ),
    "mutated": (
        "a tensor that the loss reads is written to between the head and the loss",
        "write to a copy, or before the head",
    ),
    "sharded": (
        "the head's weight or input is a DTensor or another tensor subclass",
        "gather it to a plain tensor; sharded heads are planned",
    ),
    "failed": (
        "fuse_losses itself failed here; the graph went to Inductor as it came",
        "please report it with the text of fuse_losses.explain()",
    ),
}


@dataclass(frozen=True)
class Decline:
    """A head that was found and left alone: `code` is a key of CODES, `where` the user's source line."""

    code: str
    reason: str
    where: str = ""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise KeyError(f"no such decline code: {self.code}")

    @property
    def remedy(self) -> str:
        return CODES[self.code][1]

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"[{self.code}] {self.reason}{place}; what to do: {self.remedy}"


class Declined(Exception):
    """Carries a Decline out of the stage that found it; only the pipeline catches it."""

    def __init__(self, code: str, reason: str, where: str = "") -> None:
        super().__init__(f"[{code}] {reason}")
        self.decline = Decline(code, reason, where)


class FusionError(RuntimeError):
    """Raised instead of a decline under options={"fuse_losses.strict": True}."""
