"""What `onepass demo` says of two runs: how far their losses differ, memory, time, a plot and a summary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass.cli.demo_curve import Curve
from onepass.cli.demo_head import Head
from onepass.cli.demo_model import Size
from onepass.cli.tables import table_of

ROWS_SHOWN = 4  # the plot has all
MIB = 2**20
NEXT_STEP = """Next: in your training script, call onepass.patch() before the trainer is made:

    import onepass
    onepass.patch()

or leave the script as it is: python -m onepass run train.py"""


@dataclass(frozen=True)
class Agreement:
    """How far two series of losses differ."""

    of: str
    largest: float
    steps: int
    bound: float  # infinite in bfloat16, where gradients are rounded, and not alike

    @property
    def holds(self) -> bool:
        return self.largest < self.bound  # False for NaN

    def __str__(self) -> str:
        if math.isinf(self.bound):
            verdict = "bfloat16: not bounded" if self.holds else "not finite"
        else:
            verdict = f"{'' if self.holds else 'not '}below {self.bound:.0e}"
        return f"largest difference{self.of} {self.largest:.1e} over {self.steps} steps ({verdict})"


def agreement(theirs: Tensor, ours: Tensor, bound: float, place: str, of: str = "") -> Agreement:
    """Of two series, which are float32 on a CPU and not on a GPU."""
    return Agreement(of, (theirs - ours).abs().max().item(), len(ours), bound if place == "cpu" else math.inf)


@dataclass(frozen=True)
class Costs:
    """What something takes without and with onepass, in bytes and milliseconds."""

    of: str
    memory: tuple[int, int]
    milliseconds: tuple[float, float]

    @property
    def speed(self) -> str:
        theirs, ours = self.milliseconds
        return f"{theirs / ours:.1f} times as fast"


def memory_row(theirs: int, ours: int) -> tuple[str, str, str]:
    """Both in MiB, and the share that is saved."""
    less = 1 - ours / theirs
    return f"{theirs / MIB:.1f}", f"{ours / MIB:.1f}", f"{abs(less):.0%} {'less' if less >= 0 else 'more'}"


def losses_table(title: str, theirs: Tensor, ours: Tensor) -> Table:
    """Both losses at a few steps."""
    table = table_of("step", "torch", "onepass", "difference", title=title)
    for step in torch.linspace(0, len(ours) - 1, min(ROWS_SHOWN, len(ours))).round().int().tolist():
        difference = f"{ours[step] - theirs[step]:+.1e}"
        table.add_row(str(step + 1), f"{theirs[step]:.6f}", f"{ours[step]:.6f}", difference)
    return table


def tell_costs(
    head: Head, size: Size, costs: Costs, others: dict[int, tuple[int, int]], place: str, console: Console
) -> None:
    """The memory of a head, also at other vocabularies and in units of a float32 tensor of the logits; its time."""
    tokens = size.batch * size.length
    unit = 4 * tokens * size.vocab
    theirs, ours = (memory / unit for memory in costs.memory)
    console.print(
        f"The logits of a step in float32 are {tokens} tokens x {size.vocab} entries of the vocabulary x 4 bytes = "
        f"{unit / MIB:.1f} MiB. Beyond {head.given}, torch holds {theirs:.1f} times that at once, onepass {ours:.1f} "
        "times. What is saved grows with the vocabulary:"
    )
    table = table_of(
        "vocabulary", "torch, MiB", "onepass, MiB", "saved", title=f"peak of tensor memory beyond {head.given}"
    )
    for vocab, memory in sorted((others | {size.vocab: costs.memory}).items()):
        table.add_row(str(vocab), *memory_row(*memory))
    console.print(table)
    time = "Time: {:.2f} ms with torch, {:.2f} ms with onepass".format(*costs.milliseconds)
    of_cpu = "On a CPU, onepass computes in plain PyTorch, since its kernels need a GPU"
    console.print(f"{time}. {of_cpu}." if place == "cpu" else f"{time}, which is {costs.speed}.")


def summarize(agreements: Sequence[Agreement], all_costs: Sequence[Costs], place: str, console: Console) -> None:
    """The verdict, what was gained, and what to do next."""
    console.print("\n[bold]Summary[/bold]")
    failed = [a for a in agreements if not a.holds]
    largest = max(a.largest for a in agreements)
    if failed:
        console.print(f"Not equal: {'; '.join(map(str, failed))}.")
    elif place == "cpu":
        console.print(f"Equal: in float32, no step differs by more than {largest:.1e}.")
    else:
        console.print(f"Close: no step differs by more than {largest:.1e}, with bfloat16 logits.")
    rows = [(costs.of, *memory_row(*costs.memory)) for costs in all_costs]
    memory = "; ".join(f"{of}, {ours} MiB instead of {theirs} ({saved})" for of, theirs, ours, saved in rows)
    console.print(f"Memory: {memory}.")
    if place == "cpu":
        console.print("Speed: needs a GPU, where this demo compares time too. Measured times: docs/measured.md.")
    else:
        times = "; ".join(f"{costs.of}, {costs.speed}" for costs in all_costs)
        console.print(f"Speed: {times}. More measured times: docs/measured.md.")
    console.print(NEXT_STEP)


def plot(head: Head, reference: Curve, curve: Curve, path: Path) -> None:
    """The curves in one plot, and their differences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = len(curve.series) + 1
    figure, (*tops, bottom) = pyplot.subplots(panels, 1, sharex=True, figsize=(7, 3 * panels), layout="constrained")
    for axes, color, (title, ours) in zip(tops, ("black", "tab:blue"), curve.series.items()):
        theirs, steps = reference.series[title], range(1, len(ours) + 1)
        axes.plot(steps, theirs, label=reference.name, linewidth=4, alpha=0.4)
        axes.plot(steps, ours, label=curve.name, linewidth=1.5, color="black", linestyle="--")
        axes.set(ylabel=title)
        axes.legend()
        difference = (ours - theirs).abs()
        label = title if len(tops) > 1 else None
        bottom.semilogy(steps, difference.where(difference > 0, math.nan), ".", color=color, label=label)
    tops[0].set(title=f"One model, one seed, two implementations: {head.name}")
    bottom.axhline(head.bound, color="tab:red", linewidth=1, label="bound in float32")
    bottom.legend()
    bottom.set(xlabel="step", ylabel="|difference| (0 is not drawn)")
    for axes in (*tops, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
