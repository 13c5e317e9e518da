"""One small decoder, trained twice from one seed: with torch's loss and with onepass's."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import onepass
from onepass.cli.environment import environment

BOUND = 1e-4  # on the difference of the two curves, where both are float32
LEARNING_RATE = 1e-3
ROWS_SHOWN = 10

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> scalar


@dataclass(frozen=True)
class Size:
    """What is trained: a minute on two CPU cores, or a real vocabulary on a GPU."""

    vocab: int
    hidden: int
    layers: int
    batch: int
    length: int


SIZES = {
    "cpu": Size(vocab=4096, hidden=128, layers=2, batch=8, length=128),
    "cuda": Size(vocab=151936, hidden=512, layers=4, batch=8, length=512),
}
TEACHER = Size(vocab=2048, hidden=128, layers=2, batch=8, length=128)  # of --distill
STEPS, DISTILL_STEPS = 80, 300
DEFAULT_VOCABS = ", ".join(f"{size.vocab} on {device}" for device, size in SIZES.items())


@dataclass(frozen=True)
class Curve:
    """One training run: its losses, and what the loss and its gradient cost apart from the model."""

    name: str
    losses: Tensor
    milliseconds: float
    memory: int


def torch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As transformers computes it: upcast (nothing to do in float32), because torch rounds to the logits' dtype."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


LOSSES: dict[str, Loss] = {"torch": torch_loss, "onepass": onepass.cross_entropy}


def load_text() -> str:
    """English that every Python ships: the topics of its `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def train_tokenizer(text: str, vocab: int) -> Any:
    """Byte-level BPE; stops short of ``vocab`` where the text holds no more pairs to merge."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocab, show_progress=False)
    return tokenizer


def sample_windows(tokens: Tensor, steps: int, size: Size, seed: int) -> Tensor:
    """The batches of all steps, ``(steps, batch, length + 1)``: inputs and, one further, labels."""
    windows = tokens.unfold(0, size.length + 1, 1)
    starts = torch.randint(len(windows), (steps, size.batch), generator=torch.Generator().manual_seed(seed))
    return windows[starts]


def build_model(size: Size, seed: int) -> Any:
    """A Llama decoder with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = size.hidden // 64
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
        attn_implementation="eager",  # its backward is deterministic on every device
    )
    return LlamaForCausalLM(config)


def loss_and_gradient(loss: Loss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """All that differs between the runs."""
    logits = logits.detach().requires_grad_()
    value = loss(logits, labels)
    return value.detach(), torch.autograd.grad(value, logits)[0]


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes of tensors that ``call`` held at once, beyond those there were."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    profiler: Any = profile.profiler  # its public results lose the order of allocations
    held = peak = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held)
    return peak


def train(name: str, loss: Loss, model: Any, windows: Tensor, console: Console) -> Curve:
    """AdamW over the batches. The loss head runs apart from the model, so that it can be measured alone."""
    device = windows.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, seconds, memory = [], 0.0, 0
    for step, window in enumerate(track(windows, description=f"{name:>8}", total=len(windows), console=console)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # Shifted before the model and not after it: torch's loss would have to copy `logits[:, :-1]`.
            logits = model(window[:, :-1]).logits
        head = partial(loss_and_gradient, loss, logits, window[:, 1:])
        if step == 0:  # an extra call, which also compiles kernels before anything is timed
            memory = peak_memory(head, device)
        start = clock(device)
        value, gradient = head()
        seconds += clock(device) - start
        losses.append(value)
        optimizer.zero_grad()
        logits.backward(gradient)
        optimizer.step()
    return Curve(name, torch.stack(losses).double().cpu(), 1e3 * seconds / len(losses), memory)


def report(reference: Curve, curve: Curve, console: Console) -> None:
    """Both curves at a few steps, and what the loss head of each took."""
    difference = curve.losses - reference.losses
    table = Table("step", reference.name, curve.name, "difference", title="training loss")
    for step in torch.linspace(0, len(difference) - 1, min(ROWS_SHOWN, len(difference))).round().int().tolist():
        losses = f"{reference.losses[step]:.6f}", f"{curve.losses[step]:.6f}"
        table.add_row(str(step + 1), *losses, f"{difference[step]:+.1e}")
    console.print(table)
    table = Table("loss and its gradient, without the model", reference.name, curve.name)
    table.add_row("time, mean of all steps, ms", f"{reference.milliseconds:.2f}", f"{curve.milliseconds:.2f}")
    memory = (f"{c.memory / 2**20:.1f}" for c in (reference, curve))
    table.add_row("peak of tensor memory beyond the logits, one call, MiB", *memory)
    console.print(table)


def plot(reference: Curve, curve: Curve, path: Path) -> None:
    """The curves one over the other, and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    steps = range(1, len(curve.losses) + 1)
    top.plot(steps, reference.losses, label=reference.name, linewidth=4, alpha=0.4)
    top.plot(steps, curve.losses, label=curve.name, linewidth=1.5, color="black", linestyle="--")
    top.set(ylabel="training loss", title="One model, one seed, two implementations of cross-entropy")
    top.legend()
    difference = (curve.losses - reference.losses).abs()
    bottom.semilogy(steps, difference.where(difference > 0, math.nan), ".", color="black")
    bottom.axhline(BOUND, color="tab:red", linewidth=1, label="bound in float32")
    bottom.legend()
    bottom.set(xlabel="step", ylabel="|difference| (0 is not drawn)")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def demo(
    distill: Annotated[bool, typer.Option("--distill", help="Instead, a student learns from a teacher.")] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Training steps (of the students).", show_default=f"{STEPS}, {DISTILL_STEPS} with --distill"
        ),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(
            min=256, help="Classes of the model.", show_default=f"{DEFAULT_VOCABS}, {TEACHER.vocab} with --distill"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(dir_okay=False, help="Where the plot goes (PNG).")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Of the weights and of the data order.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
) -> None:
    """Train a small decoder twice, with torch's loss and with onepass's, and compare the curves."""
    places = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if device is not None and device not in places:
        raise typer.BadParameter(f"expected {' or '.join(places)}, got {device!r}", param_hint="--device")
    place = device or places[0]
    size = TEACHER if distill else SIZES[place]
    size = replace(size, vocab=vocab or size.vocab)
    steps = steps or (DISTILL_STEPS if distill else STEPS)
    out.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    here = environment()
    console.print(f"onepass {here['onepass']} ({here['commit']}), torch {here['torch']}, {here['gpu'] or 'CPU'}")
    if distill:
        from onepass.cli.distill import compare  # it builds on this module

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

    def curve(name: str) -> Curve:
        return train(name, LOSSES[name], build_model(size, seed).to(place), windows, console)

    console.print(f"model: Llama, {size.layers} layers of {size.hidden}; {steps} steps of {size.batch} x {size.length}")
    reference, ours = curve("torch"), curve("onepass")
    report(reference, ours, console)
    plot(reference, ours, out)
    console.print(f"curves: {out}")

    largest = (reference.losses - ours.losses).abs().max().item()
    exact = place == "cpu"  # float32; in bfloat16 the gradients are rounded, and not alike
    passed = largest < BOUND  # not so for NaN
    verdict = f"{'' if passed else 'not '}below {BOUND:.0e}" if exact else "bfloat16: not bounded"
    console.print(f"largest difference {largest:.1e} over {steps} steps ({verdict})")
    if exact and not passed:
        raise typer.Exit(1)
