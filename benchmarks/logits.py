"""`python -m benchmarks logits`: operations on logits, onepass beside its peers and the card's copy bandwidth."""

import gc
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.harness import (
    DTYPES,
    Compiled,
    Masked,
    Name,
    Out,
    Peers,
    bars,
    check_choices,
    choose_device,
    conclude,
    exact,
    extra_memory,
    follow,
    new_console,
    new_report,
    write,
)
from benchmarks.implementations import Implementation, Tensors, first_line
from benchmarks.operations_logits import OPERATIONS, implementations
from benchmarks.sources import add_sources
from onepass.cli.timing import SMALL, kernel_us, median_ms, wall_ms
from onepass.cli.workloads import LOSS_FORM, LOSS_SHAPES, parse_shape, random_logits

PASSES = ("forward", "backward", "forward+backward")
ROUNDS = 35
Run = Callable[[], Any]


def logits(
    op: Annotated[list[str] | None, typer.Option(help=f"Operations: {', '.join(OPERATIONS)}. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"{LOSS_FORM} (of routers TOKENSxEXPERTS), e.g. {LOSS_SHAPES[0]}; repeatable."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeatable.")] = None,
    masked: Masked = 0.0,
    compiled: Compiled = True,
    peers: Peers = True,
    milliseconds: Annotated[int, typer.Option(help="Time spent on each measurement.")] = 100,
    out: Out = Path(".bench"),
    name: Name = "logits",
) -> None:
    """Time operations on logits against torch and the installed peers; write a table, a JSON and a PNG."""
    device = choose_device()
    check_choices((op, OPERATIONS), (dtype, DTYPES))
    cases = [(o, sizes_of(s)) for o in op or OPERATIONS for s in shape or shapes_of(o, device)]
    console = new_console()
    report = new_report(console, device)
    missing = report["not_run"]
    kinds = dtype or ["bf16" if device.type == "cuda" else "fp32"]
    for (operation, (rows, vocab)), kind in itertools.product(cases, kinds):
        found, absent = implementations(operation, compiled, peers)
        missing |= absent
        found = [i for i in found if i.masks or not masked]
        case = {"operation": operation, "rows": rows, "vocab": vocab, "dtype": kind, "masked": masked}
        measured: list[dict[str, Any]] = []
        runs: list[Run] = []
        title = f"{operation} {rows}x{vocab} {kind}"
        for implementation in follow(found, title, lambda i: i.name, console):
            try:
                records, again = measure(implementation, case, device, report, milliseconds)
            except Exception as error:  # a peer may run out of memory, fail to compile, ...
                missing[f"{implementation.name} {operation} {rows}x{vocab}"] = first_line(error)
                continue
            measured += records
            runs += again if is_limited_by_host(rows * vocab, device) else ()
            del again  # which holds the tensors, and these may be large
        # The host's speed drifts by more than the implementations differ, so that few rows are timed in short turns.
        if runs:
            walls: list[list[float]] = [[] for _ in runs]
            names = [m["implementation"] for m in measured]
            turns = list(range(len(runs))) * ROUNDS
            for turn in follow(turns, f"{title}, time in turns", names.__getitem__, console):
                walls[turn].append(wall_ms(runs[turn], device, milliseconds // 5))
            for record, times in zip(measured, walls):
                record["wall_ms"] = statistics.median(times)
        if compiled:
            torch._dynamo.reset()
        report["results"] += [case | m for m in measured]
        console.print(table(case, measured))
        write(report, out / f"{name}.json")  # after every case, in case that a later one fails
    plot(report, out / f"{name}.png")
    conclude(console, report, out / name)


def is_limited_by_host(numel: int, device: torch.device) -> bool:
    """Whether the wall time is measured too, in turns; not on a CPU, where that takes too long for no result."""
    return device.type == "cuda" and numel <= SMALL


def shapes_of(operation: str, device: torch.device) -> Sequence[str]:
    of = OPERATIONS[operation]
    return of.shapes if device.type == "cuda" else [of.shape_on_cpu]


def sizes_of(shape: str) -> tuple[int, ...]:
    return parse_shape(shape, LOSS_FORM, LOSS_SHAPES[0])


def measure(
    implementation: Implementation, case: dict[str, Any], device: torch.device, report: dict[str, Any],
    milliseconds: int,
) -> tuple[list[dict[str, Any]], list[Run]]:  # fmt: skip
    """Time, bandwidth, memory and error of every pass of an implementation, and the passes themselves."""
    logits, others, mask, expected = inputs(case, device)
    kept = float(mask.float().mean()) if mask is not None else 1.0
    size = logits.numel() * logits.element_size()
    first, second = OPERATIONS[case["operation"]].reads
    reads = dict(zip(PASSES, (first, second, first + second)))

    def forward() -> Tensors:
        return implementation.forward(logits, *others, mask)

    def both() -> None:
        logits.grad = None
        outputs = forward()
        if few:  # a mean would take longer than what is measured
            torch.autograd.grad(outputs, logits, gradients)
        else:
            sum(output.mean() for output in outputs).backward()  # type: ignore[union-attr]

    with torch.no_grad():
        outputs = forward()
        error = max((o - e).abs().max().item() for o, e in zip(outputs, expected))
        few, gradients = is_limited_by_host(logits.numel(), device), [torch.ones_like(o) for o in outputs]
        del outputs
        passes: dict[str, Run] = {"forward": torch.no_grad()(forward)}
        found = {"forward": extra_memory(passes["forward"], device)}
    if implementation.backward:
        logits.requires_grad_()
        passes["forward+backward"] = both
        both()
        logits.grad = None
        found["forward+backward"] = extra_memory(both, device)
        if implementation.package == "onepass":
            add_sources(report, case["operation"], lambda: [run() for run in (passes["forward"], both)])
            graph = forward()
            passes["backward"] = lambda: torch.autograd.grad(graph, logits, gradients, retain_graph=True)
    measured = []
    for name, run in passes.items():
        ms = median_ms(run, device, milliseconds)
        traffic = size * (reads[name] * kept + (name != "forward"))  # masked rows are written but not read
        gb_per_s = traffic / ms / 1e6
        measured.append({
            "implementation": implementation.name, "version": implementation.version, "pass": name, "ms": ms,
            "gb_per_s": gb_per_s, "share_of_copy": gb_per_s / report["copy_gb_per_s"],
            "wall_ms": None if few else wall_ms(run, device, milliseconds),
            "kernel_us": kernel_us(run, device) if few else None,
            "cold_kernel_us": kernel_us(run, device, cold=True) if few else None,
            "extra_bytes": found.get(name), "error": error if name == "forward" else None,
        })  # fmt: skip
        logits.grad = None
    return measured, list(passes.values())


def inputs(case: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, Tensors, torch.Tensor | None, Tensors]:
    """New logits (a peer may have overwritten the last), the operation's other inputs, the mask and exact outputs."""
    gc.collect()
    operation = OPERATIONS[case["operation"]]
    generator = torch.Generator(device).manual_seed(0)
    logits = random_logits((case["rows"], case["vocab"]), DTYPES[case["dtype"]], generator)
    mask = None
    if case["masked"]:
        mask = torch.rand(case["rows"], generator=generator, device=device) >= case["masked"]
    others = operation.inputs(logits, mask, generator)
    return logits, others, mask, exact(operation.definition, (logits, *others), mask)


def table(case: dict[str, Any], measured: list[dict[str, Any]]) -> Table:
    title = "{operation}, {rows} x {vocab}, {dtype}".format(**case)
    title += f", {case['masked']:.0%} of the rows masked" if case["masked"] else ""
    columns = [
        "implementation", "pass", "ms", "GB/s", "of copy", "wall ms", "kernels µs", "cold µs", "extra MB", "max error",
    ]  # fmt: skip
    result = Table(*columns, title=title, title_justify="left")
    for column in result.columns[2:]:
        column.justify = "right"
    for m in sorted(measured, key=lambda m: (PASSES.index(m["pass"]), m["ms"])):
        kernels = [(key, "{:.1f}", 1) for key in ("kernel_us", "cold_kernel_us")]
        optional = (*kernels, ("extra_bytes", "{:.3f}", 1e6), ("error", "{:.1e}", 1))
        share = [f"{m['gb_per_s']:.0f}", f"{m['share_of_copy']:.1%}"] if m["gb_per_s"] else ["", ""]
        result.add_row(
            m["implementation"], m["pass"], f"{m['ms']:.3f}", *share,
            f"{m['wall_ms']:.3f}", *("" if m[k] is None else form.format(m[k] / unit) for k, form, unit in optional),
            style="bold" if m["implementation"] == "onepass" else None,
        )  # fmt: skip
    return result


def plot(report: dict[str, Any], path: Path) -> None:
    """A panel for each case: the time of every implementation, and the time that a copy of as many bytes takes."""
    key = lambda r: (r["operation"], r["pass"], r["rows"], r["vocab"], r["dtype"])  # noqa: E731
    panels = []
    for (operation, name, rows, vocab, dtype), group in itertools.groupby(sorted(report["results"], key=key), key=key):
        fastest = min(found := list(group), key=lambda r: r["ms"])
        title = f"{operation}, {name}\n{rows} x {vocab}, {dtype}"
        panels.append((title, found, fastest["ms"] * fastest["share_of_copy"]))
    bars(panels, "ms (dotted: at copy bandwidth)", report["environment"], path)
