"""`python -m benchmarks experts`: the experts of a MoE layer, onepass beside its peers and dense matrix products."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import (
    DTYPES,
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
from benchmarks.in_turns import Dtype, OfTurn, Rounds, compare, free, plot
from benchmarks.operations_experts import OPERATIONS, QUANTIZED, dense, make_batch
from benchmarks.peers_experts import DECODED, MORE, ONEPASS, PEERS, entrants_here
from benchmarks.peers_quantized import QUANTIZED_PEERS
from onepass.cli.workloads import EXPERT_FORM, MIXTRAL, QWEN3_30B, parse_shape

KINDS = ("uniform", "zipf")
BASELINE = "dense"
SIZES = ("tokens", "hidden", "intermediate", "experts", "choices")


def experts(
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(OPERATIONS)} (the default), {', '.join(QUANTIZED)} (quantized weights)."),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"{EXPERT_FORM}, e.g. {MIXTRAL}; repeatable.")] = None,
    routing: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}. Default: both.")] = None,
    dtype: Dtype = None,
    peers: Peers = True,
    rounds: Rounds = 9,
    milliseconds: OfTurn = 100,
    out: Out = Path(".bench"),
    name: Name = "experts",
) -> None:
    """Time experts against dense products of the same FLOPs and installed peers; write a table, a JSON, a PNG."""
    device = choose_device()
    kind = dtype or ("bf16" if device.type == "cuda" else "fp32")
    check_choices((op, [*OPERATIONS, *QUANTIZED]), (routing, KINDS), ([kind], DTYPES))
    shapes = shape or [QWEN3_30B if device.type == "cuda" else "64x32x16x8x2"]
    sizes = [parse_shape(s, EXPERT_FORM, MIXTRAL) for s in shapes]
    console = new_console()
    report = new_report(console, device)
    quantized = not set(op or OPERATIONS).isdisjoint(QUANTIZED)
    others, absent = entrants_here((PEERS | (QUANTIZED_PEERS if quantized else {})) if peers else {})
    report["not_run"] |= absent
    for operation, size, how in itertools.product(op or OPERATIONS, sizes, routing or KINDS):
        case = {"operation": operation, **dict(zip(SIZES, size)), "routing": how, "dtype": kind}
        free(device)
        batch = make_batch(operation, size, how, DTYPES[kind], device)
        bare = dense(batch, OPERATIONS.get(operation, OPERATIONS["experts_lora"]))
        here = [ONEPASS, MORE, DECODED] if operation in QUANTIZED else [ONEPASS]
        here += [peer for peer in others if peer.name not in QUANTIZED_PEERS or operation == "experts_nf4"]
        before = len(report["results"])
        compare(batch, case, title(case), BASELINE, bare, here, rounds, milliseconds, console, report)
        if operation in QUANTIZED:  # the memory of the weights is a part of what is compared
            weights = dict.fromkeys((ONEPASS.name, MORE.name), batch.weight_bytes)
            weights[DECODED.name] = replace(batch, quantized=[]).weight_bytes
            for record in report["results"][before:]:
                record["weight_bytes"] = weights.get(record["implementation"])
        write(report, out / f"{name}.json")  # after every case, in case that a later one fails
    plot(report, title, BASELINE, out / f"{name}.png")
    conclude(console, report, out / name)


def title(case: dict[str, Any]) -> str:
    sizes = " x ".join(str(case[s]) for s in SIZES)
    return f"{case['operation']}, {sizes}, {case['routing']}, {case['dtype']}"
