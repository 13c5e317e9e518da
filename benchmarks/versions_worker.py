"""A process of `versions.py` that measures one version of onepass: it prepares, measures and frees one operation after
the other, as it is asked to.

    python -m benchmarks.versions_worker FILE_DESCRIPTOR [CORES]

Requests are lines of JSON on stdin. The answers go to a pipe of their own, because libraries may print. The onepass
that is imported may be an older one, of which only public functions may be used.
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import onepass
from benchmarks.versions_operations import DEVICE, FORWARD, OPERATIONS, Tensors

Run = Callable[[], Any]


def serve(replies: int) -> None:
    runs: dict[str, Run] = {}
    with os.fdopen(replies, "w") as channel:
        for line in sys.stdin:
            try:
                answer = {"file": onepass.__file__, "result": answer_to(json.loads(line), runs)}
            except Exception as error:  # the other operations are measured all the same
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
            print(json.dumps(answer), file=channel, flush=True)


def answer_to(request: dict[str, Any], runs: dict[str, Run]) -> Any:
    match request.pop("do"):
        case "prepare":
            prefix = request.pop("prefix", "")
            found = {prefix + name: run for name, run in prepare(**request).items()}
            runs |= found
            return {name: estimate(run) for name, run in found.items()}
        case "measure":
            return device_ms(runs[request.pop("name")], **request)
        case "wall":
            return least_wall_ms(runs[request.pop("name")], **request)
        case "sources":  # asked of the newer version alone
            from benchmarks.sources import sources_of

            return sources_of(lambda: [runs[name]() for name in request["names"]])
        case "free":
            runs.clear()
            gc.collect()
            torch.cuda.empty_cache()


def prepare(index: int, shape: list[int], passes: list[str]) -> dict[str, Run]:
    """The passes of an operation. The gradient of a loss is 1, that of other results is random."""
    torch.manual_seed(0)
    tensors = OPERATIONS[index].inputs(*shape)

    def forward() -> Tensors:
        outputs = OPERATIONS[index].call(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    upstream: list[Tensor | None] = []

    def both() -> None:
        for t in tensors:
            t.grad = None
        outputs = forward()
        upstream.extend(torch.randn_like(o) if o.dim() else None for o in outputs[len(upstream) :])  # the first time
        torch.autograd.backward(outputs, upstream)

    return {name: torch.no_grad()(forward) if name == FORWARD else both for name in passes}


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


def device_ms(run: Run, repeats: int, flushes: int) -> float:
    """The median time of a call between device events, after half as many calls that are not measured.

    Before each call the cache is written ``flushes`` times, so that it is cold and the host is ahead of the device.
    `triton.testing.do_bench` writes it once, and therefore times the host wherever the host takes longer to launch a
    call than the device takes to run it. With 0 flushes, for a CPU, this is the wall time.
    """
    for _ in range(repeats // 2):
        run()
    if flushes == 0:
        return statistics.median(timed(run)[1] for _ in range(repeats))
    flushed = cache()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        for _ in range(flushes):
            flushed.zero_()
        start.record()
        run()
        end.record()
    synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def least_wall_ms(run: Run, seconds: float, calls: int) -> float:
    """The least wall time of a call, of as many calls as fit into ``seconds`` but at least ``calls``.

    Whatever else the host does makes a call take longer, never shorter. So the least of many short timings is what the
    call itself takes in this process.
    """
    for _ in range(calls // 2):
        run()
    gc.collect()
    gc.disable()
    try:
        times = [timed(run)[1] for _ in range(calls)]
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            times.append(timed(run)[1])
    finally:
        gc.enable()
    return min(times)


if __name__ == "__main__":
    if len(sys.argv) > 2 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
    serve(int(sys.argv[1]))
