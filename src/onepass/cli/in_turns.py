"""What is bound by matrix products, against the bare products: implementations that take turns."""

import gc
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from onepass.cli.bench import bars, extra_memory, first_line, median_ms

Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each implementation has its turn.")]
OfTurn = Annotated[int, typer.Option(help="Measured of each turn, after as long a start.")]
Tensors = tuple[Tensor, ...]
Forward = Callable[..., Tensors]


class Batch:
    """One case.

    Attributes:
        hidden: hidden states.
        tensors: what may require a gradient.
        arguments: of every implementation.
        expected: its outputs in float64.
        upstream: their gradients.
    """

    hidden: Tensor
    expected: Tensors
    upstream: Sequence[Tensor | None]

    @property
    def tensors(self) -> list[Tensor]:
        raise NotImplementedError

    @property
    def arguments(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def leaves(self) -> list[Tensor]:
        return [t for t in self.tensors if t.requires_grad]

    def clear(self) -> None:
        for t in self.leaves:
            t.grad = None

    def call(self, forward: Forward) -> Tensors:
        """Forward and, where there are gradients to take, backward."""
        self.clear()
        trained = bool(self.leaves)
        with torch.set_grad_enabled(trained):
            outputs = forward(*self.arguments)
        if trained:
            torch.autograd.backward(outputs, self.upstream)
        return outputs


class Entrant(NamedTuple):
    name: str
    version: str | None
    forward: Forward


def compare(
    batch: Batch,
    title: str,
    baseline: str,
    bare: Callable[[], Any],
    entrants: Sequence[Entrant],
    rounds: int,
    milliseconds: int,
    console: Console,
    missing: dict[str, str],
) -> list[dict[str, Any]]:
    """Every implementation of a case: error and memory one after the other, then the times in turns."""
    device = batch.hidden.device
    measured: list[dict[str, Any]] = [
        {"implementation": baseline, "version": torch.__version__, "extra_bytes": None, "error": None}
    ]
    runs: list[Callable[[], Any]] = [bare]
    with Progress(console=console, transient=True) as progress:
        for entrant in progress.track(entrants, description=title):
            free(device)
            try:
                record = check(entrant.forward, batch)
            except Exception as error:  # a peer may run out of memory, fail to compile, ...
                missing[f"{entrant.name} {title}"] = first_line(error)
            else:
                measured.append({"implementation": entrant.name, "version": entrant.version, **record})
                runs.append(lambda forward=entrant.forward: batch.call(forward))  # type: ignore[misc]
    return in_turns(measured, runs, rounds, milliseconds, device, console)


def check(forward: Forward, batch: Batch) -> dict[str, Any]:
    """The largest error of a first call; the memory of a second, beyond the gradients that come out."""
    error = max((o.detach() - e).abs().max().item() for o, e in zip(batch.call(forward), batch.expected))
    batch.clear()
    extra = extra_memory(lambda: batch.call(forward), batch.hidden)
    gradients = sum(t.grad.nbytes for t in batch.leaves if t.grad is not None)
    return {"extra_bytes": None if extra is None else extra - gradients, "error": error}


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


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(title: str, baseline: str, measured: list[dict[str, Any]]) -> Table:
    """The records of one case, the fastest first."""
    columns = ["implementation", "ms", f"× {baseline}", "extra GiB", "max error"]
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


def plot(report: dict[str, Any], title: Callable[[dict[str, Any]], str], baseline: str, path: Path) -> None:
    """One panel a case: the time of every implementation, and that of the bare products."""
    groups = [list(group) for _, group in itertools.groupby(report["results"], key=title)]
    panels = [(title(g[0]).replace(", ", "\n", 1), g, g[0]["baseline_ms"]) for g in groups]
    bars(panels, f"ms (dotted: {baseline})", report["environment"], path)
