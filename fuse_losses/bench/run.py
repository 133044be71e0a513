"""Run a workload: every peer on every case, in one process, each from a clean slate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from fuse_losses.bench.case import BenchError, Case, NotApplicable, Step, Workload
from fuse_losses.bench.measure import (
    MIB,
    clear,
    copy_bandwidth,
    matmul_rate,
    one_core,
    peak_memory,
    replayed,
    time_step,
)
from fuse_losses.bench.peers import OURS, PEERS, Peer
from fuse_losses.bench.record import Record, Row, here
from fuse_losses.bench.table import text_tables
from fuse_losses.bench.workloads import WORKLOADS

SMALL_MS = 5.0  # in longer steps the launches hide behind the kernels


def run(
    workload: str,
    tokens: int | None = None,
    repeats: int | None = None,
    peers: tuple[str, ...] | None = None,
    smoke: bool = False,
    commit: str | None = None,
    device: str | None = None,
    console: Console | None = None,
    sizes: tuple[int, ...] | None = None,
    out: Path | None = None,
) -> Record:
    """Measure `workload` and print its tables. A peer that is missing or fails is a row that says so.

    The record is written to `out` after every row, so that what was measured outlives an interruption.
    """
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # no product here is in float32
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = console or Console()
    if workload not in WORKLOADS:
        raise BenchError(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}")
    plan = WORKLOADS[workload](tokens=tokens, smoke=smoke)
    repeats = repeats or plan.repeats
    chosen = [_peer(name) for name in peers or plan.peers or [peer.name for peer in PEERS]]
    cases = _cases(plan, sizes)
    roofs = {
        "copy_bytes_per_second": copy_bandwidth(device),
        "matmul_bf16_flops_per_second": matmul_rate(device, torch.bfloat16),
    }
    parameters = {**plan.parameters, "repeats": repeats, "smoke": smoke}
    record = Record(plan.name, parameters, here(device, commit), roofs)
    for case in cases:
        for peer in chosen:
            # no spinner: its thread would be in the way
            console.print(f"[dim]{escape(case.name)}: {escape(peer.name)}[/dim]")
            for row in _rows(case, peer, device, repeats, None if smoke else roofs):
                record = replace(record, rows=(*record.rows, row))
                if out:
                    record.save(out)
    console.print(*text_tables(record), sep="\n")
    return record


def _peer(name: str) -> Peer:
    for peer in PEERS:
        if peer.name == name.strip():
            return peer
    raise BenchError(f"no peer {name!r}; there are: {'; '.join(peer.name for peer in PEERS)}")


def _cases(plan: Workload, sizes: tuple[int, ...] | None) -> list[Case]:
    there = dict.fromkeys(case.size for case in plan.cases)
    if unknown := set(sizes or ()).difference(there):
        raise BenchError(f"no size {min(unknown)} in {plan.name}; there are: {', '.join(map(str, there))}")
    return [case for case in plan.cases if not sizes or case.size in sizes]


def _rows(case: Case, peer: Peer, device: str, repeats: int, roofs: dict[str, float] | None) -> Iterator[Row]:
    """One peer in all phases, with one set of inputs; they are gone when the last row is taken."""
    torch._dynamo.reset()
    steps: Mapping[str, Step] = {}
    reason = peer.missing(device)
    for phase in case.phases:
        blank = Row(case.name, phase.name, peer.name, floor_ms=phase.floor_ms(roofs) if roofs else None)
        if not reason:
            clear(device)
        try:
            steps = steps or ({} if reason else case.build(peer, device))
            row = replace(blank, status=reason) if reason else _measured(blank, steps[phase.name], device, repeats)
        except NotApplicable as why:
            row = replace(blank, status=str(why))
        except Exception as error:  # a peer's failure is a result, and is written down as one
            said = str(error).strip().split("\n")[0]
            row = replace(blank, status=f"{type(error).__name__}: {said[:200]}")
        yield row


def _measured(blank: Row, step: Step, device: str, repeats: int) -> Row:
    check = step.check() if step.check else None
    loss = step.run().mean().item()
    step.clear()
    with one_core(device):
        timing = time_step(step.run, device, repeats, warmup=3, before=step.clear)
    replay = unpinned = None
    if device == "cuda" and blank.floor_ms and timing.median < SMALL_MS:
        replay = replayed(step.run, repeats, step.clear)
        unpinned = time_step(step.run, device, repeats, warmup=3, before=step.clear)
    if not step.gradients_stay:
        step.clear()
    peak = peak_memory(step.run, device) / MIB
    step.clear()
    return replace(
        blank,
        timing=timing,
        replay_ms=replay.median if replay else None,
        unpinned_ms=unpinned.median if unpinned else None,
        peak_mib=peak,
        loss=loss,
        loss_error=check.errors.loss if check else None,
        gradient_error=check.errors.gradient if check else None,
        overwrites=check.overwrites if check else None,
        fused=_fused() if blank.peer == OURS else None,
    )


def _fused() -> int:
    import fuse_losses

    return len(fuse_losses.last_report().fused)
