"""What the benchmarks have in common: options, the report that they write, memory, exact results and bar charts."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.implementations import Forward, Tensors
from onepass.cli.environment import environment
from onepass.cli.timing import median_ms, synchronize

Item = TypeVar("Item")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Masked = Annotated[float, typer.Option(min=0, max=0.99, help="Share of rows that are masked.")]
Compiled = Annotated[bool, typer.Option("--compile/--no-compile", help="Also run torch.compile.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Also run the installed peers.")]
Out = Annotated[Path, typer.Option(help="Folder that the results are written to.")]
Name = Annotated[str, typer.Option(help="Name of the files of results.")]


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_choices(*given: tuple[list[str] | None, Collection[str]]) -> None:
    for values, choices in given:
        for value in values or ():
            if value not in choices:
                raise typer.BadParameter(f"{value!r}: expected one of {', '.join(choices)}")


def new_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def follow(items: Sequence[Item], title: str, name: Callable[[Item], str], console: Console) -> Iterator[Item]:
    """The items, while a bar says which of them runs; where the output is no terminal, one line names all of them."""
    if not console.is_terminal:
        console.print(f"{title}: {', '.join(dict.fromkeys(map(name, items)))}", highlight=False, soft_wrap=True)
        yield from items
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=len(items))
        for item in items:
            progress.update(task, description=f"{name(item)}: {title}")
            yield item
            progress.advance(task)


def new_report(console: Console, device: torch.device) -> dict[str, Any]:
    """What the JSON of a run begins with. The machine is printed."""
    here, copy = environment(), copy_bandwidth(device)
    console.print(f"{here['gpu'] or here['machine']}, torch {here['torch']}, triton {here['triton']}, "
                  f"copy {copy:.0f} GB/s", highlight=False)  # fmt: skip
    return {
        "command": command(),
        "date": now(),
        "environment": here,
        "copy_gb_per_s": copy,
        "results": [],
        "sources": {},
        "not_run": {},
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def conclude(console: Console, report: dict[str, Any], path: Path) -> None:
    for who, why in report["not_run"].items():
        console.print(f"[dim]not run: {who}: {why}[/dim]", highlight=False)
    console.print(f"wrote {path}.json and .png", highlight=False)


def command() -> str:
    """The command line that repeats this run, without the folder that the results are written to."""
    arguments = list(sys.argv[1:])
    while "--out" in arguments:
        del arguments[(at := arguments.index("--out")) : at + 2]
    return shlex.join(["python", "-m", "benchmarks", *arguments])


def exact(definition: Forward, tensors: Tensors, mask: torch.Tensor | None) -> Tensors:
    """The outputs in float64, computed from blocks of the rows that count.

    Outputs with one value a row are 0 for rows that are masked; scalars are means over the other rows.
    """
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


def extra_memory(run: Callable[[], Any], device: torch.device) -> int | None:
    """The peak of the bytes that a call allocates, its results included; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a copy on the device, bytes read plus bytes written: the most that a memory-bound kernel can reach."""
    size = 2**31 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device, 200) / 1e6


def bars(
    panels: list[tuple[str, list[dict[str, Any]], float]], label: str, environment: dict[str, Any], path: Path
) -> None:
    """A bar chart for each title, of its results, with a dotted line at the time given.

    A panel of a single result is left out, since it compares nothing.
    """
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
