"""Processes that measure together: each has a GPU of its own, or all of them share the CPU."""

import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.multiprocessing.spawn import spawn

from onepass.cli.timing import synchronize

Processes = Annotated[int | None, typer.Option(help="Default: one for each GPU, or 2 on a CPU.", min=1)]
CALLS, WARM_UP, TIMEOUT = 20, 3, datetime.timedelta(seconds=120)
Found = dict[str, Any]


def number_of_processes(processes: int | None, device: torch.device) -> int:
    on_gpu = device.type == "cuda"
    processes = processes or (torch.cuda.device_count() if on_gpu else 2)
    if on_gpu and processes > torch.cuda.device_count():
        raise typer.BadParameter(f"expected at most {torch.cuda.device_count()}, the number of GPUs, got {processes}")
    return processes


def run_in(processes: int, process: Callable[..., None], request: dict[str, Any]) -> Found:
    """What the first process found: ``process`` is called with its rank, their number, a folder and the request.

    A single process is this one.
    """
    with TemporaryDirectory() as folder:
        if processes == 1:
            process(0, 1, folder, request)
        else:
            spawn(process, (processes, folder, request), processes)
        found: Found = json.loads(Path(folder, "found.json").read_text())
    return found


@contextmanager
def joined(rank: int, ranks: int, folder: str, place: str, found: Found) -> Iterator[torch.device]:
    """The device of a process, which is one of a group. At the end the first process writes what was found."""
    device = torch.device(place, rank if place == "cuda" else 0)
    if place == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    backend = "nccl" if place == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    yield device
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def of_any(error: str) -> str | None:
    """The first error of any process, None if all have succeeded."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((e for e in errors if e), None)


def median_ms(measure: Callable[..., float], call: Callable[[], Any], device: torch.device) -> float:
    """The median of several calls, of the process that takes longest."""
    times = []
    for _ in range(WARM_UP + CALLS):
        synchronize(device)
        dist.barrier()
        synchronize(device)
        times.append(measure(call, device))
    of_process = torch.tensor(statistics.median(times[WARM_UP:]), dtype=torch.float64, device=device)
    dist.all_reduce(of_process, op=dist.ReduceOp.MAX)
    return float(of_process)


def wall_ms(call: Callable[[], Any], device: torch.device) -> float:
    """From an idle device to an idle device."""
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3
