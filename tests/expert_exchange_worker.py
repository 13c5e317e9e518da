"""What every process of test_expert_parallel.py runs on experts without a model, and what cannot work."""

from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from transformers.distributed import expert_parallel

import onepass
from expert_parallel_worker import (
    EXPERTS,
    NOBODYS,
    REFERENCES,
    K,
    Layout,
    adapted,
    calls_of_expert_mlp,
    close,
    distributed,
    load,
    loss_of,
    whole,
)  # fmt: skip
from onepass import reference
from onepass.integrations import transformers_experts


@contextmanager
def calls_of_sum_rows():
    """The weights of all calls."""
    given, sum_rows = [], reference.sum_rows

    def spy(rows, places, weights=None):
        given.append(weights)
        return sum_rows(rows, places, weights)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(reference, "sum_rows", spy)
        yield given


def sharded_experts(ranks, how, family="gpt_oss", implementation="onepass", dtype=torch.float64):
    """Experts, sharded and whole, without the rest of the model."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("tp", "ep"))
    experts, expected = (
        load(family, implementation=i).model.layers[0].mlp.experts.to(dtype) for i in (implementation, "eager")
    )
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in experts.named_parameters()}
    holder = torch.nn.ModuleDict({"experts": experts})
    of_batch = mesh["ep"] if how == "all_reduce" else mesh["tp"]
    expert_parallel.apply_expert_parallelism(
        holder, mesh["ep"], of_batch, plan | {"experts": "ep_dispatch_experts"}, how
    )
    return experts, expected


def without_rows(rank, ranks):
    """Processes whose batch is empty, also if no process has a row; and the weights are used where they lie."""
    generator = torch.Generator().manual_seed(5)
    for how, counts in (("all_to_all", (7, 0)), ("all_to_all", (0, 0)), ("all_reduce", (0, 0)), ("all_reduce", (3, 3))):
        experts, expected = sharded_experts(ranks, how)
        hidden, ids = (
            torch.randn(7, 8, generator=generator).double(),
            torch.randint(EXPERTS, (7, K), generator=generator),
        )
        weights = torch.rand(7, K, generator=generator).double()
        mine, all_rows = slice(0, counts[rank]), slice(0, max(counts))
        leaves = [t.clone().requires_grad_() for t in (hidden[mine], weights[mine])]
        with calls_of_expert_mlp() as given:
            out = experts(leaves[0], ids[mine], leaves[1])
        out.sum().backward()
        of_one = [t.clone().requires_grad_() for t in (hidden[all_rows], weights[all_rows])]
        right = expected(of_one[0], ids[all_rows], of_one[1])
        if right.requires_grad:  # not of no row
            right.sum().backward()
        close(out.detach(), right.detach()[mine], how)
        for a, b in zip(leaves, of_one):
            close(a.grad, b.grad[mine] if max(counts) else b.detach(), f"{how}, {counts}")
        for (name, p), q in zip(experts.named_parameters(), expected.parameters()):
            close(whole(p.grad), torch.zeros_like(q) if q.grad is None else q.grad, f"{how}, {counts}, {name}")
        ((_, _, gate_up, down), options) = given[0]
        for tensor, name in (
            (gate_up, "gate_up_proj"), (down, "down_proj"),
            (options["gate_up_bias"], "gate_up_proj_bias"), (options["down_bias"], "down_proj_bias"),
        ):  # fmt: skip
            assert tensor.data_ptr() == getattr(experts, name).to_local().data_ptr(), name


def own_exchange(rank, ranks):
    """Different numbers of tokens, experts that nobody chooses, and ids of no expert, in the exchange of onepass.

    And in that of transformers, "all_to_all" here, with the sums of onepass; ids of no expert are an error in it.
    """
    generator = torch.Generator().manual_seed(5)
    cases = (
        ("gpt_oss", "onepass", torch.float64, (5, 9), None),
        ("gpt_oss", "onepass", torch.float32, (5, 9), False),
        ("mixtral", "onepass", torch.bfloat16, (11, 3), True),
        ("mixtral", "onepass", torch.float32, (0, 6), False),
        ("qwen3_moe", "eager", torch.float32, (0, 0), None),
        ("qwen3_moe", "grouped_mm", torch.float32, (1, 0), None),
    )
    for how, (family, implementation, dtype, counts, recompute) in product(("onepass", "auto"), cases):
        about = f"{how}, {family}, {implementation}, {dtype}, {counts}, {recompute}"
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-4
        experts, expected = sharded_experts(ranks, how, family, implementation, dtype)
        expected.float() if dtype == torch.bfloat16 else expected.to(dtype)
        all_rows, mine = sum(counts), slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        hidden = torch.randn(all_rows, 8, generator=generator).to(dtype)
        weights = torch.rand(all_rows, K, generator=generator).to(dtype)
        ids = torch.randint(NOBODYS.start, (all_rows, K), generator=generator)
        if sum(counts) == 1:
            ids.fill_(0)  # the other process has no row
        dropped = torch.rand(all_rows, K, generator=generator) < (0.2 if how == "onepass" else 0)
        leaves = [t[mine].clone().requires_grad_() for t in (hidden, weights)]
        given = (
            leaves[0],
            ids.masked_fill(dropped, -1).where(ids % 2 == 0, ids.masked_fill(dropped, EXPERTS))[mine],
            leaves[1],
        )
        with onepass.patch("transformers") if how != "onepass" else nullcontext(), calls_of_sum_rows() as sums:
            out = experts(*given) if recompute is None else checkpoint(experts, *given, use_reentrant=recompute)
            assert out.dtype == dtype
            out.float().square().sum().backward()
        assert any(w is not None for w in sums) == (how != "onepass" and implementation == "onepass"), about
        wide = torch.promote_types(dtype, torch.float32)
        of_all = [t.to(wide).requires_grad_() for t in (hidden, weights)]
        right = expected(of_all[0], ids, of_all[1].masked_fill(dropped, 0.0))
        right.square().sum().backward() if all_rows else None
        close(out.detach().to(wide), right.detach()[mine], about, tolerance)
        for a, b in zip(leaves, of_all):
            close(
                a.grad.to(wide), torch.zeros_like(a, dtype=wide) if b.grad is None else b.grad[mine], about, tolerance
            )
        for (name, p), q in zip(experts.named_parameters(), expected.parameters(), strict=True):
            of_expected = torch.zeros_like(q) if q.grad is None else q.grad
            close(whole(p.grad).to(wide), of_expected, f"{about}, {name}", tolerance)


def gradient_on_one_process(rank, ranks):
    """Hidden states, or weights, require a gradient on one process only, as behind what only its images train."""
    generator = torch.Generator().manual_seed(5)
    hidden, ids = torch.randn(8, 8, generator=generator).double(), torch.randint(EXPERTS, (8, K), generator=generator)
    weights, mine = torch.rand(8, K, generator=generator).double(), (slice(0, 5), slice(5, 8))[rank]
    for number in range(2):
        experts, expected = sharded_experts(ranks, "onepass", "qwen3_moe")
        leaves = [t[mine].clone().requires_grad_() for t in (hidden, weights)]
        leaves[number].requires_grad_(rank == 0)
        experts(leaves[0], ids[mine], leaves[1]).square().sum().backward()
        of_all = [t.clone().requires_grad_() for t in (hidden, weights)]
        expected(of_all[0], ids, of_all[1]).square().sum().backward()
        assert (leaves[number].grad is None) == (rank > 0)
        for a, b in zip(leaves, of_all):
            if a.requires_grad:
                close(a.grad, b.grad[mine], f"gradient on one process, {number}")
        for (name, p), q in zip(experts.named_parameters(), expected.parameters(), strict=True):
            close(whole(p.grad), q.grad, f"gradient on one process, {number}, {name}")


def weights_on_one_process(rank, ranks):
    """Where nothing else requires a gradient, the backward of weights exchanges nothing, as in transformers' code."""
    generator = torch.Generator().manual_seed(5)
    hidden, ids = torch.randn(8, 8, generator=generator).double(), torch.randint(EXPERTS, (8, K), generator=generator)
    weights, mine = torch.rand(8, K, generator=generator).double(), (slice(0, 5), slice(5, 8))[rank]
    experts, expected = sharded_experts(ranks, "all_to_all", "qwen3_moe")
    experts.requires_grad_(False)
    leaf, of_all = weights[mine].clone().requires_grad_(rank == 0), weights.clone().requires_grad_()
    with onepass.patch("transformers"):
        out = experts(hidden[mine], ids[mine], leaf).square().sum()
        if rank == 0:
            out.backward()
            expected(hidden, ids, of_all).square().sum().backward()
            close(leaf.grad, of_all.grad[mine], "weights on one process")
        dist.barrier()


def unsupported(rank, ranks):
    """What cannot work is an error that says why."""
    experts = sharded_experts(ranks, "all_to_all")[0]
    rows = torch.zeros(3, 8), torch.zeros(3, K, dtype=torch.long), torch.ones(3, K)
    experts.num_experts = EXPERTS
    with pytest.raises(
        ValueError, match=r"GptOssExperts\.gate_up_proj: expected all of 8 experts on this process, got \("
    ):
        transformers_experts.experts_forward(experts, *rows)
    with onepass.patch("transformers"):
        model = adapted(distributed(Layout("mixtral", True, tp=2)))
        with pytest.raises(
            NotImplementedError, match=r"expected whole experts for an adapter of 24 x 8, got shards of 12"
        ):
            loss_of(model, 0)
        model = adapted(distributed(Layout("mixtral", True, tp=2, ep=2)))
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
        with pytest.raises(
            NotImplementedError, match=r"MixtralExperts\.down_proj is sharded .* got adapters \['default', 'o"
        ):
            loss_of(model, 0)
    model = distributed(Layout("mixtral", False, tp=2))  # without an adapter, shards of each expert
    with torch.no_grad():
        close(loss_of(model, 0), REFERENCES["mixtral", False][0][0], "tensor parallel")
