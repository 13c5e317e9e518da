"""`onepass bench-experts`: the experts of a MoE layer, ours and those of peers, against dense products, in one run."""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from onepass.cli.bench import DTYPES, Name, Out, Peers, check_choices, conclude, new_report
from onepass.cli.implementations_experts import OPERATIONS, dense, implementations, make_batch
from onepass.cli.in_turns import Dtype, OfTurn, Rounds, compare, free, plot, table

KINDS = ("uniform", "zipf")
BASELINE = "dense"
SIZES = ("tokens", "hidden", "intermediate", "experts", "choices")
QWEN3_30B, MIXTRAL = "8192x2048x768x128x8", "4096x4096x14336x8x2"


def bench_experts(
    op: Annotated[list[str] | None, typer.Option(help=f"Operations: {', '.join(OPERATIONS)}. Default: all.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help=f"TOKENSxHIDDENxINTERMEDIATExEXPERTSxCHOICES, e.g. {MIXTRAL}; repeatable.")
    ] = None,
    routing: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}. Default: both.")] = None,
    dtype: Dtype = None,
    peers: Peers = True,
    rounds: Rounds = 9,
    milliseconds: OfTurn = 100,
    out: Out = Path(".bench"),
    name: Name = "bench-experts",
) -> None:
    """Time experts against a dense product of the same FLOPs and installed peers; write a table, a JSON, a PNG."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    check_choices((op, OPERATIONS), (routing, KINDS), ([kind], DTYPES))
    shapes = [parse_shape(s) for s in shape or [QWEN3_30B if device.type == "cuda" else "64x32x16x8x2"]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = new_report(console, device)
    out.mkdir(parents=True, exist_ok=True)
    entrants, absent = implementations(peers)
    report["not_run"] |= absent
    for operation, sizes, how in itertools.product(op or OPERATIONS, shapes, routing or KINDS):
        case = {"operation": operation, **dict(zip(SIZES, sizes)), "routing": how, "dtype": kind}
        free(device)
        batch = make_batch(operation, sizes, how, DTYPES[kind], device)
        bare = dense(batch, OPERATIONS[operation])
        measured = compare(
            batch, title(case), BASELINE, bare, entrants, rounds, milliseconds, console, report["not_run"]
        )
        report["results"] += [case | m for m in measured]
        console.print(table(title(case), BASELINE, measured))
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    plot(report, title, BASELINE, out / f"{name}.png")
    conclude(console, report, out / name)


def parse_shape(text: str) -> tuple[int, int, int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 5 or not all(s.isdigit() for s in sizes):
        raise typer.BadParameter(f"shape {text!r}: expected {'x'.join(s.upper() for s in SIZES)}, e.g. {MIXTRAL}")
    return tuple(int(s) for s in sizes)  # type: ignore[return-value]


def title(case: dict[str, Any]) -> str:
    sizes = " x ".join(str(case[s]) for s in SIZES)
    return f"{case['operation']}, {sizes}, {case['routing']}, {case['dtype']}"
