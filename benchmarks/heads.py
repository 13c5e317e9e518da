"""`python -m benchmarks heads`: losses of a linear head, onepass beside its peers and the bare matrix products."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import (
    DTYPES,
    Compiled,
    Masked,
    Name,
    Out,
    Peers,
    check_choices,
    choose_device,
    conclude,
    new_console,
    new_report,
    write,
)
from benchmarks.implementations import available
from benchmarks.in_turns import Dtype, Entrant, OfTurn, Rounds, compare, free, plot
from benchmarks.operations_heads import HEAD_OPERATIONS
from benchmarks.peers_heads import HEAD_PEERS
from onepass.cli.workloads import parse_shape

ON_REQUEST = "linear_kl_div", "_wide", "_invariant"
DEFAULT = [name for name in HEAD_OPERATIONS if not any(part in name for part in ON_REQUEST)]
BASELINE = "bare GEMMs"
FORM, SHAPE, SHAPE_ON_CPU = "ROWSxHIDDENxVOCABULARY", "8192x4096x151936", "64x32x1000"


def heads(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Operations: {', '.join(HEAD_OPERATIONS)}. Default: all but divergences and those of docs/parity.md."
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"{FORM}, e.g. {SHAPE}; repeatable.")] = None,
    dtype: Dtype = None,
    masked: Masked = 0.0,
    compiled: Compiled = True,
    peers: Peers = True,
    rounds: Rounds = 9,
    milliseconds: OfTurn = 200,
    out: Out = Path(".bench"),
    name: Name = "heads",
) -> None:
    """Time losses of a linear head against bare matrix products and installed peers; write a table, a JSON, a PNG."""
    device = choose_device()
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    check_choices((op, HEAD_OPERATIONS), ([kind], DTYPES))
    shapes = shape or [SHAPE if device.type == "cuda" else SHAPE_ON_CPU]
    sizes = [parse_shape(s, FORM, SHAPE) for s in shapes]
    console = new_console()
    report = new_report(console, device)
    for chosen, (rows, hidden, vocab) in itertools.product(op or DEFAULT, sizes):
        case = {"operation": chosen, "rows": rows, "hidden": hidden, "vocab": vocab, "dtype": kind, "masked": masked}
        operation = HEAD_OPERATIONS[chosen]
        installed = HEAD_PEERS.get(chosen, []) if peers else []
        found, absent = available(operation.ours, operation.eager, operation.masks, installed, compiled)
        report["not_run"] |= absent
        entrants = [Entrant(i.name, i.version, i.forward) for i in found if i.masks or not masked]
        free(device)
        batch = operation.batch((rows, hidden, vocab), DTYPES[kind], masked, device)
        compare(
            batch, case, title(case), operation.baseline, operation.bare(batch), entrants, rounds, milliseconds,
            console, report,
        )  # fmt: skip
        if compiled:
            torch._dynamo.reset()
        write(report, out / f"{name}.json")  # after every case, in case that a later one fails
    plot(report, title, BASELINE, out / f"{name}.png")
    conclude(console, report, out / name)


def title(case: dict[str, Any]) -> str:
    text = "{operation}, {rows} x {hidden} x {vocab}, {dtype}".format(**case)
    return text + (f", {case['masked']:.0%} of the rows masked" if case["masked"] else "")
