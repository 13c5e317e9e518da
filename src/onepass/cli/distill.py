"""`onepass demo --distill`: two students, one trained on labels alone, one also on a teacher's top-K log-probs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import onepass
from onepass.cli.demo_model import Size, build_model, load_text, sample_windows, train_tokenizer
from onepass.cli.tables import table_of

HELD_OUT = 0.1  # of the paragraphs
SEEN = 0.2  # of the training tokens, by the students; the teacher sees them all, and that is what it can pass on
STUDENT_HIDDEN = 64
TEACHER_STEPS, MOST_TEACHER_STEPS = 8, 600  # for each step of a student, and in all
TOP_K = 64
ALPHA = 0.5  # the teacher's share of the loss; a larger one needs a teacher that was trained for longer
LEARNING_RATE = 4e-3
EVALUATIONS = 10

Objective = Callable[[Tensor, Tensor], Tensor]  # (logits, window) -> scalar


def split_text(text: str) -> tuple[str, str]:
    """The part to train on and the held-out part. The topics quote each other: no paragraph is kept twice."""
    paragraphs = list(dict.fromkeys(text.split("\n\n")))
    end = round((1 - HELD_OUT) * len(paragraphs))
    return "\n\n".join(paragraphs[:end]), "\n\n".join(paragraphs[end:])


def predict(model: Any, window: Tensor) -> Tensor:
    device = window.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return model(window[:, :-1]).logits


def hard_labels(logits: Tensor, window: Tensor) -> Tensor:
    return onepass.cross_entropy(logits, window[:, 1:])


def distillation(teacher: Any) -> Objective:
    def objective(logits: Tensor, window: Tensor) -> Tensor:
        with torch.no_grad():
            log_probs, ids = predict(teacher, window).float().log_softmax(-1).topk(TOP_K)
        return onepass.distillation_loss(logits, window[:, 1:], ids, log_probs, alpha=ALPHA)

    return objective


@torch.no_grad()
def perplexity(model: Any, windows: Tensor) -> Tensor:
    losses = [onepass.cross_entropy(predict(model, w), w[:, 1:], reduction="none") for w in windows.split(16)]
    return torch.cat(losses).double().mean().exp().cpu()


def train(
    name: str,
    model: Any,
    objective: Objective,
    windows: Tensor,
    held_out: Tensor,
    console: Console,
    evaluate_at: Collection[int] = (),
) -> Tensor:
    """AdamW over the batches, one cycle of the learning rate. Held-out perplexities: before these steps, at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=len(windows))
    perplexities = []
    for step, window in enumerate(track(windows, description=f"training, {name}", total=len(windows), console=console)):
        if step in evaluate_at:
            perplexities.append(perplexity(model, held_out))
        optimizer.zero_grad()
        objective(predict(model, window), window).backward()
        optimizer.step()
        schedule.step()
    return torch.stack([*perplexities, perplexity(model, held_out)])


def plot(steps: Sequence[int], curves: dict[str, Tensor], teacher: float, path: Path) -> None:
    """Both students' held-out perplexity, and the teacher's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, curve in curves.items():
        axes.semilogy(steps, curve, ".-", label=name)
    axes.axhline(teacher, color="black", linewidth=1, linestyle="--", label="teacher")
    axes.set(xlabel="step", ylabel="held-out perplexity", title="One student, one seed: labels alone, and distillation")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=120)


def compare(size: Size, steps: int, seed: int, place: str, out: Path, console: Console) -> bool:
    """Train a teacher of this size and both students; whether the teacher improved the perplexity of held-out text."""
    console.print(
        "\nThis demo trains a teacher, and then one student twice from one seed: on labels alone, and with "
        f"onepass.distillation_loss, which also takes the teacher's {TOP_K} most probable tokens at each position. "
        "It shows whether the teacher improves the student on text that neither of them has seen."
    )
    with console.status("preparing text and tokenizer"):
        text, rest = split_text(load_text())
        tokenizer = train_tokenizer(text, size.vocab)
        tokens, unseen = (torch.tensor(tokenizer.encode(part).ids) for part in (text, rest))
    held_out = unseen.unfold(0, size.length + 1, size.length).to(place)  # no token is predicted twice
    seen = tokens[: round(SEEN * len(tokens))]
    student, of_teacher = replace(size, hidden=STUDENT_HIDDEN), min(TEACHER_STEPS * steps, MOST_TEACHER_STEPS)
    console.print(f"text: pydoc_data.topics, no paragraph twice; {len(tokens)} tokens, and {len(unseen)} held out")
    console.print(f"vocabulary: {size.vocab}; batches of {size.batch} x {size.length}")
    for name, each, count, share in ("teacher", size, of_teacher, 1), ("students", student, steps, SEEN):
        console.print(f"{name}: Llama, {each.layers} layers of {each.hidden}; {count} steps on {share:.0%} of the text")
    console.print(f"distillation: {ALPHA:.0%} of the loss from the teacher's top {TOP_K} log-probs")

    teacher = build_model(size, seed).to(place)
    windows = sample_windows(tokens, of_teacher, size, seed).to(place)
    goal = train("teacher", teacher, hard_labels, windows, held_out, console).item()

    windows = sample_windows(seen, steps, student, seed).to(place)
    evaluate_at = range(0, steps, -(-steps // EVALUATIONS))
    curves = {
        name: train(name, build_model(student, seed).to(place), objective, windows, held_out, console, evaluate_at)
        for name, objective in {"hard labels": hard_labels, "distilled": distillation(teacher)}.items()
    }
    hard, distilled = curves.values()
    table = table_of("step", *curves, "teacher", title="held-out perplexity")
    for step, *row in zip([*evaluate_at, steps], hard, distilled):
        table.add_row(str(step), *(f"{value:.1f}" for value in (*row, goal)))
    console.print(table)
    plot([*evaluate_at, steps], curves, goal, out)
    console.print(f"Both curves are drawn in {out}.")

    best = hard.min()  # not its last: a student that overfits may stop early. The start is among them; NaN stays NaN.
    helped = bool(distilled[-1] < best)
    verdict = "below" if helped else "not below"
    console.print("\n[bold]Summary[/bold]")
    console.print(
        f"Perplexity on unseen text: distilled {distilled[-1]:.1f}, {verdict} the best of hard labels, {best:.1f}. "
        f"The teacher has {goal:.1f}."
    )
    console.print("Next: docs/distillation.md shows the same loss with a teacher's log-probs from a server or a file.")
    return helped
