"""`onepass demo`: its model in a transformers `Trainer`, before and after ``onepass.patch("transformers")``."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import onepass
from onepass.cli.demo_model import Size, build_model
from onepass.cli.demo_report import Agreement, Costs, agreement, memory_row
from onepass.cli.measure import clock, peak_memory
from onepass.cli.tables import table_of

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
    with Progress(console=console) as progress:
        task = progress.add_task(f"measuring memory, {name}", total=len(windows) + 1)
        model = build_model(size, seed).to(windows.device)
        memory = peak_memory(partial(train, model, windows[:1], size, lambda: None), windows.device)
        progress.update(task, description=f"training, {name}", advance=1)
        model = build_model(size, seed).to(windows.device)
        losses, milliseconds = train(model, windows, size, lambda: progress.advance(task))
    return Run(losses, milliseconds, memory)


def compare(windows: Tensor, size: Size, seed: int, console: Console) -> tuple[Agreement, Costs]:
    """Train before and after the patch, and print a table of both."""
    windows = windows[:MOST_STEPS]
    console.print(
        f'The Trainer takes {len(windows)} steps as it is, and again after onepass.patch("transformers"). Nothing else '
        "changes. After the patch, the loss comes from the hidden states, and the logits are never held as a whole."
    )
    theirs = measure("Trainer as it is", windows, size, seed, console)
    with onepass.patch("transformers"):
        ours = measure("Trainer patched", windows, size, seed, console)
    costs = Costs("a step of the Trainer", (theirs.memory, ours.memory), (theirs.milliseconds, ours.milliseconds))
    table = table_of("Trainer", "as it is", "patched", "", title="a step, and its memory beyond the model")
    table.add_row("peak of tensor memory, MiB", *memory_row(*costs.memory))
    speed = "" if windows.device.type == "cpu" else costs.speed
    table.add_row("time, median, ms", f"{theirs.milliseconds:.1f}", f"{ours.milliseconds:.1f}", speed)
    table.add_row("loss of the last step", f"{theirs.losses[-1]:.6f}", f"{ours.losses[-1]:.6f}")
    console.print(table)
    agreed = agreement(theirs.losses, ours.losses, BOUND, windows.device.type, " in the Trainer")
    console.print(str(agreed))
    return agreed, costs
