"""The time that a call takes, for `onepass autotune run` and the benchmarks."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SMALL = 1 << 25  # logits; up to here the host limits the speed of a call, and only the kernels' own time is meaningful
CACHE = 1 << 27  # float32 values, more than the caches of GPUs hold
WARMUP_CALLS, FEWEST_CALLS = 10, 20  # of a wall time: calls before the measured ones, and how many of these at least


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable[[], Any], device: torch.device, milliseconds: int, warmup: int | None = None) -> float:
    """The median time of a call, between device events and with a cold cache; on a CPU the wall time.

    Args:
        run: the call.
        device: the device that it runs on.
        milliseconds: how long to measure.
        warmup: how many milliseconds to run before that; a quarter of ``milliseconds`` by default.
    """
    if device.type != "cuda":
        return wall_ms(run, device, milliseconds)
    from triton.testing import do_bench

    return do_bench(run, warmup=milliseconds // 4 if warmup is None else warmup, rep=milliseconds, return_mode="median")


def wall_ms(run: Callable[[], Any], device: torch.device, milliseconds: int) -> float:
    """The median time from the call until the device is idle, which is what a user waits for."""
    times: list[float] = []
    for _ in range(WARMUP_CALLS):
        run()
    end = time.perf_counter() + milliseconds / 1e3
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def kernel_us(run: Callable[[], Any], device: torch.device, repeats: int = 20, cold: bool = False) -> float | None:
    """The time that the device spends in the kernels of a call, without the gaps between them; None on a CPU.

    Args:
        run: the call.
        device: the device that it runs on.
        repeats: how many calls are measured.
        cold: whether the device's cache is filled with something else before each call, instead of what the last one
            left there.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    other = torch.ones(CACHE if cold else 0, device=device)
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            if cold:
                other.erfinv_()  # nothing that is measured calls it: its kernel is told from theirs by its name
            run()
        synchronize(device)
    events = [event for event in profiler.key_averages() if "erfinv" not in event.key]
    return sum(event.device_time_total for event in events) / repeats
