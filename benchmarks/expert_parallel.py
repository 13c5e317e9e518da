"""`python -m benchmarks expert-parallel`: experts that are sharded over processes, onepass beside grouped_mm.

Both run below the same expert parallelism of transformers, forward and backward, and onepass below its own exchange,
too, beside grouped_mm below "all_to_all". Each process has as many tokens as one has without expert parallelism: with
"all_reduce" its part of a batch that all of them share, else a batch of its own. A time is that of the slowest process,
from a barrier on.
"""

import random
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

from benchmarks.harness import (
    DTYPES,
    Name,
    Out,
    check_choices,
    choose_device,
    conclude,
    extra_memory,
    new_console,
    new_report,
    write,
)
from benchmarks.implementations import first_line
from benchmarks.in_turns import Dtype, Rounds, free, plot
from benchmarks.operations_expert_parallel import (
    ALONE,
    BASELINES,
    EXCHANGES,
    IMPLEMENTATIONS,
    OPERATIONS,
    OWN,
    THEIRS,
    Place,
    Sharded,
    build,
    error_of,
    exact,
    join,
    local,
)
from benchmarks.operations_experts import ExpertsBatch, make_batch
from benchmarks.overlap import KINDS, kind, record
from benchmarks.processes import Processes, joined, median_ms, number_of_processes, of_any, run_in, wall_ms
from benchmarks.sources import sources_of
from onepass.cli.environment import package_version
from onepass.cli.timing import synchronize
from onepass.cli.workloads import EXPERT_FORM, QWEN3_30B, parse_shape

SIZES = ("tokens", "hidden", "intermediate", "experts", "choices")
ON_CPU = "16x16x8x4x2"
PACKAGES = ("transformers", "peft")
HEAVIEST = 16  # kernels of a call that a result names
Request = dict[str, Any]


def expert_parallel(
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OPERATIONS)}. Default: all.")] = None,
    exchange: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(EXCHANGES)}. Default: all.")] = None,
    shape: Annotated[str | None, typer.Option(help=f"{EXPERT_FORM}, of the tokens of one process.")] = None,
    processes: Processes = None,
    dtype: Dtype = None,
    rounds: Rounds = 5,
    out: Out = Path(".bench"),
    name: Name = "expert-parallel",
) -> None:
    """Time experts sharded over processes, of onepass and of grouped_mm, in the expert parallelism of transformers."""
    device = choose_device()
    on_gpu = device.type == "cuda"
    processes = number_of_processes(processes, device)
    of_numbers = dtype or ("bf16" if on_gpu else "fp32")
    check_choices((op, OPERATIONS), (exchange, EXCHANGES), ([of_numbers], DTYPES))
    if exchange and OWN in exchange and THEIRS not in exchange:
        raise typer.BadParameter(f"expected {THEIRS} beside {OWN}, which is compared with it, got {exchange}")
    sizes = parse_shape(shape or (QWEN3_30B if on_gpu else ON_CPU), EXPERT_FORM, QWEN3_30B)
    if sizes[3] % processes:
        raise typer.BadParameter(f"expected a number of experts that {processes} processes share, got {sizes[3]}")
    console = new_console()
    report = new_report(console, device) | {"processes": processes}
    report["environment"] |= {package: package_version(package) for package in PACKAGES}
    cases = [{"operation": o, **dict(zip(SIZES, sizes)), "dtype": of_numbers} for o in op or OPERATIONS]
    request = {"cases": cases, "exchanges": exchange or EXCHANGES, "rounds": rounds, "place": device.type}
    report |= run_in(processes, process, request | {"report": report, "path": str(out / f"{name}.json")})
    write(report, out / f"{name}.json")
    for case in cases:
        console.print(shown([r for r in report["results"] if r["operation"] == case["operation"]]))
    plot(report, title, "grouped_mm", out / f"{name}.png")
    conclude(console, report, out / name)


def title(case: dict[str, Any]) -> str:
    sizes = " x ".join(str(case[s]) for s in SIZES)
    return f"{case['operation']}, {sizes}, exchange: {case['exchange']}, {case['processes']} processes, {case['dtype']}"


def process(rank: int, ranks: int, folder: str, request: Request) -> None:
    """Measure all cases in one of the processes. The first writes the report after each, in case that a later fails."""
    import onepass
    from onepass.integrations import transformers_experts

    found: dict[str, Any] = {"results": [], "sources": {}, "not_run": {}}
    with joined(rank, ranks, folder, request["place"], found) as device, onepass.patch("transformers"):
        transformers_experts.register()
        place = join(device.type, rank, ranks)
        for case in request["cases"]:
            free(device)
            sizes = (ranks * case["tokens"], *(case[s] for s in SIZES[1:]))
            batch = make_batch(case["operation"], sizes, "uniform", DTYPES[case["dtype"]], device)
            as_router = batch.routing.weights.detach().to(batch.hidden.dtype)  # Qwen3-MoE's casts them
            batch.routing = batch.routing._replace(weights=as_router)
            measure(case, batch, place, device, request, found)
            del batch
            if rank == 0:
                write(request["report"] | found, Path(request["path"]))


def measure(
    case: dict[str, Any], batch: ExpertsBatch, place: Place, device: torch.device, request: Request,
    found: dict[str, Any],
) -> None:  # fmt: skip
    """Add the results of every exchange and implementation of a case."""
    operation = case["operation"]
    measured: list[dict[str, Any]] = []
    runs: list[Callable[[], Any]] = []
    for exchange in request["exchanges"]:
        of_all = exchange != ALONE
        expected = exact(operation, batch, slice(None) if of_all else place.own(len(batch.hidden)))
        for name in IMPLEMENTATIONS[operation] if exchange != OWN else ("onepass",):
            free(device)
            about = case | {
                "exchange": exchange, "processes": place.ranks if of_all else 1, "implementation": name,
                "version": package_version("onepass" if name == "onepass" else "transformers"),
            }  # fmt: skip
            error, worst = "", 0.0
            try:
                sharded = build(name, operation, exchange, batch, place)
                worst = error_of(sharded, expected, of_all)
            except Exception as e:  # PEFT cannot add its adapters to sharded weights
                error = f"{type(e).__name__}: {first_line(e)}"
            if (failed := of_any(error)) is not None:
                found["not_run"][f"{name} {title(about)}"] = failed
                continue
            measured.append(about | {"error": largest(worst, device), "extra_bytes": beyond_gradients(sharded, device)})
            measured[-1] |= of_kernels(sharded.run, device)
            runs.append(sharded.run)
            if name == "onepass":
                found["sources"][operation] = found["sources"].get(operation, {}) | sources_of(sharded.run)
        del expected
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(request["rounds"]):
        for turn in order.sample(range(len(runs)), len(runs)):
            times[turn].append(median_ms(elapsed_ms, runs[turn], device))
    for m, of_run in zip(measured, times):
        m |= {"runs": of_run, "ms": statistics.median(of_run)}
    for m in measured:
        ms = {(r["exchange"], r["implementation"]): r["ms"] for r in measured}
        baseline = ms.get((THEIRS if m["exchange"] == OWN else m["exchange"], BASELINES[operation]))
        m |= {"baseline_ms": baseline, "ratio": None if baseline is None else m["ms"] / baseline}
        alone = ms.get((ALONE, m["implementation"]))  # with as many tokens a process: 1 is the best
        m["scaling"] = None if alone is None else alone / m["ms"]
    found["results"] += measured


def largest(value: float, device: torch.device) -> float:
    """The largest value of any process; not a number if one of them is not."""
    of_process = torch.tensor([value, value != value], dtype=torch.float64, device=device).nan_to_num()
    dist.all_reduce(of_process, op=dist.ReduceOp.MAX)
    return float("nan") if of_process[1] else float(of_process[0])


def beyond_gradients(sharded: Sharded, device: torch.device) -> int | None:
    for t in sharded.leaves:
        t.grad = None
    extra = extra_memory(sharded.run, device)
    return None if extra is None else extra - sum(local(t.grad).nbytes for t in sharded.leaves if t.grad is not None)


def of_kernels(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """The time of the kernels of a call on the first process: of the exchange, and of those that take most of it.

    A kernel of the exchange also waits for the other processes.
    """
    timeline = record(call, device)
    if not timeline:
        return {"kernel_ms": None, "exchange_share": None, "kernels": []}
    of_name: Counter[str] = Counter()
    calls: Counter[str] = Counter(name for name, _, _ in timeline)
    for name, start, end in timeline:
        of_name[name] += (end - start) / 1e3  # type: ignore[assignment]
    total = sum(of_name.values())
    exchanged = sum(ms for name, ms in of_name.items() if kind(name) == KINDS[0])
    heaviest = [(name[:160], calls[name], round(ms, 4)) for name, ms in of_name.most_common(HEAVIEST)]
    return {"kernel_ms": total, "exchange_share": exchanged / total, "kernels": heaviest}


def elapsed_ms(call: Callable[[], Any], device: torch.device) -> float:
    """From an idle device to an idle device, between events of the device."""
    if device.type != "cuda":
        return wall_ms(call, device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    synchronize(device)
    return start.elapsed_time(end)


def shown(results: list[dict[str, Any]]) -> Table:
    columns = ["exchange", "implementation", "ms", "× grouped_mm", "scaling", "exchange share", "extra GiB", "error"]
    table = Table(*columns, title=f"{results[0]['operation']}, {results[0]['dtype']}", title_justify="left")
    for r in results:
        share = "" if r["exchange_share"] is None else f"{r['exchange_share']:.0%}"
        extra = "" if r["extra_bytes"] is None else f"{r['extra_bytes'] / 2**30:.2f}"
        scaling = "" if r["scaling"] is None else f"{r['scaling']:.2f}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3f}"
        table.add_row(r["exchange"], r["implementation"], f"{r['ms']:.3f}", ratio, scaling, share, extra,
                      f"{r['error']:.1e}", style="bold" if r["implementation"] == "onepass" else None)  # fmt: skip
    return table
