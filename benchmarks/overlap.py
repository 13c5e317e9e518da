"""When the kernels of a call run, and how much of the exchange between GPUs runs beside other kernels."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# (name of the kernel, start, end), in microseconds
Timeline = list[tuple[str, float, float]]
GEMMS = ("gemm", "nvjet", "cutlass", "xmma")
PAUSE = 0.5  # seconds before the call that is recorded
KINDS = ("exchange", "GEMM", "onepass and others")


def record(call: Callable[[], Any], device: torch.device) -> Timeline:
    """The kernels of a call that all processes begin at the same time; nothing on a CPU."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()  # a profiler takes longer to start in some processes than in others
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        time.sleep(PAUSE)
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    found = [(e.name, float(e.time_range.start), float(e.time_range.end)) for e in events
             if not getattr(e, "is_user_annotation", False)]  # fmt: skip
    found.sort(key=lambda event: event[1])
    pauses = [n for n in range(1, len(found)) if found[n][1] - found[n - 1][2] > PAUSE * 1e6 / 2]
    return found[pauses[-1] :] if pauses else found


def kind(name: str) -> str:
    if "nccl" in name.lower():
        return KINDS[0]
    return KINDS[1] if any(part in name.lower() for part in GEMMS) else KINDS[2]


def overlapped(timeline: Timeline) -> float:
    """The share of the time of the exchange in which another kernel runs."""
    exchange = [(start, end) for name, start, end in timeline if kind(name) == KINDS[0]]
    others = [(start, end) for name, start, end in timeline if kind(name) != KINDS[0]]
    total = covered = 0.0
    for start, end in exchange:
        total += end - start
        until = start
        for first, last in sorted(others):
            first, last = max(first, until), min(last, end)
            if last > first:
                covered, until = covered + last - first, last
    return covered / total if total else 0.0


def draw_overlap(timeline: Timeline, path: Path) -> float:
    """A line for each kind of kernel, over time; returns `overlapped`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    origin = min(start for _, start, _ in timeline)
    figure, axis = plt.subplots(figsize=(10, 2.2), layout="constrained")
    for line, (of_kind, color) in enumerate(zip(KINDS, ("#c44e52", "#4c72b0", "#8c8c8c"))):
        bars = [((start - origin) / 1e3, (end - start) / 1e3) for name, start, end in timeline if kind(name) == of_kind]
        axis.broken_barh(bars, (line - 0.4, 0.8), color=color)
    axis.set_yticks(range(len(KINDS)), KINDS)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    share = overlapped(timeline)
    axis.set_title(f"{share:.0%} of the exchange runs beside other kernels", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return share
