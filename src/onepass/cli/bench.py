"""`onepass bench`: onepass and its peers side by side, in one run, against the card's copy bandwidth."""

import datetime
import gc
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from onepass.cli.environment import environment
from onepass.cli.implementations import OPERATIONS, implementations, random_logits
from onepass.cli.peers import Forward, Implementation

PASSES = ("forward", "backward", "forward+backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL = 1 << 25  # logits up to which calls are bound by the host: the kernels' own time is shown too
ROUNDS = 35
# Options that the other benchmarks have, too.
Masked = Annotated[float, typer.Option(min=0, max=0.99, help="Share of rows that are masked.")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="Run torch.compile too.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Run the installed peers too.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON and the PNG.")]
Name = Annotated[str, typer.Option(help="Their name.")]


def bench(
    op: Annotated[list[str] | None, typer.Option(help=f"Operations: {', '.join(OPERATIONS)}. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="ROWSxVOCABULARY (of routers TOKENSxEXPERTS), e.g. 8192x151936; repeatable."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16, fp32; repeatable.")] = None,
    masked: Masked = 0.0,
    compiled: Compiled = True,
    peers: Peers = True,
    milliseconds: Annotated[int, typer.Option(help="Time spent on each measurement.")] = 100,
    out: Out = Path(".bench"),
    name: Name = "bench",
) -> None:
    """Time operations against torch and installed peers; write a table, a JSON and a PNG."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_choices((op, OPERATIONS), (dtype, DTYPES))
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = new_report(console, device)
    copy, results, missing = report["copy_gb_per_s"], report["results"], report["not_run"]
    out.mkdir(parents=True, exist_ok=True)
    cases = [(o, s) for o in op or OPERATIONS for s in shape or shapes_of(o, device)]
    for (operation, size), kind in itertools.product(cases, dtype or (["bf16"] if device.type == "cuda" else ["fp32"])):
        rows, vocab = parse_shape(size)
        found, absent = implementations(operation, compiled)
        missing |= absent
        found = [i for i in found if (i.masks or not masked) and (peers or i.package in ("onepass", "torch"))]
        case = {"operation": operation, "rows": rows, "vocab": vocab, "dtype": kind, "masked": masked}
        measured: list[dict[str, Any]] = []
        runs: list[Callable[[], Any]] = []
        with Progress(console=console, transient=True) as progress:
            for implementation in progress.track(found, description=f"{operation} {size} {kind}"):
                try:
                    records, again = measure(implementation, case, device, copy, milliseconds)
                except Exception as error:  # a peer may run out of memory, fail to compile, ...
                    missing[f"{implementation.name} {operation} {size}"] = first_line(error)
                    continue
                measured += records
                runs += again if rows * vocab <= SMALL else ()
                del again  # holds the tensors, which may be large
        # The host drifts by more than the implementations differ, so that few rows are timed in short turns.
        walls = [[wall_ms(run, device, milliseconds // 5) for run in runs] for _ in range(ROUNDS)] if runs else []
        for record, times in zip(measured, zip(*walls)):
            record["wall_ms"] = statistics.median(times)
        torch._dynamo.reset()
        results += [case | m for m in measured]
        console.print(table(case, measured))
        (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    plot(report, out / f"{name}.png")
    conclude(console, report, out / name)


def check_choices(*given: tuple[list[str] | None, Collection[str]]) -> None:
    for values, choices in given:
        for value in values or ():
            if value not in choices:
                raise typer.BadParameter(f"{value!r}: expected one of {', '.join(choices)}")


def shapes_of(operation: str, device: torch.device) -> Sequence[str]:
    of = OPERATIONS[operation]
    return of.shapes if device.type == "cuda" else [of.shape_on_cpu]


def new_report(console: Console, device: torch.device) -> dict[str, Any]:
    """What the JSON of a run begins with; what it was run on is printed."""
    here, copy = environment(), copy_bandwidth(device)
    console.print(f"{here['gpu'] or here['machine']}, torch {here['torch']}, triton {here['triton']}, "
                  f"copy {copy:.0f} GB/s", highlight=False)  # fmt: skip
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": here,
        "copy_gb_per_s": copy,
        "results": [],
        "not_run": {},
    }


def conclude(console: Console, report: dict[str, Any], path: Path) -> None:
    for who, why in report["not_run"].items():
        console.print(f"[dim]not run: {who}: {why}[/dim]", highlight=False)
    console.print(f"wrote {path}.json and .png", highlight=False)


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def command() -> str:
    """The command line that repeats this run; where its results go is nobody's business."""
    arguments = list(sys.argv[1:])
    while "--out" in arguments:
        del arguments[(at := arguments.index("--out")) : at + 2]
    return shlex.join(["onepass", *arguments])


def parse_shape(text: str) -> tuple[int, int]:
    rows, _, vocab = text.partition("x")
    if not (rows.isdigit() and vocab.isdigit()):
        raise typer.BadParameter(f"shape {text!r}: expected ROWSxVOCABULARY, e.g. 8192x151936")
    return int(rows), int(vocab)


def measure(
    implementation: Implementation, case: dict[str, Any], device: torch.device, copy: float, milliseconds: int
) -> tuple[list[dict[str, Any]], list[Callable[[], Any]]]:
    """Time, bandwidth, memory and error of every pass of one implementation, and the passes to be run again."""
    logits, others, mask, expected = inputs(case, device)
    kept = float(mask.float().mean()) if mask is not None else 1.0
    size = logits.numel() * logits.element_size()
    first, second = OPERATIONS[case["operation"]].reads
    reads = dict(zip(PASSES, (first, second, first + second)))

    def forward() -> tuple[torch.Tensor, ...]:
        return implementation.forward(logits, *others, mask)

    def both() -> None:
        logits.grad = None
        sum(output.mean() for output in forward()).backward()  # type: ignore[union-attr]

    with torch.no_grad():
        error = max((o - e).abs().max().item() for o, e in zip(forward(), expected))
        passes: dict[str, Callable[[], Any]] = {"forward": torch.no_grad()(forward)}
        found = {"forward": extra_memory(passes["forward"], logits)}
    if implementation.backward:
        logits.requires_grad_()
        passes["forward+backward"] = both
        both()
        logits.grad = None
        found["forward+backward"] = extra_memory(both, logits)
        if implementation.package == "onepass":
            graph = forward()
            gradients = [torch.ones_like(g) for g in graph]
            passes["backward"] = lambda: torch.autograd.grad(graph, logits, gradients, retain_graph=True)
    measured = []
    for name, run in passes.items():
        ms = median_ms(run, device, milliseconds)
        traffic = size * (reads[name] * kept + (name != "forward"))  # masked rows are written but not read
        measured.append({
            "implementation": implementation.name, "version": implementation.version, "pass": name, "ms": ms,
            "gb_per_s": traffic / ms / 1e6, "share_of_copy": traffic / ms / 1e6 / copy,
            "wall_ms": wall_ms(run, device, milliseconds),
            "kernel_us": kernel_us(run, device) if logits.numel() <= SMALL else None,
            "extra_bytes": found.get(name), "error": error if name == "forward" else None,
        })  # fmt: skip
        logits.grad = None
    return measured, list(passes.values())


def inputs(
    case: dict[str, Any], device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor | None, tuple[torch.Tensor, ...]]:
    """Fresh logits (a peer may have overwritten the last), the operation's other inputs, mask, and exact outputs."""
    gc.collect()
    operation = OPERATIONS[case["operation"]]
    generator = torch.Generator(device).manual_seed(0)
    logits = random_logits((case["rows"], case["vocab"]), DTYPES[case["dtype"]], generator)
    mask = None
    if case["masked"]:
        mask = torch.rand(case["rows"], generator=generator, device=device) >= case["masked"]
    others = operation.inputs(logits, mask, generator)
    return logits, others, mask, exact(operation.definition, (logits, *others), mask)


def exact(
    definition: Forward, tensors: tuple[torch.Tensor, ...], mask: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The outputs in float64, from blocks of the rows that count: one a row, 0 for all others, or the mean."""
    count = len(tensors[0])
    rows = torch.arange(count, device=tensors[0].device) if mask is None else mask.nonzero().squeeze(-1)
    blocks = rows.split(256)
    parts = [definition(*(t[b].double() if t.is_floating_point() else t[b] for t in tensors), None) for b in blocks]
    outputs = []
    for output in zip(*parts):
        if output[0].dim():
            outputs.append(output[0].new_zeros(count, *output[0].shape[1:]).index_copy(0, rows, torch.cat(output)))
        else:
            outputs.append(sum(o * len(b) for o, b in zip(output, blocks)) / len(rows))
    return tuple(outputs)


def median_ms(run: Callable[[], Any], device: torch.device, milliseconds: int, warmup: int | None = None) -> float:
    """Between device events, with a cold cache (`triton.testing.do_bench`); on a CPU the wall time.

    ``warmup``: milliseconds before the measured ones, a quarter of them unless said otherwise.
    """
    if device.type != "cuda":
        return wall_ms(run, device, milliseconds)
    from triton.testing import do_bench

    return do_bench(run, warmup=milliseconds // 4 if warmup is None else warmup, rep=milliseconds, return_mode="median")


def wall_ms(run: Callable[[], Any], device: torch.device, milliseconds: int) -> float:
    """From the call until the device is idle: what a user waits where the host is the limit."""
    times: list[float] = []
    for _ in range(10):
        run()
    end = time.perf_counter() + milliseconds / 1e3
    while len(times) < 20 or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def kernel_us(run: Callable[[], Any], device: torch.device, repeats: int = 20) -> float | None:
    """The time that the device spent in kernels, without the gaps between them."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        synchronize(device)
    return sum(event.device_time_total for event in profiler.key_averages()) / repeats


def extra_memory(run: Callable[[], Any], logits: torch.Tensor) -> int | None:
    """Peak of the bytes allocated by a call, its results included."""
    device = logits.device
    if device.type != "cuda":
        return None
    logits.grad = None
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written: the ceiling of a memory-bound kernel."""
    size = 2**31 if device.type == "cuda" else 2**28
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, 200) / 1e6


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(case: dict[str, Any], measured: list[dict[str, Any]]) -> Table:
    title = "{operation}, {rows} x {vocab}, {dtype}".format(**case)
    title += f", {case['masked']:.0%} of the rows masked" if case["masked"] else ""
    columns = ["implementation", "pass", "ms", "GB/s", "of copy", "wall ms", "kernels µs", "extra MB", "max error"]
    result = Table(*columns, title=title, title_justify="left")
    for column in result.columns[2:]:
        column.justify = "right"
    for m in sorted(measured, key=lambda m: (PASSES.index(m["pass"]), m["ms"])):
        optional = (("kernel_us", "{:.1f}", 1), ("extra_bytes", "{:.3f}", 1e6), ("error", "{:.1e}", 1))
        share = [f"{m['gb_per_s']:.0f}", f"{m['share_of_copy']:.1%}"] if m["gb_per_s"] else ["", ""]
        result.add_row(
            m["implementation"], m["pass"], f"{m['ms']:.3f}", *share,
            f"{m['wall_ms']:.3f}", *("" if m[k] is None else form.format(m[k] / unit) for k, form, unit in optional),
            style="bold" if m["implementation"] == "onepass" else None,
        )  # fmt: skip
    return result


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel a case: the time of every implementation, and the time that a copy of as many bytes takes."""
    key = lambda r: (r["operation"], r["pass"], r["rows"], r["vocab"], r["dtype"])  # noqa: E731
    panels = []
    for (operation, name, rows, vocab, dtype), group in itertools.groupby(sorted(report["results"], key=key), key=key):
        fastest = min(found := list(group), key=lambda r: r["ms"])
        title = f"{operation}, {name}\n{rows} x {vocab}, {dtype}"
        panels.append((title, found, fastest["ms"] * fastest["share_of_copy"]))
    bars(panels, "ms (dotted: at copy bandwidth)", report["environment"], path)


def bars(
    panels: list[tuple[str, list[dict[str, Any]], float]], label: str, environment: dict[str, Any], path: Path
) -> None:
    """A panel for each title, its results and the time at its dotted line; none where nothing is compared."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [panel for panel in panels if len(panel[1]) > 1]
    if not panels:
        return
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 2.6 * down), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, results, dotted) in zip(axes.flat, panels):
        group = sorted(results, key=lambda r: -r["ms"])
        ours = ["#c44e52" if r["implementation"] == "onepass" else "#8c8c8c" for r in group]
        times = axis.barh([r["implementation"] for r in group], [r["ms"] for r in group], color=ours)
        axis.bar_label(times, fmt="%.3g", padding=2, fontsize=7)
        axis.axvline(dotted, color="black", linestyle=":", linewidth=1)
        axis.set_title(title, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xlabel(label, fontsize=7)
        axis.margins(x=0.15)
    figure.suptitle(f"{environment['gpu'] or environment['machine']}, torch {environment['torch']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
