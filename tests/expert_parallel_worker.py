"""What every process of test_expert_parallel.py runs: MoE models of transformers, sharded by expert, by FSDP2 and by both.

A model is trained for ten steps by one process, and by several in every layout: losses and gradients are the same.
The model of one process has the eager experts of transformers, the others have ours.
"""

import functools
import os
import sys
from contextlib import nullcontext
from typing import NamedTuple

import peft
import pytest
import torch
import torch._dynamo  # DTensors import it, which is done once, before processes are forked
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed import DistributedConfig, expert_parallel
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

import onepass
from onepass.integrations import expert_shards, transformers_experts

STEPS, VOCAB, BATCH, EXPERTS, K = 10, 32, (4, 5), 8, 2
NOBODYS = slice(6, 8)  # experts of gpt-oss that no token chooses; of four processes, they are all that one of them has
SIZES = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=6, moe_intermediate_size=6, num_hidden_layers=2, head_dim=4,
    num_attention_heads=4, num_key_value_heads=4, num_local_experts=EXPERTS, num_experts=EXPERTS,
    num_experts_per_tok=K, max_position_embeddings=16, attn_implementation="eager", tie_word_embeddings=False,
    pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
FAMILIES = {"qwen3_moe": modeling_qwen3_moe, "mixtral": modeling_mixtral, "gpt_oss": modeling_gpt_oss}
FOLDER = ""


class Layout(NamedTuple):
    """Of a case. ``ep`` processes hold different experts, ``tp`` have the same batch, ``fsdp`` different ones."""

    family: str
    lora: bool
    tp: int = 1
    fsdp: int = 1
    ep: int = 1
    how: str = "all_to_all"
    factors: int | None = None  # the dimension over which FSDP2 shards LoRA's factors
    accumulate: bool = False


def adapted(model):
    torch.manual_seed(3)  # factors are those of all experts on every process
    config = peft.LoraConfig(
        r=2, lora_alpha=3, init_lora_weights=False, target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def load(family, path=None, implementation="onepass", **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path or f"{FOLDER}/{family}", experts_implementation=implementation, dtype=torch.float32,
        attn_implementation="eager", **options,
    )  # fmt: skip


@functools.cache
def batches():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (STEPS + 1, *BATCH), generator=generator)
    labels = ids.clone()
    labels[:, 0, :2] = -100  # unevenly over the processes
    return ids, labels


def loss_of(model, n, rows=slice(None), batches_of_step=1):
    """The sum over some rows, divided by the mean number of labels of the processes, which FSDP2 averages over."""
    ids, labels = batches()
    items = (labels[n, :, 1:] != -100).sum() / batches_of_step
    return model(input_ids=ids[n, rows], labels=labels[n, rows], num_items_in_batch=items).loss


def optimizer_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, foreach=False)  # DTensors of several meshes


REFERENCES = {}
WORST = []


def prepare(folder):
    """Write a checkpoint of every family, and train it on one process, with transformers' own experts."""
    global FOLDER
    FOLDER = folder
    transformers_experts.register()
    for family in FAMILIES:
        config = transformers.AutoConfig.for_model(family, **SIZES)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" not in name:
                    p.copy_(torch.randn(p.shape, dtype=p.dtype) * 0.5)
            if family == "gpt_oss":
                for layer in model.model.layers:
                    layer.mlp.router.bias[NOBODYS] = -1e4
        model.save_pretrained(f"{folder}/{family}")
        for lora in (False, True):
            model = load(family, implementation="eager").train()
            model = adapted(model) if lora else model
            optimizer, losses, gradients = optimizer_of(model), [], []
            for n in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, n)
                loss.backward()
                losses.append(loss.detach())
                gradients.append({k: p.grad.clone() for k, p in model.named_parameters() if p.requires_grad})
                optimizer.step()
            with torch.no_grad():
                losses.append(loss_of(model, STEPS))
            if family == "gpt_oss" and not lora:
                name = "model.layers.1.mlp.experts.down_proj"
                assert all((g[name][NOBODYS] == 0).all() and g[name].any() for g in gradients)
            REFERENCES[family, lora] = losses, gradients


def distributed(layout, path=None, **options):
    config = DistributedConfig(
        tp_size=layout.tp, fsdp_size=layout.fsdp, ep_size=layout.ep, ep_implementation=layout.how, **options
    )
    return load(layout.family, path, distributed_config=config)


def build(layout):
    model = distributed(layout).train()
    if layout.lora:
        model = adapted(model)
    if layout.factors is not None:  # a group each, as PEFT's policy for accelerate wraps what is trained

        def placement(parameter):
            return Shard(layout.factors)

        mesh = model.base_model.model._mesh_manager.get_mesh("fsdp")
        for name, module in model.named_modules():
            if name.endswith("lora_A.default") or name.endswith("lora_B.default"):
                fully_shard(module, mesh=mesh, shard_placement_fn=placement)
    return model


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def close(got, expected, about):
    scale = max(expected.abs().max().item(), 1e-3)
    error = (got - expected).abs().max().item() / scale
    WORST.append((error, about))
    assert got.shape == expected.shape and error < 2e-4, f"{about}: {error}"


def data_group(layout, rank):
    """The processes with different batches, and which of them this is."""
    meshes = dist.new_subgroups_by_enumeration(
        [[*range(n, layout.tp * layout.fsdp, layout.tp)] for n in range(layout.tp)]
    )
    return meshes[0], rank // layout.tp


def train(model, layout, rank):
    group, place = data_group(layout, rank)
    rows = slice(place * BATCH[0] // layout.fsdp, (place + 1) * BATCH[0] // layout.fsdp)
    parts = [slice(rows.start, rows.start + 1), slice(rows.start + 1, rows.stop)] if layout.accumulate else [rows]
    losses, gradients = REFERENCES[layout.family, layout.lora]
    optimizer = optimizer_of(model)
    for n in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, part in enumerate(parts):
            if layout.accumulate:
                model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = loss_of(model, n, part, layout.fsdp)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        close(total / layout.fsdp, losses[n], f"{layout}, loss {n}")
        found = {k: p for k, p in model.named_parameters() if p.requires_grad}
        assert found.keys() == gradients[n].keys()
        for name, p in found.items():
            if not isinstance(p.grad, DTensor) and layout.fsdp > 1:  # as DDP does
                dist.all_reduce(p.grad, group=group)
                p.grad /= layout.fsdp
            close(whole(p.grad), gradients[n][name], f"{layout}, {name}, {n}")
        optimizer.step()


def run(rank, *layouts):
    for layout in layouts:
        with onepass.patch("transformers") if layout.lora else nullcontext():
            model = build(layout)
            train(model, layout, rank)
            yield layout, model


def of_two(rank, ranks):
    for layout, model in run(
        rank,
        Layout("qwen3_moe", False, tp=2, ep=2, how="all_reduce"),
        Layout("mixtral", True, tp=2, ep=2),
        Layout("gpt_oss", True, tp=2, ep=2, how="all_reduce"),
        Layout("gpt_oss", False, fsdp=2),
        Layout("qwen3_moe", True, fsdp=2, factors=0),
        Layout("mixtral", False, fsdp=2, ep=2),
    ):
        pass


def of_four(rank, ranks):
    for layout, model in run(
        rank,
        Layout("qwen3_moe", True, tp=2, fsdp=2, ep=2, how="all_reduce"),
        Layout("mixtral", False, fsdp=4, ep=2),
        Layout("gpt_oss", True, fsdp=4, ep=4, factors=1),
        Layout("mixtral", True, tp=2, fsdp=2, ep=4),
        Layout("gpt_oss", False, tp=4, ep=4),
    ):
        pass


if __name__ == "__main__":
    import json

    import expert_parallel_worker as worker
    from vocab_parallel_worker import fork

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    worker.prepare(sys.argv[1])
    sys.exit(fork(json.loads(sys.argv[2]), sys.argv[1]))
