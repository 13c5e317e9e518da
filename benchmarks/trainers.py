"""One training step of TRL's GRPO and DPO trainers, with and without `onepass.patch`: time and peak memory.

    python benchmarks/trainers.py --out FOLDER

A step is loss, backward and optimizer on one batch that is prepared before: generation is the same either way and is
left out. Both kinds take turns. Where the decoder is tiny the host is the limit, so that the time of all kernels of a
step is told, too. Memory is counted beyond the model and the optimizer's state, once until there are gradients and once
until the step is over. Writes FOLDER/trainers.json and prints a table.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table

import onepass
from onepass.cli.environment import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trainers import bytes_tokenizer, load, reward, save_model

KINDS = {"TRL": nullcontext, "onepass": onepass.patch}


def grpo(folder: Path, common: dict[str, Any], given: argparse.Namespace) -> Any:
    args = trl.GRPOConfig(**common, max_completion_length=given.length, num_generations=given.batch, beta=0.0)
    return trl.GRPOTrainer(
        load(folder), reward_funcs=reward, args=args, processing_class=bytes_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["Once upon a time"] * given.batch}),
    )  # fmt: skip


def dpo(folder: Path, common: dict[str, Any], given: argparse.Namespace) -> Any:
    text = [chr(97 + n) * given.length for n in range(2)]
    data = {"prompt": ["Once upon a time"], "chosen": [text[0]], "rejected": [text[1]]}
    data = {name: values * given.batch for name, values in data.items()}
    common |= {"per_device_train_batch_size": given.batch // 2}  # of pairs
    args = trl.DPOConfig(**common, max_length=2 * given.length)
    return trl.DPOTrainer(
        load(folder), args=args, train_dataset=Dataset.from_dict(data), processing_class=bytes_tokenizer()
    )


def step_of(trainer: Any) -> Callable[[], int]:
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # as its own loop says
    trainer.model.to(trainer.args.device)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    model = trainer.accelerator.prepare(trainer.model_wrapped).train()  # for autocast
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)

    def step() -> int:
        """The peak of memory until there are gradients, in bytes."""
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        trainer.accelerator.backward(loss)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return peak

    return step


def measure(step: Callable[[], int], rounds: int) -> list[dict[str, Any]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".bench"))
    for name, default in (("vocab", 151936), ("hidden", 1024), ("length", 1024), ("batch", 16), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = {name: value for name, value in vars(given).items() if name != "out"}
    versions = {"trl": trl.__version__, "transformers": transformers.__version__}
    report: dict[str, Any] = {"environment": environment() | versions, "sizes": sizes, "results": []}
    given.out.mkdir(parents=True, exist_ok=True)
    table = Table("trainer", "kind", "ms a step", "ms of kernels", "peak GiB of forward + backward", "of the step")
    for name, build in (("GRPO", grpo), ("DPO", dpo)):
        with tempfile.TemporaryDirectory() as folder:
            save_model(
                Path(folder), vocab_size=given.vocab, hidden_size=given.hidden, intermediate_size=2 * given.hidden,
                max_position_embeddings=4 * given.length,
            )  # fmt: skip
            common = dict(
                output_dir=folder, max_steps=1, per_device_train_batch_size=given.batch, report_to="none",
                disable_tqdm=True, save_strategy="no", bf16=torch.cuda.is_available(), gradient_checkpointing=False,
            )  # fmt: skip
            measured = measure(step_of(build(Path(folder), common, given)), given.rounds)
        for m in measured:
            report["results"].append({"trainer": name, **m})
            peaks = ["" if m[k] is None else f"{m[k] / 2**30:.2f}" for k in ("peak_bytes", "step_peak_bytes")]
            kernels = "" if m["kernel_ms"] is None else f"{m['kernel_ms']:.1f}"
            table.add_row(name, m["kind"], f"{m['ms']:.1f}", kernels, *peaks)
        (given.out / "trainers.json").write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
