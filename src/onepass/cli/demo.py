"""`onepass demo`: train a small decoder with torch's loss and with that of onepass, and compare the curves."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from onepass.cli.demo_curve import Curve, train
from onepass.cli.demo_head import HEADS, Head
from onepass.cli.demo_model import Size, build_model, load_text, sample_windows, train_tokenizer
from onepass.cli.demo_processes import train_sharded
from onepass.cli.environment import environment

ROWS_SHOWN = 10


SIZES = {
    "cpu": Size(vocab=4096, hidden=128, layers=2, batch=8, length=128),
    "cuda": Size(vocab=151936, hidden=512, layers=4, batch=8, length=512),
}
TEACHER = Size(vocab=2048, hidden=128, layers=2, batch=8, length=128)  # of --distill
DISTILL_STEPS = 300
DEFAULT_STEPS = ", ".join(f"{head.steps} with --head {name}" for name, head in HEADS.items())
DEFAULT_STEPS += f", {DISTILL_STEPS} with --distill"
DEFAULT_VOCABS = ", ".join(f"{size.vocab} on {device}" for device, size in SIZES.items())


def report(head: Head, reference: Curve, curve: Curve, console: Console) -> None:
    """Both curves at a few steps, and the time and memory of each head."""
    for title, ours in curve.series.items():
        theirs = reference.series[title]
        table = Table("step", reference.name, curve.name, "difference", title=title)
        for step in torch.linspace(0, len(ours) - 1, min(ROWS_SHOWN, len(ours))).round().int().tolist():
            difference = f"{ours[step] - theirs[step]:+.1e}"
            table.add_row(str(step + 1), f"{theirs[step]:.6f}", f"{ours[step]:.6f}", difference)
        console.print(table)
    table = Table(f"{head.part}, without the model", reference.name, curve.name)
    table.add_row("time, mean of all steps, ms", f"{reference.milliseconds:.2f}", f"{curve.milliseconds:.2f}")
    memory = (f"{c.memory / 2**20:.1f}" for c in (reference, curve))
    table.add_row(f"peak of tensor memory beyond {head.given}, one call, MiB", *memory)
    console.print(table)


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
    tops[0].set(title=head.title)
    bottom.axhline(head.bound, color="tab:red", linewidth=1, label="bound in float32")
    bottom.legend()
    bottom.set(xlabel="step", ylabel="|difference| (0 is not drawn)")
    for axes in (*tops, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def demo(
    head: Annotated[str, typer.Option(help="What is compared: a loss of logits, or one of a linear head.")] = "logits",
    distill: Annotated[bool, typer.Option("--distill", help="Compare students with and without a teacher.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Training steps (of the students).", show_default=DEFAULT_STEPS),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(
            min=256, help="The vocabulary size.", show_default=f"{DEFAULT_VOCABS}, {TEACHER.vocab} with --distill"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the plot goes (PNG).")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="The random seed of the weights and of the data order.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    processes: Annotated[
        int, typer.Option(help="Shard the vocabulary of onepass's head over this many processes.")
    ] = 1,
    autotune_report: Annotated[
        Path | None, typer.Option(help="Write what Triton's autotuner chose in the first steps, as lines of JSON.")
    ] = None,
) -> None:
    """Train a small decoder with torch's loss and with onepass's, and compare the curves.

    With --head logits and one process, a transformers Trainer also trains it before and after
    onepass.patch("transformers"). With --processes, torch's loss is that of one process.
    """
    places = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if device is not None and device not in places:
        raise typer.BadParameter(f"expected {' or '.join(places)}, got {device!r}", param_hint="--device")
    if head not in HEADS or (distill and head != "logits"):
        expected = "logits with --distill" if distill else " or ".join(HEADS)
        raise typer.BadParameter(f"expected {expected}, got {head!r}", param_hint="--head")
    if distill and autotune_report is not None:
        raise typer.BadParameter("expected a run without --distill", param_hint="--autotune-report")
    if processes > 1 and (distill or autotune_report is not None):
        other = "--distill" if distill else "--autotune-report"
        raise typer.BadParameter(f"expected 1 with {other}, got {processes}", param_hint="--processes")
    place, kind = device or places[0], HEADS[head]
    size = TEACHER if distill else SIZES[place]
    size = replace(size, vocab=vocab or size.vocab)
    most, what = (torch.cuda.device_count(), "GPUs") if place == "cuda" else (size.vocab, "tokens of the vocabulary")
    if not 1 <= processes <= most:
        expected = f"expected 1 to {most}, the number of {what}"
        raise typer.BadParameter(f"{expected}, got {processes}", param_hint="--processes")
    steps = steps or (DISTILL_STEPS if distill else kind.steps)
    out.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    here = environment()
    console.print(f"onepass {here['onepass']} ({here['commit']}), torch {here['torch']}, {here['gpu'] or 'CPU'}")
    if distill:
        from onepass.cli.distill import compare

        if not compare(size, steps, seed, place, out, console):
            raise typer.Exit(1)
        return

    text = load_text()
    tokenizer = train_tokenizer(text, size.vocab)
    tokens = torch.tensor(tokenizer.encode(text).ids)
    windows = sample_windows(tokens, steps, size, seed).to(place)
    console.print(f"text: {len(text)} characters of pydoc_data.topics, {len(tokens)} tokens")
    padded = f"padded from the {tokenizer.get_vocab_size()} tokens that this text yields"
    console.print(f"vocabulary: {size.vocab}" + (f", {padded}" if tokenizer.get_vocab_size() < size.vocab else ""))

    after_step = None
    if autotune_report is not None:
        from onepass.autotune import AutotuneReportCallback, JSONLSink

        state = SimpleNamespace(is_world_process_zero=True)  # a trainer's
        after_step = partial(AutotuneReportCallback([JSONLSink(autotune_report)]).on_step_end, None, state, None)

    def curve(name: str) -> Curve:
        return train(name, kind, build_model(size, seed, tied=processes == 1).to(place), windows, console, after_step)

    console.print(f"model: Llama, {size.layers} layers of {size.hidden}; {steps} steps of {size.batch} x {size.length}")
    reference = curve("torch")
    if processes > 1:
        console.print(f"onepass: {processes} processes, each with some of the {size.vocab} rows of the head's weight")
        ours = train_sharded(head, size, seed, windows, processes)
    else:
        ours = curve("onepass")
    report(kind, reference, ours, console)
    plot(kind, reference, ours, out)
    console.print(f"curves: {out}")

    exact = place == "cpu"  # float32; in bfloat16 the gradients are rounded, and not alike
    passed = True
    for title, series in ours.series.items():
        largest = (reference.series[title] - series).abs().max().item()
        below = largest < kind.bound  # False for NaN
        passed = passed and (below or not exact)
        verdict = f"{'' if below else 'not '}below {kind.bound:.0e}" if exact else "bfloat16: not bounded"
        of = f" of the {title}" if len(ours.series) > 1 else ""
        console.print(f"largest difference{of} {largest:.1e} over {steps} steps ({verdict})")
    if head == "logits" and processes == 1:
        from onepass.cli.demo_trainer import compare as compare_trainers

        passed = compare_trainers(windows, size, seed, console) and passed
    if not passed:
        raise typer.Exit(1)
