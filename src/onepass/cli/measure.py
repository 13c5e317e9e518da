"""Time and memory of what the demo runs, on a CPU or a GPU."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def clock(device: torch.device) -> float:
    """The time in seconds, after all that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors that ``call`` held at once, beyond those there were."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # so that nothing earlier is freed during the call
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    profiler: Any = profile.profiler  # its public results lose the order of allocations
    held = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    return peak


@contextmanager
def one_core_left() -> Iterator[None]:
    """Use one thread fewer than torch would: where another process runs, threads on all cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
