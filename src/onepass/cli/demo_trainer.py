"""`onepass demo`: its model in a transformers `Trainer`, before and after ``onepass.patch("transformers")``."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import onepass
from onepass.cli.demo_model import Size, build_model
from onepass.cli.measure import clock, peak_memory

MOST_STEPS = 20
LEARNING_RATE = 1e-3
BOUND = 1e-4  # on the difference of the losses, where both are float32


@dataclass(frozen=True)
class Run:
    """What was recorded of one model."""

    losses: Tensor
    milliseconds: float
    memory: int


def make_trainer(model: nn.Module, windows: Tensor, size: Size, folder: str) -> Any:
    """A `Trainer` whose steps have the batches of ``windows``, in an order of its own that follows from its seed."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    on_cpu = windows.device.type == "cpu"
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=size.batch,
        max_steps=len(windows),
        learning_rate=LEARNING_RATE,
        use_cpu=on_cpu,
        bf16=not on_cpu,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = windows.flatten(0, 1)[:, :-1].cpu()
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(model: nn.Module, windows: Tensor, size: Size, after_step: Callable[[], None]) -> tuple[Tensor, float]:
    """Train the model. Returns the loss of every step, and the median of the steps' milliseconds."""
    from transformers import TrainerCallback

    losses: list[Tensor] = []
    times: list[float] = []

    class Record(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            times.append(clock(windows.device))

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(clock(windows.device))
            after_step()

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, windows, size, folder)
        trainer.add_callback(Record())
        hook = model.register_forward_hook(lambda module, args, output: losses.append(output.loss.detach()))
        trainer.train()
        hook.remove()
    milliseconds = 1e3 * torch.tensor(times, dtype=torch.float64).diff().median().item()
    return torch.stack(losses).double().cpu(), milliseconds


def measure(name: str, windows: Tensor, size: Size, seed: int, console: Console) -> Run:
    """Train a new model. Before that, one step of another measures memory; it also compiles kernels."""
    model = build_model(size, seed).to(windows.device)
    memory = peak_memory(partial(train, model, windows[:1], size, lambda: None), windows.device)
    model = build_model(size, seed).to(windows.device)
    with Progress(console=console) as progress:
        task = progress.add_task(f"{name:>8}", total=len(windows))
        losses, milliseconds = train(model, windows, size, lambda: progress.advance(task))
    return Run(losses, milliseconds, memory)


def compare(windows: Tensor, size: Size, seed: int, console: Console) -> bool:
    """Train before and after the patch, and print a table of both; whether the losses agree."""
    windows = windows[:MOST_STEPS]
    console.print(f"\nThe same model in a transformers Trainer, {len(windows)} steps:")
    theirs = measure("Trainer", windows, size, seed, console)
    with onepass.patch("transformers"):
        ours = measure("patched", windows, size, seed, console)
    table = Table("Trainer", "as it is", "patched", title='onepass.patch("transformers")')
    table.add_row("loss of the last step", f"{theirs.losses[-1]:.6f}", f"{ours.losses[-1]:.6f}")
    table.add_row("time of a step, median, ms", f"{theirs.milliseconds:.1f}", f"{ours.milliseconds:.1f}")
    memory = (f"{run.memory / 2**20:.1f}" for run in (theirs, ours))
    table.add_row("peak of tensor memory beyond the model, 1 step, MiB", *memory)
    console.print(table)
    on_cpu = windows.device.type == "cpu"
    if on_cpu:
        console.print("On a CPU, onepass computes in plain PyTorch: it saves memory, but its kernels need a GPU.")
    difference = (theirs.losses - ours.losses).abs().max().item()
    below = difference < BOUND  # False for NaN
    verdict = f"{'' if below else 'not '}below {BOUND:.0e}" if on_cpu else "bfloat16: not bounded"
    console.print(f"largest difference in the Trainer {difference:.1e} over {len(windows)} steps ({verdict})")
    return below or not on_cpu
