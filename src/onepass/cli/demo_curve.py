"""A training run of `onepass demo`, and what it records."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from onepass.cli.demo_head import Head, Loss, mixed_precision
from onepass.cli.demo_model import Size, build_model
from onepass.cli.measure import clock, peak_memory

LEARNING_RATE = 1e-3
BARS = {"torch": "training, torch's loss", "onepass": "training, onepass' loss"}


@dataclass(frozen=True)
class Curve:
    """One training run: what it recorded at each step, and what its head cost apart from the model."""

    name: str
    series: dict[str, Tensor]
    milliseconds: float
    memory: int


def loss_and_gradients(loss: Loss, inputs: tuple[Tensor, ...], labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss and the gradients of its inputs."""
    inputs = tuple([x.detach().requires_grad_() for x in inputs])
    value = loss(*inputs, labels)
    return value.detach(), torch.autograd.grad(value, inputs)


def train(
    name: str, head: Head, model: Any, windows: Tensor, console: Console, after_step: Callable[[], None] | None = None
) -> Curve:
    """AdamW over the batches. The loss head runs apart from the model, so that it can be measured alone."""
    device = windows.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, entropies, seconds, memory = [], [], 0.0, 0
    for step, window in enumerate(track(windows, description=BARS[name], total=len(windows), console=console)):
        labels = window[:, 1:]
        with mixed_precision(device):
            # Shifted before the model and not after it: torch's loss would have to copy `logits[:, :-1]`.
            inputs = head.inputs(model, window[:, :-1])
        call = partial(loss_and_gradients, head.losses[name], inputs, labels)
        if step == 0:  # an extra call, which also compiles kernels before anything is timed
            memory = peak_memory(call, device)
        start = clock(device)
        value, gradients = call()
        seconds += clock(device) - start
        losses.append(value)
        if head.entropies:
            with torch.no_grad():
                entropies.append(head.entropies[name](*inputs, labels))
        optimizer.zero_grad()
        torch.autograd.backward(inputs, gradients)  # a weight that is the embedding's too: they add up
        optimizer.step()
        if after_step is not None:
            after_step()
    recorded = {"training loss": losses, "mean entropy": entropies}
    series = {title: torch.stack(values).double().cpu() for title, values in recorded.items() if values}
    return Curve(name, series, 1e3 * seconds / len(losses), memory)


@torch.no_grad()
def memory_with(size: Size, head: Head, device: torch.device) -> tuple[int, int]:
    """The peaks of tensor memory of torch's head and of that of onepass, for a batch of this size."""
    window = torch.zeros(size.batch, size.length + 1, dtype=torch.long, device=device)
    with mixed_precision(device):
        inputs = head.inputs(build_model(replace(size, layers=1), seed=0).to(device), window[:, :-1])
    with torch.enable_grad():
        calls = [partial(loss_and_gradients, head.losses[name], inputs, window[:, 1:]) for name in BARS]
        theirs, ours = (peak_memory(call, device) for call in calls)
    return theirs, ours
