"""`python -m benchmarks trainers`: a training step of TRL's SFT, DPO and GRPO, with and without `onepass.patch`.

All parameters are trained, or LoRA adapters of all linear layers of the decoder. A step is loss, backward and optimizer
on one batch that is prepared before. Generation is the same either way, and is left out. The two kinds take turns.
Because the decoder is tiny and the host may limit the speed, the time of all kernels of a step is reported too, the
median of `PROFILES` steps, and that of the head: of those kernels that TRL's step with a vocabulary of `SMALL` tokens,
whose decoder is the same, does not launch in the same order, of the same name and grid, and in about the same time. The
JSON also has the difference of both steps. It counts as the head's what the decoder's kernels take longer beside a
large head, which keeps the GPU at the limit of its power, and leaves out as much as the small head takes. Beside it
stands the time of two bare GEMMs of the head's size, the least that a frozen head takes. Memory is counted without the
model and the optimizer's state, once until the gradients are computed and once until the end of the step.
"""

import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from difflib import SequenceMatcher
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

import onepass
from benchmarks.harness import Out, check_choices, command, new_console, now, write
from benchmarks.implementations import first_line
from benchmarks.sources import add_sources
from onepass.cli.environment import environment, package_version

SMALL = 512
PROFILES = 5  # steps of which the kernels are timed
PROFILES_OF_DECODER = 3
SHORT = 0.02  # ms by which a kernel may take longer in another step, beside twice its time
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS: dict[str, Callable[[], Any]] = {"TRL": nullcontext, "onepass": onepass.patch}
Step = Callable[[], int]


def trainers(
    out: Out = Path(".bench"),
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 151936,
    hidden: Annotated[list[int] | None, typer.Option(help="Width of the decoder; repeatable.")] = None,
    trainer: Annotated[list[str] | None, typer.Option(help="SFT, DPO, GRPO; repeatable. Default: all.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="full, LoRA; repeatable. Default: both.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a completion.")] = 1024,
    batch: Annotated[int, typer.Option(help="Completions of a batch.")] = 16,
    rounds: Annotated[int, typer.Option(help="Steps of each kind.", min=1)] = 15,
) -> None:
    """Time a training step of TRL's trainers with and without `onepass.patch`; write a table and a JSON. Needs TRL."""
    from benchmarks.trainer_steps import ADAPTERS, TRAINERS, build, save  # imports TRL

    check_choices((trainer, TRAINERS), (adapter, ADAPTERS))
    sizes = {"vocab": vocab, "length": length, "batch": batch, "rounds": rounds}
    packages = {name: package_version(name) for name in ("trl", "transformers", "peft")}
    report: dict[str, Any] = {"command": command(), "date": now(), "environment": environment() | packages}
    report |= {"sizes": sizes, "results": [], "sources": {}, "not_run": {}}
    title = (
        "trainer",
        "trains",
        "hidden",
        "kind",
        "ms a step",
        "ms of kernels",
        "of the head",
        "of two GEMMs",
        "peak GiB",
        "of the step",
    )
    table = Table(*title)
    widths = hidden or [2048, 4096]
    with tempfile.TemporaryDirectory() as folder:
        for width, size in itertools.product(widths, (vocab, SMALL)):
            save(Path(folder, f"{width}-{size}"), sizes | {"hidden": width, "vocab": size})
        for name, kind, width in itertools.product(trainer or TRAINERS, adapter or ADAPTERS, widths):
            models = [Path(folder, f"{width}-{size}") for size in (SMALL, vocab)]
            of = {"trainer": name, "adapter": kind, "hidden": width}
            try:
                results = measure(partial(build, name, kind, sizes=sizes), models, rounds, report, name)
                gemms = total_ms(kernels_of(two_gemms(length * batch, width, vocab)))
            except Exception as error:  # a step may run out of memory
                report["not_run"][f"{name} {kind} {width}"] = first_line(error)
                results = []
            for m in results:
                m["two_gemms_ms"] = gemms
                report["results"].append(of | m)
                peaks = ["" if m[k] is None else f"{m[k] / 2**30:.2f}" for k in ("peak_bytes", "step_peak_bytes")]
                kernels = ["" if m[k] is None else f"{m[k]:.1f}" for k in ("kernel_ms", "head_ms", "two_gemms_ms")]
                table.add_row(name, kind, str(width), m["kind"], f"{m['ms']:.1f}", *kernels, *peaks)
            gc.collect()
            write(report, out / "trainers.json")
    new_console().print(table)


class Kernel(NamedTuple):
    """A launch of a kernel, or a copy of memory."""

    key: tuple[str, str]  # its name and grid
    ms: float


def kernels_of(step: Callable[[], Any]) -> list[Kernel]:
    """All kernels of a step, in their order; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # only the exported trace has grids
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") in ON_DEVICE]
    return [
        Kernel((e["name"], str(e["args"].get("grid"))), e["dur"] / 1e3) for e in sorted(events, key=itemgetter("ts"))
    ]


def total_ms(kernels: Sequence[Kernel]) -> float | None:
    """The time of all kernels; None without a GPU."""
    return sum(k.ms for k in kernels) if kernels else None


def head_ms(kernels: Sequence[Kernel], decoder: Sequence[Kernel]) -> float | None:
    """The time of those kernels of a step that the ``decoder`` does not launch in the same order.

    A GEMM may have the grid of one of another size: one that takes far longer than the decoder's is not the same.
    """
    if not kernels:
        return None
    same = matching(tuple(k.key for k in decoder), tuple(k.key for k in kernels))
    shared = [kernels[b].ms for a, b in same if kernels[b].ms < 2 * decoder[a].ms + SHORT]
    return sum(k.ms for k in kernels) - sum(shared)


@cache
def matching(a: tuple[Any, ...], b: tuple[Any, ...]) -> list[tuple[int, int]]:
    """The places of what both have in the same order. What both begin and end with is not searched, for speed."""
    least = min(len(a), len(b))
    first = next((n for n in range(least) if a[n] != b[n]), least)
    last = next((n for n in range(least - first) if a[-1 - n] != b[-1 - n]), least - first)
    middle = SequenceMatcher(None, a[first : len(a) - last], b[first : len(b) - last], autojunk=False)
    blocks = [(first + m.a, first + m.b, m.size) for m in middle.get_matching_blocks()]
    blocks = [(0, 0, first), *blocks, (len(a) - last, len(b) - last, last)]
    return [(i + n, j + n) for i, j, size in blocks for n in range(size)]


def median_of(times: Sequence[float | None]) -> float | None:
    """The median; None without a GPU."""
    known = [t for t in times if t is not None]
    return statistics.median(known) if known else None


def two_gemms(tokens: int, width: int, vocab: int) -> Callable[[], None]:
    """The logits of all completions and the gradient of their hidden states, 4096 tokens at a time."""
    cuda = torch.cuda.is_available()
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16} if cuda else {}
    hidden, weight = torch.randn(tokens, width, **where), torch.randn(vocab, width, **where)

    def step() -> None:
        for rows in hidden.split(4096):
            torch.mm(torch.mm(rows, weight.t()), weight)

    return step


def measure(
    build: Callable[[Path], Step], models: Sequence[Path], rounds: int, report: dict[str, Any], name: str
) -> list[dict[str, Any]]:
    """The results of both kinds for a step of the second model; the first has the same decoder, and a small head."""
    step = build(models[0])
    for _ in range(2):
        step()
    decoders = [kernels_of(step) for _ in range(PROFILES_OF_DECODER)]
    decoder = median_of([total_ms(of) for of in decoders])
    step = build(models[1])
    with onepass.patch():
        add_sources(report, name, step)
    cuda = torch.cuda.is_available()
    turns = [kind for _ in range(rounds) for kind in KINDS]
    random.Random(0).shuffle(turns)
    found: dict[str, dict[str, Any]] = {
        kind: {"kind": kind, "runs": [], "peak_bytes": None, "step_peak_bytes": None} for kind in KINDS
    }
    for warm, kind in [(True, kind) for kind in KINDS] + [(False, kind) for kind in turns]:
        with KINDS[kind]():
            gc.collect()
            before = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            peak = step()
            if cuda:
                torch.cuda.synchronize()
            if not warm:
                found[kind]["runs"].append((time.perf_counter() - start) * 1e3)
                if cuda:
                    found[kind]["peak_bytes"] = peak - before
                    found[kind]["step_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    profiles: dict[str, list[list[Kernel]]] = {kind: [] for kind in KINDS}
    for kind in [*KINDS] * PROFILES:  # in turns, since the time of a GEMM changes with the temperature of the card
        with KINDS[kind]():
            profiles[kind].append(kernels_of(step))
    for kind, of in found.items():
        kernels = median_of([total_ms(p) for p in profiles[kind]])
        head = median_of([head_ms(p, decoders[0]) for p in profiles[kind]])
        more = None if kernels is None or decoder is None else kernels - decoder
        of |= {"ms": statistics.median(of["runs"]), "kernel_ms": kernels, "head_ms": head, "difference_ms": more}
    return list(found.values())
