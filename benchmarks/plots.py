"""`python -m benchmarks plots`: the picture of the README, in a light and a dark form, from `benchmarks/results/`.

Left: forward and backward of losses of logits. Right: peak of memory, and time, of a training step of a whole model.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.implementations import OF_TORCH

HERE = Path(__file__).resolve().parent
LOSSES = {  # title: the operation, and the files of results; of what two of them have, the later one counts
    "cross-entropy\n8192 × 151,936": ("cross_entropy", "cross-entropy"),
    "log-probs and entropy\n8192 × 151,936": ("log_probs_and_entropy", "log-probs-entropy", "parity-logits"),
    "KL divergence\n4096 × 151,936": ("kl_div", "kl-div"),
}
WAYS = ("onepass", "best peer", "torch.compile", "eager, in bfloat16", "eager, of a float32 copy")
THEMES = {"light": ("#24292f", ("#3f51b5", "#8f9bd8", "#b7bcc4", "#cbd0d6", "#d9dce1")),
          "dark": ("#e6edf3", ("#8c9eff", "#5c6bc0", "#6e7681", "#5a616a", "#484f58"))}  # fmt: skip


def plots() -> None:
    """Draw the picture of the README from the stored results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for theme, (ink, colors) in THEMES.items():
        style: dict[str, Any] = {f"{part}.color": ink for part in ("text", "xtick", "ytick")}
        style |= {"axes.labelcolor": ink, "axes.edgecolor": ink, "axes.titlecolor": ink, "font.size": 9}
        style |= {"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "onepass"}
        with plt.rc_context(style):
            figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.1), layout="constrained")
            draw_losses(left, colors)
            draw_steps(right, colors)
            where = HERE.parent / "docs" / f"field-{theme}.svg"
            figure.savefig(where, transparent=True, metadata={"Date": None})
            plt.close(figure)


def draw_losses(axis: Any, colors: tuple[str, ...]) -> None:
    axis.set_title("a loss of logits, forward and backward", loc="left")
    for place, (operation, *names) in enumerate(LOSSES.values()):
        found = {
            r["implementation"]: r["ms"]
            for r in chain.from_iterable(map(results, names))
            if (r["operation"], r["pass"], r["vocab"]) == (operation, "forward+backward", 151936) and r["rows"] >= 4096
        }
        peers = {n: ms for n, ms in found.items() if n not in ("onepass", *OF_TORCH)}
        best = min(peers, key=lambda n: peers[n])
        of_ways = found["onepass"], peers[best], *[found.get(name) for name in OF_TORCH]
        bars = [bar for bar in zip(of_ways, colors, WAYS) if bar[0] is not None]
        for n, (ms, color, way) in enumerate(bars):
            bar = axis.barh(place + 0.17 * (n - (len(bars) - 1) / 2), ms, 0.15, color=color, label=way)
            axis.bar_label(
                bar, [f"{ms:.1f} {best.split(' (')[0] if way == 'best peer' else ''}"], padding=3, fontsize=7
            )
    axis.set_yticks(range(len(LOSSES)), LOSSES)
    axis.invert_yaxis()
    axis.set_xlabel("ms on one H100")
    axis.set_xlim(right=1.3 * axis.get_xlim()[1])  # room for the legend beside the bars
    first = {label: handle for handle, label in reversed([*zip(*axis.get_legend_handles_labels())])}
    shown = [way for way in WAYS if way in first]
    axis.legend([first[way] for way in shown], shown, frameon=False, loc="upper right", fontsize=8)


def draw_steps(axis: Any, colors: tuple[str, ...]) -> None:
    models = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "llama-3.2-1b": "Llama-3.2-1B"}
    ways = dict(zip(("onepass", "Liger", "plain"), (colors[0], colors[1], colors[-1])))
    axis.set_title("a step of transformers' Trainer, 8 × 4096 tokens", loc="left")
    for place, model in enumerate(models):
        found = {r["way"]: r for r in results("lm") if r["model"] == model and r["step"] == "full"}
        for n, (way, color) in enumerate(ways.items()):
            gib = found[way]["peak_bytes"] / 2**30
            bar = axis.barh(place + 0.25 * n - 0.25, gib, 0.22, color=color, label=way if place == 0 else None)
            axis.bar_label(bar, [f"{gib:.1f} GiB, {found[way]['ms']:.0f} ms"], padding=3, fontsize=7)
    axis.set_yticks(range(len(models)), models.values())
    axis.invert_yaxis()
    axis.set_xlim(right=axis.get_xlim()[1] * 1.2)
    axis.set_xlabel("peak of memory, GiB")
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.18), fontsize=8)


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "results" / f"h100-{name}.json").read_text())["results"]
    return found


def lm_plot(report: dict[str, Any], path: Path) -> None:
    """Time against memory of the bare step: every way, and onepass with several ``max_memory``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    of_steps = [r for r in report["results"] if r["step"] in ("step", "max_memory")]
    models = list(dict.fromkeys(r["model"] for r in of_steps))
    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 3.2), squeeze=False, layout="constrained")
    for axis, model in zip(axes.flat, models):
        results = [r for r in of_steps if r["model"] == model]
        for r, marker in zip(sorted(results, key=lambda r: -r["ms"]), "osDv^P*X<>"):
            limit = "" if r["max_memory"] is None else f", max_memory {r['max_memory'] >> 20} MiB"
            color = {"onepass": "#c44e52", "Liger": "#4c72b0"}.get(r["way"], "#8c8c8c")
            axis.plot(r["peak_bytes"] / 2**30, r["ms"], marker, color=color, label=r["way"] + limit, alpha=0.8)
        axis.set(title=model, xlabel="peak, GiB", ylabel="ms of a step", xscale="log")
        axis.set_xticks([2, 5, 10, 20, 50], labels=["2", "5", "10", "20", "50"])
        axis.minorticks_off()
        axis.legend(fontsize=7)
        axis.margins(x=0.2, y=0.15)
    figure.savefig(path, dpi=110)
    plt.close(figure)
