"""The benchmark runs from end to end at toy sizes, and measures what it says."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fuse_losses.bench import run as bench
from fuse_losses.bench.case import FORWARD, FULL, LOSS, BenchError, Phase
from fuse_losses.bench.index import TABLES
from fuse_losses.bench.measure import MIB, one_core, peak_memory, replayed, time_step, trace_memory
from fuse_losses.bench.peers import PEERS, version
from fuse_losses.bench.record import Record
from fuse_losses.bench.workloads import HEADS, WORKLOADS, linear_ce

MISSING = ("not installed", "needs CUDA")


def smoke(workload: str, *peers: str, **options):
    options = {"repeats": 2, "peers": peers or None, **options}
    return bench.run(workload, smoke=True, device="cpu", console=Console(file=io.StringIO()), **options)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name != "index"])
def test_every_peer_agrees_on_the_loss(workload: str) -> None:
    record = smoke(workload, "eager", "inductor", "liger", "fuse_losses")
    assert {row.status for row in record.rows if row.peer != "liger"} == {"ok"}
    assert all(row.status in MISSING for row in record.rows if row.peer == "liger")
    measured = [row for row in record.rows if row.status == "ok"]
    assert all(row.timing.median > 0 and row.peak_mib > 0 for row in measured)
    losses = torch.tensor([row.loss for row in measured], dtype=torch.float64)
    assert (losses - losses[0]).abs().max() < 1e-2 * losses[0]  # bf16; what is exact is tested elsewhere
    eager, *others = [row for row in measured if row.gradient_error is not None] or [None]
    assert all(row.gradient_error <= 2 * eager.gradient_error for row in others)
    assert all(row.overwrites is (None if workload == "llama-1b" else False) for row in measured)
    assert all(row.fused for row in measured if row.peer == "fuse_losses")


def test_a_peer_that_fails_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("this peer is broken\nand says more")

    broken = PEERS[0].__class__("eager", head=fail)
    monkeypatch.setattr(bench, "PEERS", (broken, PEERS[1]))
    record = smoke("linear-ce", "eager")
    assert {row.status for row in record.rows} == {"RuntimeError: this peer is broken"}


def test_a_peer_without_the_loss_says_so() -> None:
    record = smoke("ce", "F.linear_cross_entropy")
    assert [row.timing for row in record.rows] == [None, None]
    assert all(row.status in ("has no such loss", f"not in torch {version('torch')}") for row in record.rows)


def test_the_record_outlives_an_interruption(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    slow = PEERS[0].__class__("slow", head=interrupt)
    monkeypatch.setattr(bench, "PEERS", (PEERS[0], slow))
    with pytest.raises(KeyboardInterrupt):
        smoke("linear-ce", "eager", "slow", out=tmp_path / "record.json")
    assert [(row.peer, row.phase) for row in Record.load(tmp_path / "record.json").rows] == [
        ("eager", FULL),
        ("eager", FORWARD),
    ]


def test_sizes_choose_among_those_of_the_workload() -> None:
    plan = WORKLOADS["index"]()
    assert len(plan.cases) == sum(len(WORKLOADS[table.name]().cases) for table in TABLES)
    assert [case.name.split()[0] for case in bench._cases(plan, (4096,))] == ["megatron-ce", "ce", "tvd", "linear-jsd"]
    assert bench._cases(plan, None) == list(plan.cases)
    with pytest.raises(BenchError, match="no size 5 in index; there are: 4096, 32768, 131072, 1024, 8192"):
        bench._cases(plan, (4096, 5))
    with pytest.raises(BenchError, match="--sizes"):
        WORKLOADS["index"](tokens=4)


def test_the_floor_counts_the_work_that_cannot_be_avoided() -> None:
    size = HEADS[0]
    full, forward = linear_ce().cases[0].phases
    assert (full.name, forward.name) == (FULL, FORWARD)
    assert forward.flops == 2 * size.tokens * size.hidden * size.vocab
    assert full.flops == 3 * forward.flops
    assert forward.bytes == 2 * size.hidden * (size.tokens + size.vocab) + 8 * size.tokens
    roofs = {"copy_bytes_per_second": 4e12, "matmul_bf16_flops_per_second": 7e14}
    assert full.floor_ms(roofs) == pytest.approx(1e3 * full.flops / 7e14)
    assert Phase(FULL).floor_ms(roofs) is None


def test_the_floors_of_the_tables() -> None:
    forward, full = zip(*(WORKLOADS[table.name]().cases[0].phases for table in TABLES), strict=True)
    assert {phase.name for phase in forward} == {LOSS} and {phase.name for phase in full} == {FULL}
    by_sequence, logits, given, head = (
        2048 * 4 * 4096 * 2,
        16384 * 4096 * 4,
        1024 * 128256 * 4,
        2 * 4096 * (1024 + 128256),
    )
    targets = 2048 * 4 * 8, 16384 * 8
    assert [p.bytes for p in forward] == [
        by_sequence + targets[0],
        logits + targets[1],
        2 * logits,
        2 * given,
        2 * head,
    ]
    written = [f.bytes - p.bytes for p, f in zip(forward, full, strict=True)]
    assert written == [by_sequence, logits, logits, given, head]  # the student's side learns
    product = 2 * 1024 * 4096 * 128256
    assert [p.flops for p in forward] == [0, 0, 0, 0, 2 * product]
    assert [p.flops for p in full] == [0, 0, 0, 0, 4 * product]


def test_the_clock_leaves_out_what_comes_before() -> None:
    timing = time_step(lambda: time.sleep(0.002), "cpu", repeats=5, warmup=1, before=lambda: time.sleep(0.05))
    assert 2 <= timing.median < 40
    assert timing.p20 <= timing.median <= timing.p80 and timing.repeats == 5


@pytest.mark.gpu
def test_a_replayed_step_is_its_kernels() -> None:
    x = torch.ones(1024, device="cuda")

    def step() -> None:
        for _ in range(100):
            x.mul_(1.0)

    plain, replay = time_step(step, "cuda", repeats=10, warmup=3), replayed(step, 10, before=lambda: None)
    assert replay is not None and 0 < replay.median <= plain.median


@pytest.mark.gpu
def test_a_step_that_waits_is_not_replayed() -> None:
    x = torch.ones(1024, device="cuda")
    assert replayed(lambda: x.sum().item(), 10, before=lambda: None) is None
    assert replayed(lambda: x.sum(), 10, before=lambda: None) is not None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_memory_is_counted_above_the_start(device: str) -> None:
    resident = torch.ones(8 * MIB, dtype=torch.int8, device=device)

    def step() -> None:
        first = torch.ones(2 * MIB, dtype=torch.int8, device=device)
        second = torch.ones(1 * MIB, dtype=torch.int8, device=device)
        del first, second
        torch.ones(MIB // 2, dtype=torch.int8, device=device)

    trace = trace_memory(step, device)
    assert (trace.peak, trace.largest) == (3 * MIB, 2 * MIB)
    assert trace.points[-1][1] == 0
    assert peak_memory(step, device) == 3 * MIB
    assert resident.numel() == 8 * MIB


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind threads")
def test_threads_share_a_processor_while_cuda_is_timed() -> None:
    def of_threads() -> list[set[int]]:
        return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]

    done, before = threading.Event(), os.sched_getaffinity(0)
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with one_core("cpu"):
            assert os.sched_getaffinity(0) == before
        with one_core("cuda"):
            assert len(of_threads()) > 1 and all(found == {max(before)} for found in of_threads())
        assert all(found == before for found in of_threads())
    finally:
        done.set()
        other.join()
