"""The experts of Qwen3-MoE as transformers shards them over processes: what is run, and what is expected of it.

The exchange of tokens is that of transformers for all implementations, which differ in ``experts_implementation``
alone, and under `onepass.patch` in who sums the rows that "all_to_all" brings back. Those of onepass also run below the
exchange of onepass (``ep_implementation="onepass"``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.implementations import Tensors
from benchmarks.operations_experts import RANK, SCALING, ExpertsBatch, ours

OPERATIONS = ("experts", "experts_lora")
ALONE = "none"
THEIRS, OWN = "all_to_all", "onepass"
EXCHANGES = (ALONE, THEIRS, OWN, "all_reduce")
PEER, MERGED, OF_PEFT = "grouped_mm", "grouped_mm, adapters multiplied out", "grouped_mm, PEFT"
IMPLEMENTATIONS = {"experts": (PEER, "onepass"), "experts_lora": (MERGED, OF_PEFT, "onepass")}
BASELINES = {"experts": PEER, "experts_lora": MERGED}
PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass
class Place:
    """A process among all of them. ``meshes`` has those of experts and of a batch, by the name of an exchange."""

    rank: int
    ranks: int
    meshes: dict[str, tuple[Any, Any]]

    def own(self, count: int) -> slice:
        """This process' part of a number of things, which the processes share out evenly."""
        return slice(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)


def join(place: str, rank: int, ranks: int) -> Place:
    """The meshes: with "all_reduce" all processes have the same batch, else each has a batch of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(place, (1, ranks), mesh_dim_names=("tp", "ep"))
    different = mesh["ep"], mesh["tp"]
    return Place(rank, ranks, {THEIRS: different, OWN: different, "all_reduce": (mesh["ep"], mesh["ep"])})


@dataclass
class Sharded:
    """One implementation on one process.

    Attributes:
        forward: from the hidden states of this process' tokens to its result.
        tokens: those of this process, of the tokens of all processes.
        experts: those of this process.
        hidden, weights: leaves, those of its tokens.
        parameters: what else is trained.
        gradients: those of the parameters, for the experts of this process, in the shapes of an `ExpertsBatch`.
        upstream: the gradient of its result.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    tokens: slice
    experts: slice
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    parameters: list[Tensor]
    gradients: Callable[[], list[Tensor]]
    upstream: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weights, *self.parameters]

    def run(self) -> Tensor:
        """The forward and the backward."""
        for t in self.leaves:
            t.grad = None
        out = self.forward(self.hidden, self.ids, self.weights)
        out.backward(self.upstream)
        return out


def build(implementation: str, operation: str, exchange: str, batch: ExpertsBatch, place: Place) -> Sharded:
    """The experts of this process, from the tokens and the experts of all of them.

    With "none" they are all experts, on this process' tokens.
    """
    tokens = slice(None) if exchange == "all_reduce" else place.own(len(batch.hidden))
    own = slice(None) if exchange == ALONE else place.own(len(batch.gate_up))
    experts = experts_of(implementation, operation, batch)
    holder = nn.ModuleDict({"experts": experts})
    if exchange != ALONE:
        shard(holder, exchange, place)
    parameters: list[Tensor] = list(experts.parameters())
    gradients: Callable[[], list[Tensor]] = lambda: [local(t.grad) for t in parameters]  # noqa: E731
    if operation == "experts_lora" and implementation == MERGED:
        parameters = [t.detach()[own].clone().requires_grad_() for t in batch.lora]
        experts.lora = parameters
    elif operation == "experts_lora":
        parameters = adapt(holder, batch.lora)

        def gradients() -> list[Tensor]:
            found: list[Any] = [t.grad for t in parameters]
            pairs = zip(found[::2], found[1::2], batch.lora[::2], batch.lora[1::2])
            return [t[own] for pair in pairs for t in of_experts(*pair)]

    leaves = [t.detach()[tokens].clone().requires_grad_() for t in (batch.hidden, batch.routing.weights)]
    upstream = batch.upstream[0][tokens]
    ids = batch.routing.experts[tokens]
    return Sharded(holder["experts"], tokens, own, leaves[0], ids, leaves[1], parameters, gradients, upstream)


def experts_of(implementation: str, operation: str, batch: ExpertsBatch) -> Any:
    """transformers' module with all experts of the batch."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    E, H, width = batch.down.shape
    config = qwen3_moe.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=width, num_experts=E,
        num_experts_per_tok=batch.routing.experts.shape[1], hidden_act="silu",
    )  # fmt: skip
    names = {"onepass": "onepass", MERGED: register_merged()}
    config._experts_implementation = names.get(implementation, PEER)
    with torch.device("meta"):
        experts = qwen3_moe.Qwen3MoeExperts(config)
    for name, weight in zip(PARAMETERS, (batch.gate_up, batch.down)):
        setattr(experts, name, nn.Parameter(weight.detach(), operation == "experts"))
    return experts


def register_merged() -> str:
    """The name of grouped_mm with the adapters' products added to the weights, as PEFT does for it on one GPU.

    Their factors are the attribute ``lora`` of the experts: those of the experts of this process alone.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    def forward(experts: Any, *inputs: Tensor) -> Tensor:
        a1, b1, a2, b2 = experts.lora
        merged = SimpleNamespace(
            gate_up_proj=torch.baddbmm(experts.gate_up_proj, b1, a1, alpha=SCALING),
            down_proj=torch.baddbmm(experts.down_proj, b2, a2, alpha=SCALING),
            **{name: getattr(experts, name) for name in OF_MODULE},
        )
        out: Tensor = grouped_mm_experts_forward(merged, *inputs)
        return out

    ALL_EXPERTS_FUNCTIONS.register("grouped_mm_merged", forward)
    return "grouped_mm_merged"


OF_MODULE = ("num_experts", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel",
             "_apply_gate")  # fmt: skip


def shard(holder: Any, exchange: str, place: Place) -> None:
    """What `from_pretrained` does with a `DistributedConfig`: it shards the experts, and exchanges tokens for them."""
    from transformers.distributed import DistributedConfig, expert_parallel

    shared = exchange == "all_reduce"
    holder["experts"].config.distributed_config = DistributedConfig(
        tp_size=place.ranks if shared else 1, fsdp_size=1 if shared else place.ranks, ep_size=place.ranks,
        ep_implementation=exchange,
    )  # fmt: skip
    plan = {f"experts.{name}": "grouped_gemm" for name in PARAMETERS} | {"experts": "ep_dispatch_experts"}
    expert_parallel.apply_expert_parallelism(holder, *place.meshes[exchange], plan, exchange)


def adapt(holder: Any, lora: list[Tensor]) -> list[Tensor]:
    """Add PEFT's adapters with the values of ``lora``, and return their parameters in the same order."""
    import peft

    config = peft.LoraConfig(
        r=RANK, lora_alpha=int(SCALING * RANK), target_modules=[],
        target_parameters=[f"experts.{name}" for name in PARAMETERS],
    )  # fmt: skip
    peft.inject_adapter_in_model(config, holder)
    wrapper, found = holder["experts"], {}
    while hasattr(wrapper, "parameter_name"):
        found[wrapper.parameter_name] = [m["default"].weight for m in (wrapper.lora_A, wrapper.lora_B)]
        wrapper = wrapper.base_layer
    parameters = [t for name in PARAMETERS for t in found[name]]
    with torch.no_grad():
        for a, b, from_a, from_b in zip(parameters[::2], parameters[1::2], lora[::2], lora[1::2]):
            a.copy_(from_a.flatten(0, 1))
            b.copy_(from_b.permute(1, 2, 0).flatten(1))
    return parameters


def of_experts(a: Tensor, b: Tensor, like_a: Tensor, like_b: Tensor) -> Tensors:
    """PEFT's two matrices as the A and the B of every expert."""
    E, outputs, rank = like_b.shape
    return a.view_as(like_a), b.view(outputs, rank, E).permute(2, 0, 1)


def local(t: Any) -> Tensor:
    own: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return own


def exact(operation: str, batch: ExpertsBatch, tokens: slice) -> Tensors:
    """The result and all gradients in float64, by the definition on one process: of these tokens, and all experts."""
    wide = [t.detach().double() for t in (batch.hidden[tokens], batch.routing.weights[tokens])]
    others = [t.detach().double() for t in (batch.gate_up, batch.down, *batch.lora)]
    trained = [*wide, *(others[:2] if operation == "experts" else others[2:])]
    for t in trained:
        t.requires_grad_()
    routing = batch.routing._replace(weights=wide[1], experts=batch.routing.experts[tokens])
    out = ours(replace(batch, hidden=wide[0], routing=routing, gate_up=others[0], down=others[1], lora=others[2:]))
    out.backward(batch.upstream[0][tokens].double())
    return tuple(t.float() for t in (out.detach(), *(t.grad for t in trained)))  # type: ignore[union-attr]


def error_of(sharded: Sharded, expected: Tensors, of_all: bool) -> float:
    """The largest error of the result and of the gradients, each relative to what is expected, in the norm.

    Args:
        sharded: its first call.
        expected: of all tokens and experts, or of this process' tokens and all experts.
        of_all: whether the expectation is of all tokens.
    """
    found = [sharded.run().detach(), *[local(t.grad) for t in sharded.leaves[:2]], *sharded.gradients()]
    of_process = sharded.tokens if of_all else slice(None)
    parts = [of_process] * 3 + [sharded.experts] * (len(expected) - 3)
    return max((f.float() - e[p]).norm().item() / e[p].norm().item() for f, e, p in zip(found, expected, parts))
