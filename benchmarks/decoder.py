"""`python -m benchmarks decoder`: time and memory of training steps of mixtures whose experts are quantized.

Models have the real sizes of a layer, random weights, fewer layers than the published ones, gradient checkpointing, and
LoRA of rank 16 on attention and experts. Steps are those of transformers' `Trainer`, with AdamW on the adapters. The
ways are PEFT with transformers' ``grouped_mm``, which decodes all experts of a layer and adds the factors' product to
them, and ``experts_implementation="onepass"`` under `onepass.patch("transformers")`. Each way has a process of its
own. Both have the same codes, batches and adapters, so that their losses can be compared.

The memory of more layers is extrapolated: a peak is that of the layers that were built, plus what each further layer
keeps (its codes, other weights, adapters and their optimizer's state, and the hidden states that checkpointing keeps).
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.harness import Out, check_choices, command, new_console, now, write
from benchmarks.lm_steps import CUDA, Clock, combined, timed_by
from benchmarks.workers import Failure, Worker, serve
from onepass.cli.environment import environment, package_version

# What the published configurations say, besides the number of layers.
QWEN3 = dict(
    kind="Qwen3Moe", vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_experts=128,
    num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
)  # fmt: skip
GPT_OSS = dict(
    kind="GptOss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_local_experts=32,
    num_experts_per_tok=4, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
)  # fmt: skip
MIXTRAL = dict(
    kind="Mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_local_experts=8,
    num_experts_per_tok=2, num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
TINY = QWEN3 | dict(
    vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32,
)  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], int, str]] = {  # sizes, layers of the published model, format of its experts
    "qwen3-30b-a3b": (QWEN3, 48, "nf4"),
    "gpt-oss-20b": (GPT_OSS, 24, "mxfp4"),
    "mixtral-8x7b": (MIXTRAL, 32, "nf4"),
    "tiny": (TINY, 4, "nf4"),
}
WAYS = {"PEFT": "grouped_mm", "onepass": "onepass"}
RANK = 16
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def decoder(
    out: Out = Path(".bench"),
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; repeatable.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; repeatable.")] = None,
    layers: Annotated[int, typer.Option(help="Layers that are built.", min=2)] = 12,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)] = 4096,
    batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps that are measured.", min=1)] = 5,
) -> None:
    """Time and memory of training steps with quantized experts, with and without onepass; write a table and a JSON."""
    check_choices((model, MODELS), (way, WAYS))
    ways = way or list(WAYS)
    sizes = {"layers": layers, "length": length, "batch": batch, "steps": steps}
    report: dict[str, Any] = {"command": command(), "date": now(), "environment": environment() | packages()}
    report |= {"sizes": sizes, "results": [], "not_run": {}, "sources": {}}
    console = new_console()
    title = "model", "way", "layers", "ms", "least", "most", "peak GiB", "of all layers", "peak GiB, extrapolated"
    table = Table(*title)
    for m in model or ["qwen3-30b-a3b"]:
        workers = {w: Worker("benchmarks.decoder", w, environment=ENVIRONMENT) for w in ways}
        for w, worker in workers.items():
            try:
                found = worker.ask("measure", name=m, **sizes)
                if w == "onepass":
                    report["sources"][m] = worker.ask("sources", name=m, length=min(length, 64))
            except Failure as failure:  # the other way is measured all the same
                report["not_run"][f"{m}, {w}"] = failure.args[0]
                continue
            finally:
                worker.stop()
            r = combined(m, w, "experts", None, [found]) | {
                n: found[n] for n in ("losses", "experts", "layers", "whole")
            }
            report["results"].append(r)
            write(report, out / "decoder.json")
            peaks = ("" if p is None else f"{p / 2**30:.2f}" for p in (r["peak_bytes"], r["whole"]["peak_bytes"]))
            times = [f"{r[n]:.0f}" for n in ("ms", "least_ms", "most_ms")]
            table.add_row(m, w, str(layers), *times, next(peaks), str(MODELS[m][1]), next(peaks))
    console.print(table)
    for m in {r["model"] for r in report["results"]}:
        curves = [r["losses"] for r in report["results"] if r["model"] == m]
        if len(curves) > 1:
            apart = max(abs(a - b) for a, b in zip(*curves))
            console.print(f"{m}: losses differ by at most {apart:.1e}", highlight=False)
    for what, why in report["not_run"].items():
        console.print(f"not run: {what}: {why}", highlight=False)


def packages() -> dict[str, Any]:
    return {name: package_version(name) for name in ("transformers", "peft", "accelerate", "bitsandbytes")}


def answer_to(request: dict[str, Any]) -> Any:
    """What a process of one way is asked for."""
    way = sys.argv[2]
    return measure(way, **request) if request.pop("do") == "measure" else sources(way, **request)


def prepare(way: str) -> None:
    import transformers
    from peft.tuners.lora import layer

    import onepass

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if way == "onepass":
        onepass.patch("transformers")
    elif hasattr(layer, "_LoraFactorsProxy"):  # PEFT 0.21.2 would leave these on a weight that is parametrized
        setattr(layer, "_LoraParameterProxy", layer._LoraFactorsProxy)  # noqa: B010
    gc.collect()
    gc.freeze()


def build(way: str, name: str, layers: int, length: int) -> tuple[Any, list[str]]:
    """The model, and the lines of `moe.describe`. Layers are quantized one after the other, as they are made."""
    import transformers
    from peft import LoraConfig, get_peft_model

    from onepass import moe

    given, _, format = dict(MODELS[name][0]), *MODELS[name][1:]
    config = getattr(transformers, f"{given.pop('kind')}Config")(
        **given, num_hidden_layers=layers, max_position_embeddings=max(length, 4096), use_cache=False
    )
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=WAYS[way]
        )
    moe.quantize_experts(model, format)
    if CUDA:
        torch.cuda.empty_cache()
    lines = moe.describe(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()  # for checkpointing with a frozen embedding
    adapters = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=[line.name for line in lines],
    )  # fmt: skip
    torch.manual_seed(0)
    return get_peft_model(model, adapters).train(), [str(line) for line in lines]


def measure(way: str, name: str, layers: int, length: int, batch: int, steps: int) -> dict[str, Any]:
    import transformers

    model, lines = build(way, name, layers, length)
    clock = Clock(steps)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(MODELS[name][0]["vocab_size"], (batch * clock.steps, length), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, max_steps=clock.steps, per_device_train_batch_size=batch, learning_rate=1e-3,
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="steps", logging_steps=1,
            disable_tqdm=True, use_cpu=not CUDA,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[timed_by(clock)])
        trainer.train()
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    report = clock.report()
    of_layer = kept_by_layer(model, layers) + batch * length * model.config.hidden_size * 2
    total = MODELS[name][1]
    peak = report["peak_bytes"] and report["peak_bytes"] + (total - layers) * of_layer
    whole = {"layers": total, "bytes_of_layer": of_layer, "peak_bytes": peak}
    return report | {"losses": losses, "experts": lines[:2], "layers": layers, "whole": whole}


def kept_by_layer(model: torch.nn.Module, layers: int) -> int:
    """Bytes that a layer keeps: weights, codes and scales, and gradient and two moments of what is trained."""
    of_layers = [t for n, t in (*model.named_parameters(), *model.named_buffers()) if ".layers." in n]
    return sum(t.nbytes * (4 if t.requires_grad else 1) for t in of_layers) // layers


def sources(way: str, name: str, length: int) -> dict[str, str]:
    from benchmarks.sources import sources_of

    gc.collect()
    model, _ = build(way, name, 2, length)
    device = next(model.parameters()).device
    ids = torch.randint(MODELS[name][0]["vocab_size"], (1, length), device=device)
    return sources_of(lambda: model(input_ids=ids, labels=ids).loss.backward())


if __name__ == "__main__":
    prepare(sys.argv[2])
    serve(int(sys.argv[1]), answer_to)
