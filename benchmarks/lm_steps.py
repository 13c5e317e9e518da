"""`python -m benchmarks lm`: time and memory of training steps of whole models through transformers, by `Trainer`.

Models have the shapes of Qwen2.5-0.5B and Llama-3.2-1B, with random weights in bfloat16 and gradient checkpointing. The
ways are the model as it is, with Liger's fused linear cross-entropy and nothing else of Liger, and with
`onepass.patch("transformers")`. Each way has a process of its own, since Liger changes the classes of a model. The
processes take turns: in each, a process builds the model, measures some steps and frees the device. Peaks of memory are
those of the allocator and include the model, its gradients and the optimizer's state. One more step of each turn runs
under torch's profiler, for the time that the device is busy: unlike the time of a step, it does not depend on the host,
which in these models often is the slower of the two.

- ``step``: loss and backward of 4 × 4096 tokens, without an optimizer.
- ``full``, ``lora``: steps of `Trainer` with 8 × 4096 tokens and AdamW, of all parameters or of adapters of rank 16 on
  all linear layers of the decoder.
- ``max_memory``: the ``step`` of a model that is attached with several ``max_memory``.
"""

import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.harness import Out, check_choices, command, new_console, now, write
from benchmarks.workers import Failure, Worker, serve
from onepass.cli.environment import environment, package_version

MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": dict(
        kind="Qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "llama-3.2-1b": dict(
        kind="Llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "tiny": dict(
        kind="Llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip
WAYS = ("plain", "Liger", "onepass")
LIMITS = tuple(mib << 20 for mib in (1088, 1536, 2048, 4096))  # of max_memory
LENGTH, TURNS, WARM = 4096, 2, 2  # turns of each way, and the steps of a turn that are not measured
STEPS = {"step": 14, "full": 5, "lora": 4, "max_memory": 8}  # of a turn that are measured
CUDA = torch.cuda.is_available()


def lm(
    out: Out = Path(".bench"),
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; repeatable.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; repeatable.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)] = LENGTH,
    turns: Annotated[int, typer.Option(help="Of each way.", min=1)] = TURNS,
) -> None:
    """Time and memory of training steps of whole models, with and without onepass; write a table and a JSON."""
    check_choices((model, MODELS), (way, WAYS))
    models, ways = model or ["qwen2.5-0.5b", "llama-3.2-1b"], way or list(WAYS)
    packages = {name: package_version(name) for name in ("transformers", "peft", "liger-kernel")}
    report: dict[str, Any] = {"command": command(), "date": now(), "environment": environment() | packages}
    report |= {"length": length, "turns": turns, "results": [], "not_run": {}, "sources": {}}
    console = new_console()
    steps: list[tuple[str, int | None]] = [("step", None), ("full", None), ("lora", None)]
    cases: list[tuple[str, str, int | None]] = [(w, step, limit) for step, limit in steps for w in ways]
    cases += [("onepass", "max_memory", limit) for limit in LIMITS if "onepass" in ways]
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "0"}
    workers = {w: Worker("benchmarks.lm_steps", w, environment=environ) for w in ways}
    try:
        for m in models:
            found: dict[tuple[str, str, int | None], list[dict[str, Any]]] = {case: [] for case in cases}
            for turn in range(turns):
                console.print(f"{m}, turn {turn + 1} of {turns}", highlight=False)
                for case in cases:
                    w, step, limit = case
                    if limit is not None and turn:  # compared with each other alone, which one turn does
                        continue
                    try:
                        found[case].append(workers[w].ask("measure", name=m, step=step, limit=limit, length=length))
                    except Failure as failure:  # the other steps are measured all the same
                        report["not_run"][f"{m}, {w}, {step}"] = failure.args[0]
            report["results"] += [combined(m, *case, turns=found[case]) for case in cases if found[case]]
            if "onepass" in ways:
                report["sources"][m] = workers["onepass"].ask("sources", name=m, length=length)
            write(report, out / "lm.json")
    finally:
        for worker in workers.values():
            worker.stop()
    table = Table("model", "step", "way", "max_memory, MiB", "ms", "least", "most", "device busy", "peak GiB")
    for r in report["results"]:
        mib = "" if r["max_memory"] is None else str(r["max_memory"] >> 20)
        times = ("" if r[n] is None else f"{r[n]:.1f}" for n in ("ms", "least_ms", "most_ms", "busy_ms"))
        peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.2f}"
        table.add_row(r["model"], r["step"], r["way"], mib, *times, peak)
    console.print(table)
    for what, why in report["not_run"].items():
        console.print(f"not run: {what}: {why}", highlight=False)


def combined(model: str, way: str, step: str, limit: int | None, turns: list[dict[str, Any]]) -> dict[str, Any]:
    times = [t for turn in turns for t in turn["runs"]]
    peaks, busy = ([turn[name] for turn in turns] for name in ("peak_bytes", "busy_ms"))
    return {
        "model": model, "step": step, "way": way, "max_memory": limit, "runs": times, "ms": statistics.median(times),
        "least_ms": min(times), "most_ms": max(times), "peak_bytes": None if None in peaks else max(peaks),
        "busy_ms": None if None in busy else statistics.median(busy),
    }  # fmt: skip


def answer_to(request: dict[str, Any]) -> Any:
    """What a process of one way is asked for; see `prepare`."""
    try:
        return measure(**request) if request.pop("do") == "measure" else sources(**request)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def prepare(way: str) -> None:
    import transformers

    import onepass

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if way == "Liger":
        from liger_kernel.transformers import monkey_patch

        rest = dict(rope=False, rms_norm=False, swiglu=False, cross_entropy=False, fused_linear_cross_entropy=True)
        for kind in {model["kind"].lower() for model in MODELS.values()}:
            getattr(monkey_patch, f"apply_liger_kernel_to_{kind}")(**rest)
    if way == "onepass":
        onepass.patch("transformers")
    gc.collect()
    gc.freeze()  # or the collector looks through all that is imported, in steps that are measured


def measure(name: str, step: str, limit: int | None, length: int) -> dict[str, Any]:
    steps = trainer_steps if step in ("full", "lora") else bare_steps
    return steps(name, length, step, limit).report()


def sources(name: str, length: int) -> dict[str, str]:
    from benchmarks.sources import sources_of

    model = build(name)
    return sources_of(lambda: loss_of(model, batch(name, 2, min(length, 64))).backward())


def build(name: str) -> Any:
    import transformers

    given = dict(MODELS[name])
    kind = given.pop("kind")
    config = getattr(transformers, f"{kind}Config")(**given, max_position_embeddings=2 * LENGTH, use_cache=False)
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def batch(name: str, rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(MODELS[name]["vocab_size"], (rows, length), device="cuda" if CUDA else "cpu")
    return {"input_ids": ids, "labels": ids}


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**given).loss
    return loss


class Clock:
    """Milliseconds of ``count`` steps after those that are not measured, the peak of memory, and a profile."""

    def __init__(self, count: int) -> None:
        self.count, self.steps, self.times = count, WARM + count + CUDA, list[float]()
        self.peak: int | None = None
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if CUDA else None
        self.step, self.start = 0, 0.0

    def begin(self) -> None:
        synchronize()
        if CUDA and self.step == WARM:
            torch.cuda.reset_peak_memory_stats()
        if self.profiler and self.step == WARM + self.count:
            self.peak = torch.cuda.max_memory_allocated()
            self.profiler.start()
        self.start = time.perf_counter()

    def end(self) -> None:
        synchronize()
        if WARM <= self.step < WARM + self.count:
            self.times.append((time.perf_counter() - self.start) * 1e3)
        elif self.profiler and self.step == WARM + self.count:
            self.profiler.stop()
        self.step += 1

    def report(self) -> dict[str, Any]:
        return {"runs": self.times, "peak_bytes": self.peak, "busy_ms": self.profiler and busy_ms(self.profiler)}


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def busy_ms(profiler: torch.profiler.profile) -> float:
    """Milliseconds in which a kernel or a copy ran on the device."""
    device = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, until = 0.0, 0.0
    for start, end in sorted(
        (e.time_range.start, e.time_range.end) for e in device if not getattr(e, "is_user_annotation", False)
    ):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e3


def bare_steps(name: str, length: int, step: str, limit: int | None) -> Clock:
    import onepass

    model, given = build(name), batch(name, 4, length)
    if limit is not None:
        onepass.attach(model, max_memory=limit)

    clock = Clock(STEPS[step])
    for _ in range(clock.steps):
        clock.begin()
        model.zero_grad()
        loss_of(model, given).backward()
        clock.end()
    return clock


def timed_by(clock: Clock) -> Any:
    """A callback of transformers' `Trainer` that times its steps."""
    import transformers

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    return Callback()


def trainer_steps(name: str, length: int, step: str, limit: int | None) -> Clock:
    import transformers

    model = build(name)
    if step == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()  # for checkpointing with a frozen embedding
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    clock = Clock(STEPS[step])
    rows = torch.randint(MODELS[name]["vocab_size"], (8 * clock.steps, length))
    data = [{"input_ids": row, "labels": row} for row in rows]

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=clock.steps, per_device_train_batch_size=8, bf16=False,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            optim="adamw_torch_fused", report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=not CUDA,
        )  # fmt: skip
        transformers.Trainer(model, args, train_dataset=data, callbacks=[timed_by(clock)]).train()
    return clock


if __name__ == "__main__":
    prepare(sys.argv[2])
    serve(int(sys.argv[1]), answer_to)
