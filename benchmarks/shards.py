"""`python -m benchmarks shards`: losses of a vocabulary that is sharded over processes, onepass beside its peers.

Each process has a GPU of its own, or all of them share the CPU. They run the same calls in the same order. A time is
the wall time of forward and backward from a barrier until the device is idle, that of the slowest process. A second
time is that of the device alone, which is still busy with other work when the call begins, as it is behind the layers
of a model. The first has the time that the host takes to launch the first kernel, the second only where the host has to
wait for the device.
"""

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import (
    DTYPES,
    Name,
    Out,
    Peers,
    check_choices,
    choose_device,
    conclude,
    extra_memory,
    new_console,
    new_report,
    write,
)
from benchmarks.implementations import first_line
from benchmarks.in_turns import Dtype, Rounds, free, plot, table
from benchmarks.operations_shards import OURS, PEERS, PRODUCTS, Shard, baseline, draw, run
from benchmarks.overlap import draw_overlap, record
from benchmarks.processes import Processes, joined, median_ms, number_of_processes, of_any, run_in, wall_ms
from benchmarks.sources import sources_of
from onepass.cli.environment import package_version
from onepass.cli.timing import synchronize
from onepass.cli.workloads import parse_shape

FORM, FORM_OF_HEAD = "ROWSxVOCABULARY", "ROWSxHIDDENxVOCABULARY"
SHAPES, SHAPES_ON_CPU = ("8192x151936", "2048x151936"), ("64x1000",)
SHAPES_OF_HEAD, SHAPES_OF_HEAD_ON_CPU = ("8192x4096x151936",), ("64x32x1000",)
BUSY = 20_000_000  # clock cycles of other work, about 10 ms
Request = dict[str, Any]


def shards(
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OURS)}; repeatable. Default: all.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"{FORM}, for linear heads {FORM_OF_HEAD}; repeatable.")
    ] = None,
    processes: Processes = None,
    dtype: Dtype = None,
    peers: Peers = True,
    rounds: Rounds = 5,
    picture: Annotated[bool, typer.Option("--picture", help="Draw when the kernels of a linear head run.")] = False,
    out: Out = Path(".bench"),
    name: Name = "shards",
) -> None:
    """Time losses of sharded vocabularies against one shard alone, the bare GEMMs and installed peers."""
    device = choose_device()
    on_gpu = device.type == "cuda"
    processes = number_of_processes(processes, device)
    kind = dtype or ("bf16" if on_gpu else "fp32")
    check_choices((op, OURS), ([kind], DTYPES))
    console = new_console()
    report = new_report(console, device) | {"processes": processes}
    cases = [case | {"dtype": kind} for case in cases_of(op or list(OURS), shape, on_gpu)]
    request = {"cases": cases, "rounds": rounds, "peers": peers, "picture": picture, "place": device.type}
    found = run_in(processes, process, request)
    report |= {key: found[key] for key in ("results", "sources", "not_run", "timeline")}
    write(report, out / f"{name}.json")
    for case in cases:
        measured = [r for r in report["results"] if title(r) == title(case)]
        console.print(table(f"{title(case)}, {processes} processes", measured[0]["implementation"], measured))
    plot(report, title, "baseline", out / f"{name}.png")
    if found["timeline"]:
        share = draw_overlap(found["timeline"], out / f"{name}-overlap.png")
        console.print(f"{share:.0%} of the exchange runs beside other kernels", highlight=False)
    conclude(console, report, out / name)


def cases_of(operations: list[str], shapes: list[str] | None, on_gpu: bool) -> list[Request]:
    cases = []
    for operation in operations:
        linear = operation in PRODUCTS
        default = (SHAPES_OF_HEAD, SHAPES_OF_HEAD_ON_CPU) if linear else (SHAPES, SHAPES_ON_CPU)
        form, example = (FORM_OF_HEAD, SHAPES_OF_HEAD[0]) if linear else (FORM, SHAPES[0])
        chosen = [s for s in shapes or () if s.count("x") == form.count("x")] if shapes else default[not on_gpu]
        for shape in chosen:
            sizes = parse_shape(shape, form, example)
            rows, hidden, vocab = sizes if linear else (sizes[0], 0, sizes[1])
            cases.append({"operation": operation, "rows": rows, "hidden": hidden, "vocab": vocab, "masked": 0})
    return cases


def title(case: dict[str, Any]) -> str:
    hidden = f"{case['hidden']} x " if case["hidden"] else ""
    return f"{case['operation']}, {case['rows']} x {hidden}{case['vocab']}, {case['dtype']}"


def process(rank: int, ranks: int, folder: str, request: Request) -> None:
    """Measure all cases in one of the processes; the first writes what was found."""
    found: dict[str, Any] = {"results": [], "sources": {}, "not_run": {}, "timeline": []}
    with joined(rank, ranks, folder, request["place"], found) as device:
        mesh = dist.init_device_mesh(device.type, (ranks,))
        for case in request["cases"]:
            free(device)
            shard = draw(
                case["operation"], (case["rows"], case["hidden"], case["vocab"]), DTYPES[case["dtype"]], mesh, device
            )
            measure(case, shard, device, request, found)
            del shard


def measure(case: dict[str, Any], shard: Shard, device: torch.device, request: Request, found: dict[str, Any]) -> None:
    """Add the results of every implementation of a case. Processes agree on which of them can be run."""
    operation = case["operation"]
    bare, run_bare = baseline(operation, shard)
    measured: list[dict[str, Any]] = [
        {"implementation": bare, "version": torch.__version__, "extra_bytes": None, "error": None}
    ]
    runs: list[Callable[[], Any]] = [run_bare]
    before = [t.detach().clone() for t in shard.leaves]
    peers = PEERS[operation] if request["peers"] else {}
    for name, (package, load) in {"onepass": ("onepass", lambda _: OURS[operation]), **peers}.items():
        free(device)
        for t, value in zip(shard.leaves, before):  # peers write to their logits
            t.data.copy_(value)
        error = ""
        try:
            forward = load(shard)
            outputs = run(forward, shard)
        except Exception as e:  # a peer is not installed, asks for a GPU, ...
            error = f"{type(e).__name__}: {first_line(e)}"
        if (failed := of_any(error)) is not None:
            found["not_run"][f"{name} {title(case)}"] = failed
            continue
        worst = max((o.detach() - e).abs().max().item() for o, e in zip(outputs, shard.expected))
        call = lambda forward=forward: run(forward, shard)  # noqa: E731
        record_of = {"implementation": name, "version": package_version(package), "error": worst}
        measured.append(record_of | {"extra_bytes": beyond_gradients(call, shard, device)})
        runs.append(call)
        if name == "onepass":
            found["sources"][operation] = found["sources"].get(operation, {}) | sources_of(call)
            if request["picture"] and operation in PRODUCTS:
                found["timeline"] = found["timeline"] or record(call, device)
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in runs]
    behind: list[list[float]] = [[] for _ in runs]
    for _ in range(request["rounds"]):
        for turn in order.sample(range(len(runs)), len(runs)):
            times[turn].append(median_ms(wall_ms, runs[turn], device))
            if device.type == "cuda" and turn < 2:  # the lower bound, and onepass
                behind[turn].append(median_ms(busy_ms, runs[turn], device))
    for m, of_run, of_busy in zip(measured, times, behind):
        m |= {"runs": of_run, "ms": statistics.median(of_run), "baseline_ms": statistics.median(times[0])}
        m["ratio"] = m["ms"] / m["baseline_ms"]
        if of_busy:
            m |= {"busy_runs": of_busy, "busy_ms": statistics.median(of_busy)}
            m["busy_ratio"] = m["busy_ms"] / statistics.median(behind[0])
    found["results"] += [case | m for m in measured]


def beyond_gradients(call: Callable[[], Any], shard: Shard, device: torch.device) -> int | None:
    for t in shard.leaves:
        t.grad = None
    extra = extra_memory(call, device)
    return None if extra is None else extra - sum(t.grad.nbytes for t in shard.leaves if t.grad is not None)


def busy_ms(call: Callable[[], Any], device: torch.device) -> float:
    """From the end of other work, which is launched before the call, to an idle device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY)
    start.record()
    call()
    end.record()
    synchronize(device)
    return start.elapsed_time(end)
