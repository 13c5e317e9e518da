"""`onepass bench-head`: losses from hidden states, ours and those of peers, against the bare products, in one run."""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from onepass.cli.bench import DTYPES, Compiled, Masked, Name, Out, Peers, check_choices, conclude, new_report
from onepass.cli.implementations import available
from onepass.cli.implementations_head import HEAD_OPERATIONS
from onepass.cli.in_turns import Dtype, Entrant, OfTurn, Rounds, compare, free, plot, table
from onepass.cli.peers_head import HEAD_PEERS

DEFAULT = [name for name in HEAD_OPERATIONS if name != "linear_kl_div"]
BASELINE = "bare GEMMs"


def bench_head(
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"Operations: {', '.join(HEAD_OPERATIONS)}. Default: all but the last."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="ROWSxHIDDENxVOCABULARY; repeatable.")] = None,
    dtype: Dtype = None,
    masked: Masked = 0.0,
    compiled: Compiled = True,
    peers: Peers = True,
    rounds: Rounds = 9,
    milliseconds: OfTurn = 200,
    out: Out = Path(".bench"),
    name: Name = "bench-head",
) -> None:
    """Time losses of a linear head against bare matrix products and installed peers; write a table, a JSON, a PNG."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    check_choices((op, HEAD_OPERATIONS), ([kind], DTYPES))
    sizes = [parse_shape(s) for s in shape or ["8192x4096x151936" if device.type == "cuda" else "64x32x1000"]]
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = new_report(console, device)
    out.mkdir(parents=True, exist_ok=True)
    for chosen, (rows, hidden, vocab) in itertools.product(op or DEFAULT, sizes):
        case = {"operation": chosen, "rows": rows, "hidden": hidden, "vocab": vocab, "dtype": kind, "masked": masked}
        operation = HEAD_OPERATIONS[chosen]
        installed = HEAD_PEERS[chosen] if peers else []
        found, absent = available(operation.ours, operation.eager, operation.masks, installed, compiled)
        report["not_run"] |= absent
        entrants = [Entrant(i.name, i.version, i.forward) for i in found if i.masks or not masked]
        free(device)
        batch = operation.batch((rows, hidden, vocab), DTYPES[kind], masked, device)
        measured = compare(
            batch, title(case), operation.baseline, operation.bare(batch), entrants, rounds, milliseconds, console,
            report["not_run"],
        )  # fmt: skip
        torch._dynamo.reset()
        report["results"] += [case | m for m in measured]
        console.print(table(title(case), BASELINE, measured))
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    plot(report, title, BASELINE, out / f"{name}.png")
    conclude(console, report, out / name)


def parse_shape(text: str) -> tuple[int, int, int]:
    sizes = text.split("x")
    if len(sizes) != 3 or not all(s.isdigit() for s in sizes):
        raise typer.BadParameter(f"shape {text!r}: expected ROWSxHIDDENxVOCABULARY, e.g. 8192x4096x151936")
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def title(case: dict[str, Any]) -> str:
    text = "{operation}, {rows} x {hidden} x {vocab}, {dtype}".format(**case)
    return text + (f", {case['masked']:.0%} of the rows masked" if case["masked"] else "")
