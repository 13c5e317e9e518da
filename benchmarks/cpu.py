"""`python -m benchmarks cpu`: the losses of `onepass demo` on a CPU, torch's and those of onepass, in turns.

onepass computes in plain PyTorch there. Every turn is one call, so that other load of the machine meets all alike.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.harness import DTYPES, Name, Out, command, follow, new_console, now, write
from benchmarks.sources import add_sources
from onepass.cli.demo_curve import loss_and_gradients
from onepass.cli.demo_head import HEADS
from onepass.cli.environment import environment
from onepass.cli.measure import peak_memory

SHAPES = ["256x4096", "1024x4096", "2048x4096", "64x32000", "8x151936", "1024x128x4096", "1024x128x32768"]
PASSES = "forward", "forward+backward"
FEWEST_TURNS = 5
Run = Callable[[], Any]


def cpu(
    shape: Annotated[list[str] | None, typer.Option(help="ROWSxVOCAB or ROWSxHIDDENxVOCAB; repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16 (of logits); repeatable. Default: both.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.", show_default="as torch")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each case.")] = 4.0,
    out: Out = Path(".bench"),
    name: Name = "cpu",
) -> None:
    """Time cross-entropy on a CPU, of logits and of a linear head, beside torch's; write a table and a JSON."""
    torch.set_num_threads(threads or torch.get_num_threads())
    report: dict[str, Any] = {"command": command(), "date": now(), "environment": environment()}
    report |= {"threads": torch.get_num_threads(), "results": [], "sources": {}}
    console = new_console()
    shown = Table("loss", "shape", "dtype", "pass", "", "ms", "quartiles", "MiB")
    cases = [(s, d) for s, d in itertools.product(shape or SHAPES, dtype or ["fp32", "bf16"])]
    cases = [(s, d) for s, d in cases if d == "fp32" or s.count("x") == 1]
    for size, of in follow(cases, "losses on a CPU", " ".join, console):
        rows, *hidden, vocab = map(int, size.split("x"))
        operation = "linear_cross_entropy" if hidden else "cross_entropy"
        case: dict[str, Any] = {"operation": operation, "rows": rows}
        case |= {"hidden": hidden[0] if hidden else None, "vocab": vocab, "dtype": of}
        for m in measure(case, inputs_of(rows, hidden, vocab, DTYPES[of]), seconds, report):
            report["results"].append(case | m)
            spread = " to ".join(f"{q:.3f}" for q in m["quartiles"])
            shown.add_row(operation, size, of, m["pass"], m["implementation"], f"{m['ms']:.3f}", spread,
                          f"{m['peak_bytes'] / 2**20:.1f}")  # fmt: skip
        write(report, out / f"{name}.json")
    console.print(shown)


def inputs_of(rows: int, hidden: list[int], vocab: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor]:
    """Logits, or hidden states and a weight; and labels."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, *hidden), (vocab, *hidden)] if hidden else [(rows, vocab)]
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return tuple(inputs), torch.randint(vocab, (rows,), generator=generator)


def measure(
    case: dict[str, Any], of: tuple[tuple[Tensor, ...], Tensor], seconds: float, report: dict[str, Any]
) -> list[dict[str, Any]]:
    """Time and memory of each implementation, forward alone and with the gradient."""
    inputs, labels = of
    losses = dict(HEADS["linear" if case["hidden"] else "logits"].losses)
    if case["dtype"] != "fp32":
        losses["torch, rounded"] = torch.nn.functional.cross_entropy
    found = []
    for direction in PASSES:
        runs: dict[str, Run] = {}
        for name, loss in losses.items():
            forward = partial(loss, *inputs, labels)
            runs[name] = forward if direction == "forward" else partial(loss_and_gradients, loss, inputs, labels)
        memory = {name: peak_memory(run, labels.device) for name, run in runs.items()}
        for name, times in times_in_turns(runs, seconds).items():
            first, middle, third = statistics.quantiles(times, n=4)
            found.append({"pass": direction, "implementation": name, "ms": middle, "quartiles": [first, third],
                          "turns": len(times), "peak_bytes": memory[name]})  # fmt: skip
    add_sources(report, case["operation"], runs["onepass"])  # of both directions
    return found


def times_in_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """The milliseconds of the calls of each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["onepass"]) < FEWEST_TURNS:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times
