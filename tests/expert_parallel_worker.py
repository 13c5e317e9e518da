"""What every process of test_expert_parallel.py runs: MoE models, sharded by expert, by FSDP2 and by both.

A model is trained for ten steps by one process, and by several in every layout: losses and gradients are the same.
The model of one process has the eager experts of transformers, the others have ours.
"""

import copy
import datetime
import functools
import sys
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import peft
import pytest
import torch
import torch._dynamo  # DTensors import it, which is done once, before processes are forked
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed import DistributedConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe

import onepass
from onepass.core.collectives import Replicated
from onepass.integrations import transformers_experts

STEPS, VOCAB, BATCH, EXPERTS, K = 10, 32, (4, 5), 8, 2
NOBODYS = slice(6, 8)  # experts of gpt-oss that no token chooses; of four processes, they are all that one of them has
SIZES = dict(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=12, moe_intermediate_size=12, head_dim=4,
    num_attention_heads=4, num_key_value_heads=4, num_local_experts=EXPERTS, num_experts=EXPERTS,
    num_experts_per_tok=K, max_position_embeddings=16, attn_implementation="eager", tie_word_embeddings=False,
    pad_token_id=0, eos_token_id=1, bos_token_id=2,
)  # fmt: skip
FAMILIES = {"qwen3_moe": modeling_qwen3_moe, "mixtral": modeling_mixtral, "gpt_oss": modeling_gpt_oss}
# FSDP2 divides float64 gradients of experts twice if they are sharded by expert alone (efsdp_size = 1).
DTYPES = {"qwen3_moe": torch.float64, "mixtral": torch.float32, "gpt_oss": torch.float64}
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
    sub_config: bool = False  # experts have a config of their own, without the sizes, as in models that read images


def adapted(model):
    torch.manual_seed(3)  # factors are those of all experts on every process
    config = peft.LoraConfig(
        r=2, lora_alpha=3, init_lora_weights=False, target_modules=[],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def load(family, path=None, implementation="onepass", **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path or f"{FOLDER}/{family}", experts_implementation=implementation, dtype=DTYPES[family],
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
    return torch.optim.SGD(trained, lr=0.03, momentum=0.9, foreach=False)  # DTensors of several meshes


REFERENCES = {}


def prepare(folder):
    """Write a checkpoint of every family, and train it on one process, with transformers' own experts."""
    global FOLDER
    FOLDER = folder
    transformers_experts.register()
    for family in FAMILIES:
        config = transformers.AutoConfig.for_model(family, **SIZES, num_hidden_layers=2 if family == "gpt_oss" else 1)
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


def build(layout, **options):
    model = distributed(layout, **options).train()
    if layout.sub_config:
        config = copy.copy(model.config)
        del config.distributed_config
        for experts in (m for m in model.modules() if m.__dict__.get("_is_expert_parallel")):
            experts.config = config
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


def close(got, expected, about, tolerance=2e-4):
    assert got.shape == expected.shape, about
    if got.numel():
        error = (got - expected).abs().max().item() / max(expected.abs().max().item(), 1e-3)
        assert error < tolerance, f"{about}: {error}"


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
        total = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(parts):
            if layout.accumulate:
                sharded = model.base_model.model if layout.lora else model
                sharded.set_requires_gradient_sync(number == len(parts) - 1)
            loss = loss_of(model, n, part, layout.fsdp)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total, group=group)
        close(total / layout.fsdp, losses[n].double(), f"{layout}, loss {n}")
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


def loaded(layout, path, adapter=None):
    """What was trained and saved in another layout has the loss of what one process has trained."""
    with onepass.patch("transformers"), torch.no_grad():
        model = distributed(layout, path) if layout.tp * layout.fsdp > 1 else load(layout.family, path)
        if adapter:
            model = peft.PeftModel.from_pretrained(model, adapter)
        found = loss_of(model, STEPS)
    close(found, REFERENCES[layout.family, adapter is not None][0][-1], f"{layout} from {path}, {adapter}")


def save_adapter(model, path, rank):
    """By one process, as Trainer does."""
    state = {name: whole(t.detach()) for name, t in model.named_parameters() if "lora" in name}
    if rank == 0:
        model.peft_config["default"].base_model_name_or_path = None
        model.save_pretrained(path, state_dict=state)
    dist.barrier()


def of_two(rank, ranks):
    for layout, model in run(
        rank,
        Layout("qwen3_moe", False, tp=2, ep=2, how="all_reduce"),
        Layout("mixtral", True, tp=2, ep=2),
        Layout("gpt_oss", True, tp=2, ep=2, how="all_reduce"),
        Layout("gpt_oss", False, fsdp=2, accumulate=True),
        Layout("qwen3_moe", True, fsdp=2, factors=0, accumulate=True),
        Layout("mixtral", False, fsdp=2, ep=2),
        Layout("gpt_oss", True, fsdp=2, ep=2, how="onepass", factors=0),
    ):
        if layout.family == "mixtral" and layout.lora:
            save_adapter(model, f"{FOLDER}/adapter of mixtral", rank)
        elif layout.family == "mixtral":
            model.save_pretrained(f"{FOLDER}/trained")


def of_four(rank, ranks):
    for layout, model in run(
        rank,
        Layout("mixtral", False, fsdp=4, ep=2),
        Layout("gpt_oss", True, fsdp=4, ep=4, factors=1),
        Layout("gpt_oss", False, tp=4, ep=4),
        Layout("qwen3_moe", True, tp=2, fsdp=2, ep=4, how="onepass"),
    ):
        if layout.family == "gpt_oss" and layout.lora:
            save_adapter(model, f"{FOLDER}/adapter of gpt_oss", rank)
        elif layout.family == "mixtral" and not layout.lora:
            model.save_pretrained(f"{FOLDER}/shards", distributed_checkpoint=True)
    loaded(Layout("mixtral", False, tp=4, ep=4, how="all_reduce"), f"{FOLDER}/trained")
    loaded(Layout("mixtral", True, fsdp=4, ep=2), None, f"{FOLDER}/adapter of mixtral")
    loaded(Layout("mixtral", False, tp=2, fsdp=2, ep=2), f"{FOLDER}/shards")


def of_four_more(rank, ranks):
    layouts = dict(tp=2, fsdp=2, ep=2, how="all_reduce"), dict(tp=2, fsdp=2, ep=4)
    for _ in run(rank, *(Layout(name, True, **of) for name, of in zip(("qwen3_moe", "mixtral"), layouts))):
        pass


def sub_config(rank, ranks):
    """Also in a process group after one that was destroyed."""
    for group in range(2):
        if group:
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", init_method=f"file://{FOLDER}/second store", rank=rank, world_size=ranks,
                timeout=datetime.timedelta(seconds=60),
            )  # fmt: skip
        for _ in run(rank, Layout("mixtral", True, tp=2, ep=2, sub_config=True)):
            pass


def compiled(rank, ranks):
    """The gradients of factors are summed in compiled models, too, and those of a result that a graph returns."""
    with onepass.patch("transformers"):
        model = build(Layout("mixtral", True, tp=2, ep=2))
        loss_of(torch.compile(model, backend="aot_eager"), 0).backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            close(p.grad, REFERENCES["mixtral", True][1][0][name], f"compiled, {name}")
    group = dist.group.WORLD.group_name
    leaf = torch.ones(4, requires_grad=True)
    mine = torch.compile(lambda t: Replicated.apply(t, group)[2 * rank : 2 * rank + 2], backend="aot_eager")
    mine(leaf).sum().backward()
    assert leaf.grad.tolist() == [1, 1, 1, 1]
    torch._dynamo.reset()


def of_one(rank, ranks):
    loaded(Layout("mixtral", False), f"{FOLDER}/trained")
    loaded(Layout("mixtral", True), None, f"{FOLDER}/adapter of mixtral")
    loaded(Layout("gpt_oss", True), None, f"{FOLDER}/adapter of gpt_oss")


@contextmanager
def calls_of_expert_mlp():
    """The arguments of all calls."""
    given, expert_mlp = [], transformers_experts.expert_mlp

    def spy(*arguments, **options):
        given.append((arguments, options))
        return expert_mlp(*arguments, **options)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(transformers_experts, "expert_mlp", spy)
        yield given


def mixed_precision(rank, ranks):
    """Experts compute in bfloat16, also with factors that FSDP2 does not cast."""
    with onepass.patch("transformers"), calls_of_expert_mlp() as given:
        layout = Layout("qwen3_moe", True, fsdp=2, ep=2, factors=0)
        model = build(layout, fsdp_mixed_precision=True)
        loss = loss_of(model, 0, slice(2 * rank, 2 * rank + 2), 2)
        loss.backward()
    assert {hidden.dtype for (hidden, *_), _ in given} == {torch.bfloat16}
    dist.all_reduce(loss.data)
    losses, gradients = REFERENCES["qwen3_moe", True]
    assert loss.item() / 2 == pytest.approx(losses[0].item(), rel=0.02)
    for name, p in model.named_parameters():
        if p.requires_grad:
            found, expected = whole(p.grad).flatten(), gradients[0][name].flatten()
            assert p.grad.dtype == p.dtype
            assert torch.cosine_similarity(found, expected, dim=0) > 0.98, name


if __name__ == "__main__":
    import json

    import expert_parallel_worker as worker
    from vocab_parallel_worker import fork

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    worker.prepare(sys.argv[1])
    sys.exit(fork(json.loads(sys.argv[2]), sys.argv[1]))
