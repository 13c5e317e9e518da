"""`onepass demo`: train a small decoder with torch's loss and with that of onepass, and compare both."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from onepass.cli.demo_curve import Curve, memory_with, train
from onepass.cli.demo_head import HEADS
from onepass.cli.demo_model import Size, build_model, load_text, sample_windows, train_tokenizer
from onepass.cli.demo_processes import train_sharded
from onepass.cli.demo_report import Costs, agreement, losses_table, plot, summarize, tell_costs
from onepass.cli.environment import environment
from onepass.cli.measure import one_core_left
from onepass.cli.outputs import check_writable

SIZES = {
    "cpu": Size(vocab=4096, hidden=128, layers=2, batch=8, length=128),
    "cuda": Size(vocab=151936, hidden=512, layers=4, batch=8, length=512),
}
FORMATS = ".png", ".svg", ".pdf"
OTHER_VOCABULARIES = 16384, 32768  # whose memory is measured, to show how it grows
TEACHER = Size(vocab=2048, hidden=128, layers=2, batch=8, length=128)  # of --distill
DISTILL_STEPS = 300
DEFAULT_STEPS = ", ".join(f"{head.steps} with --head {name}" for name, head in HEADS.items())
DEFAULT_STEPS += f", {DISTILL_STEPS} with --distill"
DEFAULT_VOCABS = ", ".join(f"{size.vocab} on {device}" for device, size in SIZES.items())


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
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the plot goes (PNG, SVG or PDF).")] = Path(
        "demo.png"
    ),
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="The random seed of the weights and of the data order.")
    ] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    processes: Annotated[
        int, typer.Option(help="Shard the vocabulary of onepass's head over this many processes.")
    ] = 1,
    autotune_report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write what Triton's autotuner chose in the first steps, as lines of JSON."),
    ] = None,
) -> None:
    """Train a small decoder with torch's loss and with that of onepass: equal losses, and memory and time of each.

    With --head logits and one process, a transformers Trainer also trains it before and after
    onepass.patch("transformers"). With --processes, torch's loss is that of one process. Without a GPU, it takes less
    than two minutes on two cores.
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
    place = device or places[0]
    size = TEACHER if distill else SIZES[place]
    size = replace(size, vocab=vocab or size.vocab)
    most, what = (torch.cuda.device_count(), "GPUs") if place == "cuda" else (size.vocab, "tokens of the vocabulary")
    if not 1 <= processes <= most:
        expected = f"expected 1 to {most}, the number of {what}"
        raise typer.BadParameter(f"{expected}, got {processes}", param_hint="--processes")
    steps = steps or (DISTILL_STEPS if distill else HEADS[head].steps)
    if out.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"expected a name that ends in {' or '.join(FORMATS)}, got {out}", param_hint="--out")
    check_writable(out)
    if autotune_report is not None:
        check_writable(autotune_report, "--autotune-report")
    console = Console()
    here = environment()
    gpu = here["gpu"] if place == "cuda" else "CPU"
    console.print(f"onepass {here['onepass']} ({here['commit']}), torch {here['torch']}, {gpu}")
    with one_core_left():
        if distill:
            from onepass.cli.distill import compare

            passed = compare(size, steps, seed, place, out, console)
        else:
            passed = compare_losses(head, size, steps, seed, place, processes, autotune_report, out, console)
    if not passed:
        raise typer.Exit(1)


def compare_losses(
    name: str,
    size: Size,
    steps: int,
    seed: int,
    place: str,
    processes: int,
    autotune_report: Path | None,
    out: Path,
    console: Console,
) -> bool:
    """Train twice and tell of losses, memory and time; whether the losses agree."""
    head = HEADS[name]
    console.print(
        f"\nThis demo trains a small Llama twice, from one seed and on the same batches: with the {head.name} of "
        "torch, then with that of onepass. It shows whether the losses are equal, and what onepass saves."
    )
    with console.status("preparing text and tokenizer"):
        text = load_text()
        tokenizer = train_tokenizer(text, size.vocab)
        tokens = torch.tensor(tokenizer.encode(text).ids)
        windows = sample_windows(tokens, steps, size, seed).to(place)
    console.print(f"text: {len(text)} characters of pydoc_data.topics, {len(tokens)} tokens")
    padded = f"padded from the {tokenizer.get_vocab_size()} tokens that this text yields"
    console.print(f"vocabulary: {size.vocab}" + (f", {padded}" if tokenizer.get_vocab_size() < size.vocab else ""))
    console.print(f"model: {size.layers} layers of {size.hidden}; {steps} steps of {size.batch} x {size.length} tokens")

    others = {}
    alone = processes == 1 and autotune_report is None  # a report is of the training
    vocabularies = [vocab for vocab in OTHER_VOCABULARIES if alone and vocab != size.vocab]
    # Before other calls: torch's profiler warns about memory that was allocated while it did not run.
    for vocab in track(vocabularies, "measuring memory", console=console, disable=not vocabularies):
        others[vocab] = memory_with(replace(size, vocab=vocab), head, torch.device(place))

    after_step = None
    if autotune_report is not None:
        from onepass.autotune import AutotuneReportCallback, JSONLSink

        state = SimpleNamespace(is_world_process_zero=True)  # a trainer's
        after_step = partial(AutotuneReportCallback([JSONLSink(autotune_report)]).on_step_end, None, state, None)

    def curve(name: str) -> Curve:
        return train(name, head, build_model(size, seed, tied=processes == 1).to(place), windows, console, after_step)

    console.print("\n[bold]1. The losses of every step[/bold]")
    reference = curve("torch")
    if processes > 1:
        console.print(f"onepass: {processes} processes, each with some of the {size.vocab} rows of the head's weight")
        ours = train_sharded(name, size, seed, windows, processes)
    else:
        ours = curve("onepass")
    agreements = []
    for title, series in ours.series.items():
        console.print(losses_table(title, reference.series[title], series))
        of = f" of the {title}" if len(ours.series) > 1 else ""
        agreements.append(agreement(reference.series[title], series, head.bound, place, of))
        console.print(str(agreements[-1]))
    plot(head, reference, ours, out)
    console.print(f"All steps are drawn in {out}.")
    if autotune_report is not None and not autotune_report.exists():
        console.print(f"No kernel was autotuned: {autotune_report} is not written.")

    console.print(f"\n[bold]2. Memory of the {head.part}, apart from the model[/bold]")
    milliseconds = reference.milliseconds, ours.milliseconds
    all_costs = [Costs(head.part, (reference.memory, ours.memory), milliseconds)]
    if processes > 1:
        console.print("The memory of onepass is that of one of the processes.")
    tell_costs(head, size, all_costs[0], others, place, console)

    if name == "logits" and processes == 1:
        from onepass.cli.demo_trainer import compare as compare_trainers

        console.print("\n[bold]3. A whole training step, in a transformers Trainer[/bold]")
        agreed, costs = compare_trainers(windows, size, seed, console)
        agreements.append(agreed)
        all_costs.append(costs)
    summarize(agreements, all_costs, place, console)
    return all(a.holds for a in agreements)
