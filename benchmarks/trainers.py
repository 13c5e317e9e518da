"""`python -m benchmarks trainers`: a training step of TRL's GRPO and DPO trainers, with and without `onepass.patch`.

A step is loss, backward and optimizer on one batch that is prepared before. Generation is the same either way, and is
left out. The two kinds take turns. Because the decoder is tiny and the host may limit the speed, the time of all
kernels of a step is reported too. Memory is counted without the model and the optimizer's state, once until the
gradients are computed and once until the end of the step.
"""

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import onepass
from benchmarks.harness import Out, new_console, now, write
from benchmarks.sources import add_sources
from onepass.cli.environment import environment, package_version

KINDS: dict[str, Callable[[], Any]] = {"TRL": nullcontext, "onepass": onepass.patch}
Step = Callable[[], int]


def trainers(
    out: Out = Path(".bench"),
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 151936,
    hidden: Annotated[int, typer.Option(help="Width of the decoder.")] = 1024,
    length: Annotated[int, typer.Option(help="Tokens of a completion.")] = 1024,
    batch: Annotated[int, typer.Option(help="Completions of a batch.")] = 16,
    rounds: Annotated[int, typer.Option(help="Steps of each kind.", min=1)] = 15,
) -> None:
    """Time a training step of TRL's trainers with and without `onepass.patch`; write a table and a JSON. Needs TRL."""
    from benchmarks.trainer_steps import build_steps  # imports TRL

    sizes = {"vocab": vocab, "hidden": hidden, "length": length, "batch": batch, "rounds": rounds}
    packages = {name: package_version(name) for name in ("trl", "transformers")}
    report: dict[str, Any] = {"date": now(), "environment": environment() | packages, "sizes": sizes}
    report |= {"results": [], "sources": {}}
    table = Table("trainer", "kind", "ms a step", "ms of kernels", "peak GiB of forward + backward", "of the step")
    for name, build in build_steps.items():
        with tempfile.TemporaryDirectory() as folder:
            step = build(Path(folder), sizes)
            measured = measure(step, rounds)
            with onepass.patch():
                add_sources(report, name, step)
        for m in measured:
            report["results"].append({"trainer": name, **m})
            peaks = ["" if m[k] is None else f"{m[k] / 2**30:.2f}" for k in ("peak_bytes", "step_peak_bytes")]
            kernels = "" if m["kernel_ms"] is None else f"{m['kernel_ms']:.1f}"
            table.add_row(name, m["kind"], f"{m['ms']:.1f}", kernels, *peaks)
        write(report, out / "trainers.json")
    new_console().print(table)


def measure(step: Step, rounds: int) -> list[dict[str, Any]]:
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
    for kind, of in found.items():
        of |= {"ms": statistics.median(of["runs"]), "kernel_ms": None}
        if cuda:
            with KINDS[kind](), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step()
                torch.cuda.synchronize()
            of["kernel_ms"] = sum(e.self_device_time_total for e in profile.key_averages()) / 1e3
    return list(found.values())
