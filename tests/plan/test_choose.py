"""The plan as a table: plain arithmetic, no kernel and no tensor."""

from __future__ import annotations

import pytest

from fuse_losses.head.algebra import Functional, Head, LogitMap, Logits, LogProb, LogSumExp, NllLoss, Selected
from fuse_losses.options import Options
from fuse_losses.plan.choose import Context, Plan, choose
from fuse_losses.report.decline import Decline

Y, OTHER = "y", "other labels"
MEAN, SUM = NllLoss(Logits(), Y, -100, mean=True), NllLoss(Logits(), Y, -100, mean=False)
CPU, CUDA = Context("cpu"), Context("cuda")


def head(*functionals: Functional, vocab=128_256, rows: int | None = 8192, dtype="bfloat16", returned=False) -> Head:
    return Head(functionals, vocab=vocab, hidden=(4096,), rows=rows, dtype=dtype, returned=returned)


def plan(*functionals: Functional, context: Context = CUDA, options: Options | None = None, **shape) -> Plan:
    chosen = choose(head(*functionals, **shape), context, options or Options())
    assert isinstance(chosen, Plan)
    return chosen


@pytest.mark.parametrize(
    ("functionals", "checkpointed", "gradients"),
    [
        ([MEAN], False, "forward"),
        ([SUM], False, "forward"),
        ([MEAN, SUM], False, "forward"),  # of one target: one set of row weights
        ([MEAN], True, "recompute"),
        ([MEAN, NllLoss(Logits(), OTHER, -100, mean=True)], False, "recompute"),
        ([MEAN, NllLoss(Logits(), Y, 0, mean=True)], False, "recompute"),
        ([MEAN, NllLoss(Logits(LogitMap(outer=0.5)), Y, -100, mean=True)], False, "recompute"),
        ([LogProb(Logits(), Y)], False, "recompute"),
        ([LogSumExp(Logits())], False, "recompute"),
        ([Selected(Logits(), Y)], False, "recompute"),
        ([MEAN, LogSumExp(Logits())], False, "recompute"),
        ([MEAN, LogProb(Logits(), Y)], False, "recompute"),
    ],
)
def test_gradients(functionals: list[Functional], checkpointed: bool, gradients: str) -> None:
    chosen = plan(*functionals, context=Context("cuda", checkpointed))
    assert chosen.gradients == gradients
    assert chosen.why


def test_every_reason_reads_differently() -> None:
    whys = {
        plan(MEAN).why,
        plan(MEAN, context=Context("cuda", checkpointed=True)).why,
        plan(LogProb(Logits(), Y)).why,
        plan(MEAN, LogSumExp(Logits())).why,
        plan(MEAN, NllLoss(Logits(), OTHER, -100, mean=True)).why,
    }
    assert len(whys) == 5


@pytest.mark.parametrize(
    ("vocab", "min_vocab", "fits"), [(3999, 4000, False), (4000, 4000, True), (1, 1, True), (50_257, 50_258, False)]
)
def test_small_vocabularies(vocab: int, min_vocab: int, fits: bool) -> None:
    chosen = choose(head(MEAN, vocab=vocab), CPU, Options(min_vocab=min_vocab))
    assert isinstance(chosen, Plan if fits else Decline)
    if isinstance(chosen, Decline):
        assert chosen.code == "small_vocab"
        assert str(vocab) in chosen.reason and str(min_vocab) in chosen.reason


def test_the_users_choice_is_kept() -> None:
    chosen = plan(MEAN, options=Options(chunk_rows=77, accumulate="native"))
    assert (chosen.chunk_rows, chosen.accumulate) == (77, "native")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab", [8000, 32_000, 128_256, 262_144])
def test_chunks(device: str, vocab: int) -> None:
    chosen = plan(MEAN, context=Context(device), vocab=vocab).chunk_rows
    assert chosen & (chosen - 1) == 0 and 1 <= chosen <= 8192
    assert chosen <= plan(MEAN, context=Context(device), vocab=vocab // 2).chunk_rows
    assert chosen >= plan(MEAN, context=Context(device), vocab=vocab, dtype="float32").chunk_rows


def test_a_chunk_on_a_cpu_is_smaller_than_on_a_gpu() -> None:
    assert plan(MEAN, context=CPU).chunk_rows < plan(MEAN, context=CUDA).chunk_rows


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # logits and log-probs of 8192 x 128256 in two bytes, less a chunk of 64 rows
        ({}, (2 * 8192 - 64) * 128_256 * 2),
        ({"dtype": "float32"}, (2 * 8192 - 64) * 128_256 * 4),
        ({"returned": True}, (8192 - 64) * 128_256 * 2),
        ({"rows": 64}, 64 * 128_256 * 2),
        ({"rows": 64, "returned": True}, 0),
        ({"rows": 3}, 3 * 128_256 * 2),
        ({"rows": 0}, 0),
        ({"rows": None}, None),
    ],
)
def test_bytes_saved(shape: dict, expected: int | None) -> None:
    assert plan(MEAN, options=Options(chunk_rows=64), **shape).bytes_saved == expected


# ---------------------------------------------------------------------------------------------------- the rows executor


def by_rows(context: Context = CUDA, options: Options | None = None, **shape) -> Plan:
    given = {"vocab": 128_256, "hidden": (4096,), "rows": 8192, "dtype": "bfloat16", "operations": 5, **shape}
    chosen = choose(Head((), **given), context, options or Options())
    assert isinstance(chosen, Plan)
    return chosen


def test_what_has_no_kernel_runs_by_rows_and_recomputes() -> None:
    chosen = by_rows()
    assert (chosen.executor, chosen.gradients) == ("rows", "recompute")
    assert "5 operations" in chosen.why
    assert plan(MEAN).executor == "kernels" and not plan(MEAN).compiled


@pytest.mark.parametrize(("context", "compiled"), [(CPU, False), (CUDA, True)])
def test_a_chunks_operations_are_compiled_on_a_gpu(context: Context, compiled: bool) -> None:
    assert by_rows(context).compiled == compiled


@pytest.mark.parametrize("context", [CPU, CUDA], ids=lambda c: c.device)
@pytest.mark.parametrize("vocab", [8000, 32_000, 128_256, 1_000_000])
def test_chunks_by_rows_are_smaller(context: Context, vocab: int) -> None:
    """Several values of a chunk are alive at once; a product of a few rows would be a waste."""
    chosen = by_rows(context, vocab=vocab).chunk_rows
    assert {"cpu": 16, "cuda": 128}[context.device] <= chosen <= plan(MEAN, context=context, vocab=vocab).chunk_rows
    assert chosen & (chosen - 1) == 0


def test_the_users_chunk_is_kept_by_rows() -> None:
    assert by_rows(options=Options(chunk_rows=7)).chunk_rows == 7


@pytest.mark.parametrize(
    ("shape", "products"), [({}, 2), ({"returned": True}, 1), ({"hidden": (4096, 2048)}, 4), ({"rows": None}, None)]
)
def test_bytes_saved_by_rows(shape: dict, products: int | None) -> None:
    """Of each product its logits and their gradient, less the chunk."""
    saved = by_rows(options=Options(chunk_rows=64), **shape).bytes_saved
    assert saved == (None if products is None else (products * 8192 - 64) * 128_256 * 2)


def test_given_logits_gain_nothing_by_rows() -> None:
    chosen = choose(Head((), 128_256, (4096,), 8192, "bfloat16", operations=3, given=True), CUDA, Options())
    assert isinstance(chosen, Decline) and chosen.code == "no_gain"
