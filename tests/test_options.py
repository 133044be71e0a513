"""Options: ours are validated, Inductor's reach Inductor."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

from fuse_losses import FusionError, OptionError, Options
from fuse_losses.options import split_options
from tests.capture import Capture


def loss(x, w, y):
    return F.cross_entropy(x @ w.T, y)


def args():
    return torch.randn(4, 6, requires_grad=True), torch.randn(37, 6), torch.randint(0, 37, (4,))


def test_split() -> None:
    ours, rest = split_options({"fuse_losses.min_vocab": 7, "max_autotune": False, "fuse_losses.strict": True})
    assert ours == Options(min_vocab=7, strict=True)
    assert rest == {"max_autotune": False}
    assert split_options(None) == (Options(), {})


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().min_vocab = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "right"), [("min_vocb", "min_vocab"), ("chunk_row", "chunk_rows"), ("stric", "strict")]
)
def test_a_misspelt_option_names_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(OptionError, match=f"'fuse_losses.{wrong}'; did you mean fuse_losses.{right}\\?"):
        split_options({f"fuse_losses.{wrong}": 1})


def test_an_unknown_option_lists_what_there_is() -> None:
    with pytest.raises(OptionError, match="the options are: min_vocab, chunk_rows"):
        split_options({"fuse_losses.zzz": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_vocab", 0),
        ("min_vocab", -5),
        ("min_vocab", "1"),
        ("min_vocab", 1.0),
        ("min_vocab", True),
        ("min_vocab", None),
        ("chunk_rows", 0),
        ("chunk_rows", "auto"),
        ("accumulate", "bfloat16"),
        ("logits", "lose"),
        ("strict", 1),
        ("strict", "yes"),
        ("report", 3),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^fuse_losses.{name} must be .*{value!r}$"):
        split_options({f"fuse_losses.{name}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_vocab", 1), ("chunk_rows", None), ("chunk_rows", 3), ("accumulate", "native"), ("report", "r.jsonl")],
)
def test_a_right_value_is_kept(name: str, value: object) -> None:
    assert getattr(split_options({f"fuse_losses.{name}": value})[0], name) == value


def test_a_wrong_option_reaches_the_user_of_compile() -> None:
    compiled = torch.compile(loss, backend="fuse_losses", options={"fuse_losses.min_vocb": 1})
    with pytest.raises(BackendCompilerFailed, match=r"did you mean fuse_losses\.min_vocab"):
        compiled(*args())


def test_a_wrong_option_of_inductor_gives_its_own_error() -> None:
    compiled = torch.compile(loss, backend="fuse_losses", options={"max_autotun": True})
    with pytest.raises(BackendCompilerFailed, match="Unexpected optimization option max_autotun"):
        compiled(*args())


class Recorder(CustomGraphPass):
    """A pass of the user's own: it sees Inductor's configuration while a graph is compiled."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append((inductor.epilogue_fusion, inductor.triton.cudagraphs))

    def uuid(self) -> None:
        return None


def test_options_of_inductor_reach_it() -> None:
    recorder = Recorder()
    options = {
        "fuse_losses.min_vocab": 1,
        "epilogue_fusion": not inductor.epilogue_fusion,
        "joint_custom_post_pass": recorder,
    }
    torch.compile(loss, backend="fuse_losses", options=options)(*args()).backward()
    assert recorder.seen == [(options["epilogue_fusion"], False)]
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1}


def test_a_mode_of_inductor_reaches_it() -> None:
    recorder = Recorder()
    with inductor.patch(joint_custom_post_pass=recorder):
        torch.compile(loss, backend="fuse_losses", mode="reduce-overhead")(*args()).backward()
    assert recorder.seen == [(inductor.epilogue_fusion, True)]


def test_chunk_rows_and_accumulate_are_arguments_of_the_operator() -> None:
    capture = Capture(chunk_rows=3, accumulate="native")
    capture.compile(loss)(*args())
    (call,) = [n for n in capture.after[0].graph.nodes if "linear_nll_sum" in str(n.target)]
    assert call.args[-2:] == (3, "native")


def test_strict_raises_for_a_head_that_is_not_fused() -> None:
    def returns_log_probs(x, w, y):
        log_probs = (x @ w.T).log_softmax(-1)
        return F.nll_loss(log_probs, y), log_probs

    options = {"fuse_losses.strict": True, "fuse_losses.min_vocab": 1}
    with pytest.raises(BackendCompilerFailed, match="log_probs_returned") as caught:
        torch.compile(returns_log_probs, backend="fuse_losses", options=options)(*args())
    assert isinstance(caught.value.inner_exception, FusionError)


def test_strict_lets_small_heads_and_fused_heads_pass() -> None:
    torch.compile(loss, backend="fuse_losses", options={"fuse_losses.strict": True})(*args())
    torch._dynamo.reset()
    options = {"fuse_losses.strict": True, "fuse_losses.min_vocab": 1}
    torch.compile(loss, backend="fuse_losses", options=options)(*args())


def test_options_are_not_shared_between_functions() -> None:
    """One process, one function, two sets of options: each compile reads its own."""
    torch.compile(loss, backend="fuse_losses", options={"fuse_losses.min_vocab": 1})(*args())
    torch.compile(lambda *a: loss(*a), backend="fuse_losses")(*args())
    assert torch._dynamo.utils.counters["fuse_losses"] == {"fused": 1, "declined": 1}
