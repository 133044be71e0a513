"""Time, memory and the machine's own limits, measured the same way for every peer."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd import DeviceType

MIB = 2**20
WARM_MS, TIMED_MS = 25.0, 50.0  # of a step on CUDA, at least


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the warm repeats."""

    median: float
    p20: float
    p80: float
    repeats: int


@dataclass(frozen=True)
class MemoryTrace:
    """Memory over one step, above what was resident when it began."""

    points: list[tuple[float, int]]  # (milliseconds since the first allocation, bytes)
    largest: int  # bytes of the largest single allocation

    @property
    def peak(self) -> int:
        return max(size for _, size in self.points)


def time_step(
    step: Callable[[], object],
    device: str,
    repeats: int,
    warmup: int,
    before: Callable[[], object] | None = None,
) -> Timing:
    """Time `step`; `before` runs ahead of each repeat, outside the timed part (say, to drop the gradients).

    On CUDA the L2 cache is flushed before each repeat, so that inputs come from memory, as in training. A short step is
    warmed up and repeated for a while: the host is fast only once its own caches are warm.
    """
    for _ in range(warmup):
        _time_cpu(step, before)
    if device != "cuda":
        return _timing([_time_cpu(step, before) for _ in range(repeats)])
    torch.cuda.synchronize()
    ms = _time_cpu(lambda: (step(), torch.cuda.synchronize()), before)
    for _ in range(int(WARM_MS / ms)):
        _time_cpu(step, before)
    repeats = max(repeats, int(TIMED_MS / ms))
    flush = torch.empty(256 * MIB, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        if before:
            before()
        flush.zero_()
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return _timing([start.elapsed_time(end) for start, end in events])


@contextlib.contextmanager
def one_core(device: str) -> Iterator[None]:
    """Keeps this process's threads on one processor while steps on CUDA are timed, where the system can.

    Autograd launches from a thread of its own. Each time a scheduler moves one of the two, its caches start cold, which
    can double the host's time, by chance and for every peer.
    """
    if device != "cuda" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    _keep_threads_on({max(allowed)})
    try:
        yield
    finally:
        _keep_threads_on(allowed)


def _keep_threads_on(processors: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), processors)


def replayed(step: Callable[[], object], repeats: int, before: Callable[[], object]) -> Timing | None:
    """Time `step` replayed as one CUDA graph: its kernels, without the host that launches them.

    None for a step that waits for the GPU, which cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                before()
                step()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
    before()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    return time_step(graph.replay, "cuda", repeats, warmup=1, before=before)


def _time_cpu(step: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before:
        before()
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def _timing(ms: list[float]) -> Timing:
    ms = sorted(ms)
    last = len(ms) - 1
    return Timing(statistics.median(ms), ms[round(0.2 * last)], ms[round(0.8 * last)], len(ms))


def peak_memory(step: Callable[[], object], device: str) -> int:
    """Bytes that `step` holds at its peak above what is resident before it."""
    if device != "cuda":
        return trace_memory(step, device).peak
    clear(device)
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - resident


def trace_memory(step: Callable[[], object], device: str) -> MemoryTrace:
    """Memory over one step, from the allocator's own events."""
    clear(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silenced(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    wanted = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}[device]
    results: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == wanted]
    events.sort(key=lambda e: e.start_ns())
    points, size = [(0.0, 0)], 0
    for event in events:
        size += event.nbytes()
        points.append(((event.start_ns() - events[0].start_ns()) / 1e6, size))
    return MemoryTrace(points, max((e.nbytes() for e in events), default=0))


def clear(device: str) -> None:
    """Return what nobody holds, so that one peer's leftovers are not another's."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """The profiler's C++ side writes notes to the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


@cache
def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy: the roof for anything bound by memory."""
    count = (2**30 if device == "cuda" else 2**26) // 4
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    timing = time_step(lambda: target.copy_(source), device, repeats=20, warmup=3)
    return 2 * 4 * count / (timing.median / 1e3)


@cache
def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Flop per second of a square matmul (8192 on CUDA): the roof for anything bound by arithmetic."""
    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timing = time_step(lambda: a @ b, device, repeats=20, warmup=3)
    return 2 * size**3 / (timing.median / 1e3)
