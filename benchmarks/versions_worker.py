"""A process of `versions.py`, in which both versions of onepass are imported and take turns.

    python -m benchmarks.versions_worker FILE_DESCRIPTOR [CORES]

Both run on the same inputs, with the same caches, clocks and memory, so that the ratio of their times depends on little
else than on the versions.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import versions_operations
from benchmarks.sources import sources_of
from benchmarks.versions_operations import BASELINE, BOTH, DEVICE, FORWARD, WALL, Tensors
from benchmarks.workers import serve

Run = Callable[[], Any]
Runs = dict[str, Run]  # of the same pass, by version: "new" and "old"
LONG = 10  # milliseconds, from which the clocks change during a call
CALLS = 20  # the fewest that a least time is taken of


def answer_to(request: dict[str, Any]) -> Any:
    try:
        return compare(**request) if request.pop("do") == "compare" else sources(**request)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def versions() -> dict[str, ModuleType]:
    return {"new": versions_operations, "old": import_module(f"{BASELINE}_operations")}


def compare(index: int, shape: list[int], passes: list[str], rounds: int, tiny: bool) -> dict[str, Any]:
    """The times of both versions, in milliseconds, ``rounds`` of each; ``{"errors": by version}`` if one fails."""
    tensors = inputs(index, shape)
    found: dict[str, Any] = {}
    for name in passes:
        runs, estimates, errors = {}, {}, {}
        for version, module in versions().items():
            runs[version] = prepared(module, index, tensors, name)
            try:
                estimates[version] = estimate(runs[version])
            except Exception as error:
                errors[version] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        if errors:
            return {"errors": errors}
        if name == WALL:
            times = least_wall_times(runs, rounds, 0.0 if tiny else 0.02)
        else:
            times = device_times(runs, estimates, rounds, 1 if tiny else 60)
        found[name] = {f"{version}_ms": of_version for version, of_version in times.items()}
    return found


def sources(index: int, shape: list[int], passes: list[str]) -> dict[str, str]:
    """The files of the newer version that the passes run through, and their hashes."""
    tensors = inputs(index, shape)
    runs = [prepared(versions_operations, index, tensors, name) for name in passes]
    return sources_of(lambda: [run() for run in runs])


def inputs(index: int, shape: list[int]) -> Tensors:
    torch.manual_seed(0)
    return versions_operations.OPERATIONS[index].inputs(*shape)


def prepared(module: ModuleType, index: int, tensors: Tensors, name: str) -> Run:
    """A pass of an operation. The gradient of a loss is 1, that of other results is random."""

    def forward() -> Tensors:
        outputs = module.OPERATIONS[index].call(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    upstream: list[Tensor | None] = []

    def both() -> None:
        for t in tensors:
            t.grad = None
        outputs = forward()
        upstream.extend(torch.randn_like(o) if o.dim() else None for o in outputs[len(upstream) :])  # the first time
        torch.autograd.backward(outputs, upstream)

    assert name in (FORWARD, BOTH, WALL)
    return torch.no_grad()(forward) if name == FORWARD else both


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Run) -> tuple[float, float]:
    """Milliseconds until a call returns, and until the device is idle."""
    synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter()
    synchronize()
    return (host - start) * 1e3, (time.perf_counter() - start) * 1e3


def estimate(run: Run) -> tuple[float, float]:
    """`timed`, after the calls that compile."""
    return [timed(run) for _ in range(4)][-1]


@lru_cache
def cache() -> Tensor:
    """Larger than any L2 cache, as in `triton.testing.do_bench`. An H100 writes it in 0.09 ms."""
    return torch.empty(2**28, dtype=torch.uint8, device=DEVICE)


def order_of(turn: int, runs: Runs) -> list[tuple[str, Run]]:
    return list(runs.items()) if turn % 2 == 0 else list(reversed(runs.items()))


def device_times(
    runs: Runs, estimates: dict[str, tuple[float, float]], rounds: int, milliseconds: float
) -> dict[str, list[float]]:
    """Medians of the times of calls between device events, one a round. The versions take turns from call to call.

    Before each call the cache is written so often that it is cold and the host is ahead of the device.
    `triton.testing.do_bench` writes it once, and therefore times the host wherever the host takes longer to launch a
    call than the device takes to run it. On a CPU these are wall times.
    """
    host, wall = (max(e[i] for e in estimates.values()) for i in range(2))
    flushes = 0 if DEVICE.type == "cpu" else min(32, 1 + int(host / 0.04))  # twice as long as the host takes
    repeats = min(200, max(2, int(milliseconds / (wall + 0.1 * flushes))))
    if wall > LONG and milliseconds > 1:
        repeats, rounds = 6, 3 * rounds
    times: dict[str, list[float]] = {version: [] for version in runs}
    for round_ in range(rounds):
        of_calls: dict[str, list[Callable[[], float]]] = {version: [] for version in runs}
        for turn in range(repeats):
            for version, run in order_of(round_ + turn, runs):
                of_calls[version].append(timed_on_device(run, flushes))
        synchronize()
        for version, calls in of_calls.items():
            times[version].append(statistics.median(milliseconds_of() for milliseconds_of in calls))
    return times


def timed_on_device(run: Run, flushes: int) -> Callable[[], float]:
    """Launch a call; the result is its time, for when the device is idle."""
    if flushes == 0:
        wall = timed(run)[1]
        return lambda: wall
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(flushes):
        cache().zero_()
    start.record()
    run()
    end.record()
    return lambda: float(start.elapsed_time(end))


def least_wall_times(runs: Runs, rounds: int, seconds: float) -> dict[str, list[float]]:
    """The least wall time of a call in each of the rounds.

    Whatever else the host does makes a call take longer, never shorter. So the least of many short timings is what the
    call itself takes in this process.
    """
    times: dict[str, list[float]] = {version: [] for version in runs}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for version, run in order_of(turn, runs):
                of_calls = [timed(run)[1] for _ in range(CALLS)]
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    of_calls.append(timed(run)[1])
                times[version].append(min(of_calls))
    finally:
        gc.enable()
    return times


if __name__ == "__main__":
    if len(sys.argv) > 2 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    serve(int(sys.argv[1]), answer_to)
