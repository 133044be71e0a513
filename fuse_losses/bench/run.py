"""Run a workload: every peer on every case, in one process, each from a clean slate."""

from __future__ import annotations

import warnings

import torch
from rich.console import Console

from fuse_losses.bench.measure import MIB, clear, copy_bandwidth, matmul_rate, peak_memory, time_step
from fuse_losses.bench.peers import OURS, PEERS, Peer
from fuse_losses.bench.record import Record, Row, here
from fuse_losses.bench.table import text_tables
from fuse_losses.bench.workloads import WORKLOADS, Case, NotApplicable


class BenchError(ValueError):
    """A workload or a peer that does not exist."""


def run(
    workload: str,
    tokens: int | None = None,
    repeats: int = 10,
    peers: tuple[str, ...] | None = None,
    smoke: bool = False,
    commit: str | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Record:
    """Measure `workload` and print its tables. A peer that is missing or fails is a row that says so."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # no product here is in float32
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = console or Console()
    if workload not in WORKLOADS:
        raise BenchError(f"no workload {workload!r}; there are: {', '.join(WORKLOADS)}")
    chosen = [_peer(name) for name in peers] if peers else list(PEERS)
    plan = WORKLOADS[workload](tokens=tokens, smoke=smoke)
    roofs = {
        "copy_bytes_per_second": copy_bandwidth(device),
        "matmul_bf16_flops_per_second": matmul_rate(device, torch.bfloat16),
    }
    origin = here(device, commit)
    rows = []
    for case in plan.cases:
        for peer in chosen:
            with console.status(f"{case.name}, {case.phase}: {peer.name}"):
                floor = None if smoke else _floor_ms(case, roofs)
                rows.append(_measure(case, peer, device, repeats, floor))
    parameters = {**plan.parameters, "repeats": repeats, "smoke": smoke}
    record = Record(plan.name, parameters, origin, roofs, tuple(rows))
    console.print(*text_tables(record), sep="\n")
    return record


def _peer(name: str) -> Peer:
    for peer in PEERS:
        if peer.name == name.strip():
            return peer
    raise BenchError(f"no peer {name!r}; there are: {'; '.join(peer.name for peer in PEERS)}")


def _floor_ms(case: Case, roofs: dict[str, float]) -> float | None:
    """The larger of the bytes over the copy bandwidth and the flops over the matmul rate."""
    if case.flops is None or case.bytes is None:
        return None
    memory = case.bytes / roofs["copy_bytes_per_second"]
    return 1e3 * max(memory, case.flops / roofs["matmul_bf16_flops_per_second"])


def _measure(case: Case, peer: Peer, device: str, repeats: int, floor: float | None) -> Row:
    row = {"case": case.name, "phase": case.phase, "peer": peer.name, "floor_ms": floor}
    if reason := peer.missing(device):
        return Row(**row, status=reason)
    torch._dynamo.reset()
    clear(device)
    try:
        step = case.build(peer, device)
        loss = step.run().item()
        step.clear()
        timing = time_step(step.run, device, repeats, warmup=3, before=step.clear)
        if not step.gradients_stay:
            step.clear()
        peak = peak_memory(step.run, device) / MIB
    except NotApplicable as reason:
        return Row(**row, status=str(reason))
    except Exception as error:  # a peer's failure is a result, and is written down as one
        return Row(**row, status=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return Row(**row, timing=timing, peak_mib=peak, loss=loss, fused=_fused() if peer.name == OURS else None)


def _fused() -> int:
    import fuse_losses

    return len(fuse_losses.last_report().fused)
