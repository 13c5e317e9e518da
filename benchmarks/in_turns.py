"""Operations whose speed is bound by matrix products, against the bare products: implementations take turns."""

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
from rich.table import Table
from torch import Tensor

from benchmarks.harness import bars, extra_memory, follow
from benchmarks.implementations import Forward, Tensors, first_line
from benchmarks.sources import add_sources
from onepass.cli.timing import median_ms

Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32.")]
Rounds = Annotated[int, typer.Option(min=1, help="How many turns each implementation has.")]
OfTurn = Annotated[int, typer.Option(help="How long each turn is measured, after a warm-up of the same length.")]


class Batch:
    """The inputs of one case.

    Attributes:
        hidden: the hidden states.
        tensors: all tensors that may require a gradient.
        arguments: the arguments of every implementation.
        expected: the outputs in float64.
        upstream: the gradients of the outputs.
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
        """Run the forward and, if any tensor requires a gradient, the backward."""
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
    case: dict[str, Any],
    title: str,
    baseline: str,
    bare: Callable[[], Any],
    entrants: Sequence[Entrant],
    rounds: int,
    milliseconds: int,
    console: Console,
    report: dict[str, Any],
) -> None:
    """Add the results of every implementation of a case to ``report`` and print them.

    Error and memory are measured for one implementation after the other, then the times in turns.
    """
    device = batch.hidden.device
    measured: list[dict[str, Any]] = [
        {"implementation": baseline, "version": torch.__version__, "extra_bytes": None, "error": None}
    ]
    runs: list[Callable[[], Any]] = [bare]
    for entrant in follow(entrants, f"{title}, error and memory", lambda e: e.name, console):
        free(device)
        try:
            record = check(entrant.forward, batch)
        except Exception as error:  # a peer may run out of memory, fail to compile, ...
            report["not_run"][f"{entrant.name} {title}"] = first_line(error)
        else:
            if entrant.name == "onepass":
                add_sources(report, case["operation"], lambda forward=entrant.forward: batch.call(forward))  # type: ignore[misc]
            measured.append({"implementation": entrant.name, "version": entrant.version, **record})
            runs.append(lambda forward=entrant.forward: batch.call(forward))  # type: ignore[misc]
    time_in_turns(title, measured, runs, rounds, milliseconds, device, console)
    report["results"] += [case | m for m in measured]
    console.print(table(title, baseline, measured))


def check(forward: Forward, batch: Batch) -> dict[str, Any]:
    """The largest error of a first call, and the memory of a second, besides the gradients that it returns."""
    error = max((o.detach() - e).abs().max().item() for o, e in zip(batch.call(forward), batch.expected))
    batch.clear()
    extra = extra_memory(lambda: batch.call(forward), batch.hidden.device)
    gradients = sum(t.grad.nbytes for t in batch.leaves if t.grad is not None)
    return {"extra_bytes": None if extra is None else extra - gradients, "error": error}


def time_in_turns(
    title: str,
    measured: list[dict[str, Any]],
    runs: list[Callable[[], Any]],
    rounds: int,
    milliseconds: int,
    device: torch.device,
    console: Console,
) -> None:
    """Add to the records the times of their runs, and the ratio to the time of the first run.

    The clock of a card that multiplies matrices is limited by power, and depends on what the card did in the last few
    hundred milliseconds. So the implementations take turns, in an order that changes, and the beginning of a turn is
    not measured.
    """
    times: list[list[float]] = [[] for _ in runs]
    order = random.Random(0)
    turns = [turn for _ in range(rounds) for turn in order.sample(range(len(runs)), len(runs))]
    names = [record["implementation"] for record in measured]
    for turn in follow(turns, f"{title}, time in turns", names.__getitem__, console):
        times[turn].append(median_ms(runs[turn], device, milliseconds, milliseconds))
    for record, of_run in zip(measured, times):
        record["runs"], record["ms"] = of_run, statistics.median(of_run)
        record["baseline_ms"] = measured[0]["ms"]
        record["ratio"] = record["ms"] / record["baseline_ms"]


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def table(title: str, baseline: str, measured: list[dict[str, Any]]) -> Table:
    """The records of a case, the fastest first."""
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
    """A panel for each case: the time of every implementation, and that of the bare products."""
    groups = [list(group) for _, group in itertools.groupby(report["results"], key=title)]
    panels = [(title(g[0]).replace(", ", "\n", 1), g, g[0]["baseline_ms"]) for g in groups]
    bars(panels, f"ms (dotted: {baseline})", report["environment"], path)
