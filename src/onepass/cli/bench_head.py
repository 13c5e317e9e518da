"""`onepass bench-head`: losses from hidden states, ours and those of peers, against the bare products, in one run."""

import gc
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onepass.cli.bench import DTYPES, bars, conclude, extra_memory, first_line, median_ms, new_report
from onepass.cli.implementations import available
from onepass.cli.implementations_head import HEAD_OPERATIONS, Batch
from onepass.cli.peers import Forward
from onepass.cli.peers_head import HEAD_PEERS

DEFAULT = [name for name in HEAD_OPERATIONS if name != "linear_kl_div"]
COLUMNS = ["implementation", "ms", "× bare GEMMs", "extra GiB", "max error"]


def bench_head(
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"Operations: {', '.join(HEAD_OPERATIONS)}. Default: all but the last."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="ROWSxHIDDENxVOCABULARY; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32.")] = None,
    masked: Annotated[float, typer.Option(min=0, max=0.99, help="Share of rows that are masked.")] = 0.0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Run torch.compile too.")] = True,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Run the installed peers too.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often each implementation has its turn.")] = 9,
    milliseconds: Annotated[int, typer.Option(help="Measured of each turn, after as long a start.")] = 200,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path(".bench"),
    name: Annotated[str, typer.Option(help="Their name.")] = "bench-head",
) -> None:
    """Time losses of a linear head against bare matrix products and installed peers; write a table, a JSON, a PNG."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = shape or ["8192x4096x151936" if device.type == "cuda" else "64x32x1000"]
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    for value, choices in [(v, list(HEAD_OPERATIONS)) for v in op or ()] + [(kind, list(DTYPES))]:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}: expected one of {', '.join(choices)}")
    sizes = [parse_shape(s) for s in shapes]
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = new_report(console, device)
    out.mkdir(parents=True, exist_ok=True)
    for operation, (rows, hidden, vocab) in itertools.product(op or DEFAULT, sizes):
        case = {"operation": operation, "rows": rows, "hidden": hidden, "vocab": vocab, "dtype": kind, "masked": masked}
        measured = measure(case, compiled, peers, rounds, milliseconds, device, console, report["not_run"])
        torch._dynamo.reset()
        report["results"] += [case | m for m in measured]
        console.print(table(title(case), COLUMNS, measured))
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    plot(report, out / f"{name}.png")
    conclude(console, report, out / name)


def parse_shape(text: str) -> tuple[int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(s.isdigit() for s in sizes):
        raise typer.BadParameter(f"shape {text!r}: expected ROWSxHIDDENxVOCABULARY, e.g. 8192x4096x151936")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def measure(
    case: dict[str, Any],
    compiled: bool,
    peers: bool,
    rounds: int,
    milliseconds: int,
    device: torch.device,
    console: Console,
    missing: dict[str, str],
) -> list[dict[str, Any]]:
    """Every implementation of a case: error and memory one after the other, then the times in turns."""
    operation = HEAD_OPERATIONS[case["operation"]]
    installed = HEAD_PEERS[case["operation"]] if peers else []
    found, absent = available(operation.ours, operation.eager, operation.masks, installed, compiled)
    missing |= absent
    found = [i for i in found if i.masks or not case["masked"]]
    free(device)
    shape = case["rows"], case["hidden"], case["vocab"]
    batch = operation.batch(shape, DTYPES[case["dtype"]], case["masked"], device)
    measured: list[dict[str, Any]] = [
        {"implementation": operation.baseline, "version": torch.__version__, "extra_bytes": None, "error": None}
    ]
    runs: list[Callable[[], Any]] = [operation.bare(batch)]
    with Progress(console=console, transient=True) as progress:
        size = "x".join(str(s) for s in shape)
        for implementation in progress.track(found, description=f"{case['operation']} {size} {case['dtype']}"):
            free(device)
            try:
                record = check(implementation.forward, batch)
            except Exception as error:  # a peer may run out of memory, fail to compile, ...
                missing[f"{implementation.name} {case['operation']} {size}"] = first_line(error)
            else:
                measured.append({"implementation": implementation.name, "version": implementation.version, **record})
                runs.append(lambda forward=implementation.forward: batch.call(forward))  # type: ignore[misc]
    return in_turns(measured, runs, rounds, milliseconds, device, console)


def in_turns(
    measured: list[dict[str, Any]],
    runs: list[Callable[[], Any]],
    rounds: int,
    milliseconds: int,
    device: torch.device,
    console: Console,
) -> list[dict[str, Any]]:
    """The records with the times of their runs, and the ratio to the first's.

    The clock of a card that multiplies matrices is bound by power, and follows what the card did in the last few
    hundred milliseconds: what is compared takes turns, in an order that changes, and what a turn begins with is not
    measured.
    """
    times: list[list[float]] = [[] for _ in runs]
    order = random.Random(0)
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(rounds), description="rounds"):
            for turn in order.sample(range(len(runs)), len(runs)):
                times[turn].append(median_ms(runs[turn], device, milliseconds, milliseconds))
    for record, of_run in zip(measured, times):
        record["runs"], record["ms"] = of_run, statistics.median(of_run)
        record["baseline_ms"] = measured[0]["ms"]
        record["ratio"] = record["ms"] / record["baseline_ms"]
    return measured


def check(forward: Forward, batch: Batch) -> dict[str, Any]:
    """The largest error of a first call; the memory of a second, beyond the gradients that come out."""
    outputs = batch.call(forward)
    error = max((o.detach() - e).abs().max().item() for o, e in zip(outputs, batch.expected))
    del outputs
    batch.weight.grad = None
    extra = extra_memory(lambda: batch.call(forward), batch.hidden)
    gradients = sum(t.grad.nbytes for t in (batch.hidden, batch.weight) if t.grad is not None)
    return {"extra_bytes": None if extra is None else extra - gradients, "error": error}


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def title(case: dict[str, Any]) -> str:
    text = "{operation}, {rows} x {hidden} x {vocab}, {dtype}".format(**case)
    return text + (f", {case['masked']:.0%} of the rows masked" if case["masked"] else "")


def table(title: str, columns: list[str], measured: list[dict[str, Any]]) -> Table:
    """The records of one case, the fastest first; ``columns`` name the time, its ratio, the memory and the error."""
    result = Table(*columns, title=title, title_justify="left")
    for column in result.columns[1:]:
        column.justify = "right"
    for m in sorted(measured, key=lambda m: m["ms"]):
        result.add_row(
            m["implementation"], f"{m['ms']:.3f}", f"{m['ratio']:.3f}",
            "" if m["extra_bytes"] is None else f"{m['extra_bytes'] / 2**30:.3f}",
            "" if m["error"] is None else f"{m['error']:.1e}",
            style="bold" if m["implementation"] == "onepass" else None,
        )  # fmt: skip
    return result


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel a case: the time of every implementation, and that of the bare products."""
    groups = [list(group) for _, group in itertools.groupby(report["results"], key=title)]
    panels = [(title(g[0]).replace(", ", "\n", 1), g, g[0]["baseline_ms"]) for g in groups]
    bars(panels, "ms (dotted: bare GEMMs)", report["environment"], path)
