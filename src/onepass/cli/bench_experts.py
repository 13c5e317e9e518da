"""`onepass bench-experts`: the experts of a MoE layer, ours and those of peers, against dense products, in one run."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from onepass.cli.bench import DTYPES, bars, conclude, extra_memory, first_line, new_report
from onepass.cli.bench_head import free, in_turns, table
from onepass.cli.implementations_experts import OPERATIONS, Batch, Forward, dense, implementations, make_batch

KINDS = ("uniform", "zipf")
COLUMNS = ["implementation", "ms", "× dense", "extra GiB", "max error"]
SIZES = ("tokens", "hidden", "intermediate", "experts", "choices")
QWEN3_30B, MIXTRAL = "8192x2048x768x128x8", "4096x4096x14336x8x2"


def bench_experts(
    op: Annotated[list[str] | None, typer.Option(help=f"Operations: {', '.join(OPERATIONS)}. Default: all.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"TOKENSxHIDDENxINTERMEDIATExEXPERTSxCHOICES, e.g. {MIXTRAL}; repeatable.")
    ] = None,
    routing: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}. Default: both.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32.")] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Run the installed peers too.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often each implementation has its turn.")] = 9,
    milliseconds: Annotated[int, typer.Option(help="Measured of each turn, after as long a start.")] = 100,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")] = Path(".bench"),
    name: Annotated[str, typer.Option(help="Their name.")] = "bench-experts",
) -> None:
    """Time experts against a dense product of the same FLOPs and installed peers; write a table, a JSON, a PNG."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    chosen = [(v, list(OPERATIONS)) for v in op or ()] + [(v, list(KINDS)) for v in routing or ()]
    for value, choices in [*chosen, (kind, list(DTYPES))]:
        if value not in choices:
            raise typer.BadParameter(f"{value!r}: expected one of {', '.join(choices)}")
    shapes = [parse_shape(s) for s in shape or [QWEN3_30B if device.type == "cuda" else "64x32x16x8x2"]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = new_report(console, device)
    out.mkdir(parents=True, exist_ok=True)
    for operation, sizes, how in itertools.product(op or OPERATIONS, shapes, routing or KINDS):
        case = {"operation": operation, **dict(zip(SIZES, sizes)), "routing": how, "dtype": kind}
        free(device)
        batch = make_batch(operation, sizes, how, DTYPES[kind], device)
        measured = measure(case, batch, peers, rounds, milliseconds, device, console, report["not_run"])
        report["results"] += [case | m for m in measured]
        console.print(table(title(case), COLUMNS, measured))
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    groups = [list(group) for _, group in itertools.groupby(report["results"], key=title)]
    panels = [(title(g[0]).replace(", ", "\n", 1), g, g[0]["baseline_ms"]) for g in groups]
    bars(panels, "ms (dotted: dense)", report["environment"], out / f"{name}.png")
    conclude(console, report, out / name)


def parse_shape(text: str) -> tuple[int, int, int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 5 or not all(s.isdigit() for s in sizes):
        raise typer.BadParameter(f"shape {text!r}: expected {'x'.join(s.upper() for s in SIZES)}, e.g. {MIXTRAL}")
    return tuple(int(s) for s in sizes)  # type: ignore[return-value]


def measure(
    case: dict[str, Any], batch: Batch, peers: bool, rounds: int, milliseconds: int, device: torch.device,
    console: Console, missing: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Every implementation of a case: error and memory one after the other, then the times in turns."""
    found, absent = implementations(peers)
    missing |= absent
    measured: list[dict[str, Any]] = [
        {"implementation": "dense", "version": torch.__version__, "extra_bytes": None, "error": None}
    ]
    runs: list[Callable[[], Any]] = [dense(batch, OPERATIONS[case["operation"]])]
    for name, (version, forward) in found.items():
        free(device)
        try:
            record = check(forward, batch)
        except Exception as error:  # a peer may run out of memory, fail to compile, ...
            missing[f"{name} {title(case)}"] = first_line(error)
        else:
            measured.append({"implementation": name, "version": version, **record})
            runs.append(lambda forward=forward: batch.call(forward))  # type: ignore[misc]
    return in_turns(measured, runs, rounds, milliseconds, device, console)


def check(forward: Forward, batch: Batch) -> dict[str, Any]:
    """The largest error of a first call; the memory of a second, beyond the gradients that come out."""
    error = (batch.call(forward).detach() - batch.expected).abs().max().item()
    batch.clear()
    extra = extra_memory(lambda: batch.call(forward), batch.hidden)
    gradients = sum(t.grad.nbytes for t in batch.leaves if t.grad is not None)
    return {"extra_bytes": None if extra is None else extra - gradients, "error": error}


def title(case: dict[str, Any]) -> str:
    sizes = " x ".join(str(case[s]) for s in SIZES)
    return f"{case['operation']}, {sizes}, {case['routing']}, {case['dtype']}"
