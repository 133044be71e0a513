"""The benchmark runs from end to end at toy sizes, and measures what it says."""

from __future__ import annotations

import io
import time

import pytest
import torch
from rich.console import Console

from fuse_losses.bench import run as bench
from fuse_losses.bench.measure import MIB, peak_memory, time_step, trace_memory
from fuse_losses.bench.peers import PEERS
from fuse_losses.bench.workloads import FORWARD, FULL, HEADS, WORKLOADS, linear_ce

MISSING = ("not installed", "needs CUDA")


def smoke(workload: str, *peers: str):
    quiet = Console(file=io.StringIO())
    return bench.run(workload, repeats=2, peers=peers or None, smoke=True, device="cpu", console=quiet)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_peer_agrees_on_the_loss(workload: str) -> None:
    record = smoke(workload, "eager", "inductor", "liger", "fuse_losses")
    assert {row.status for row in record.rows if row.peer != "liger"} == {"ok"}
    assert all(row.status in MISSING for row in record.rows if row.peer == "liger")
    measured = [row for row in record.rows if row.status == "ok"]
    assert all(row.timing.median > 0 and row.peak_mib > 0 for row in measured)
    losses = torch.tensor([row.loss for row in measured], dtype=torch.float64)
    assert (losses - losses[0]).abs().max() < 1e-2 * losses[0]  # bf16; what is exact is tested elsewhere
    assert all(row.fused == 1 for row in measured if row.peer == "fuse_losses")


def test_a_peer_that_fails_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("this peer is broken\nand says more")

    broken = PEERS[0].__class__("eager", head=fail)
    monkeypatch.setattr(bench, "PEERS", (broken, PEERS[1]))
    record = smoke("linear-ce", "eager")
    assert {row.status for row in record.rows} == {"RuntimeError: this peer is broken"}


def test_the_floor_counts_the_work_that_cannot_be_avoided() -> None:
    size = HEADS[0]
    full, forward = linear_ce().cases[:2]
    assert (full.phase, forward.phase) == (FULL, FORWARD)
    assert forward.flops == 2 * size.tokens * size.hidden * size.vocab
    assert full.flops == 3 * forward.flops
    assert forward.bytes == 2 * size.hidden * (size.tokens + size.vocab) + 8 * size.tokens
    roofs = {"copy_bytes_per_second": 4e12, "matmul_bf16_flops_per_second": 7e14}
    assert bench._floor_ms(full, roofs) == pytest.approx(1e3 * full.flops / 7e14)


def test_the_clock_leaves_out_what_comes_before() -> None:
    timing = time_step(lambda: time.sleep(0.002), "cpu", repeats=5, warmup=1, before=lambda: time.sleep(0.05))
    assert 2 <= timing.median < 40
    assert timing.p20 <= timing.median <= timing.p80 and timing.repeats == 5


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
