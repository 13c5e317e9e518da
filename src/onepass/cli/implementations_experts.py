"""The experts of `onepass bench-experts`, ours and those of peers, called as their users call them.

A function takes an `ExpertsBatch` and returns the result.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import moe
from onepass.cli.environment import package_version
from onepass.cli.in_turns import Batch, Entrant, Tensors

RANK, SCALING = 16, 2.0
# Products that cannot be avoided, of those that the forward makes: forward, gradient of the inputs, of the weights.
OPERATIONS = {"experts_forward": 1, "experts": 3, "experts_lora": 2}


@dataclass
class ExpertsBatch(Batch):
    hidden: Tensor
    routing: moe.Routing
    gate_up: Tensor
    down: Tensor
    lora: list[Tensor] = field(default_factory=list)  # A and B of gate_up, A and B of down
    expected: Tensors = ()
    upstream: Sequence[Tensor] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [self.hidden, self.routing.weights, self.gate_up, self.down, *self.lora]

    @property
    def arguments(self) -> tuple["ExpertsBatch"]:
        return (self,)


Function = Callable[[ExpertsBatch], Tensor]


def make_batch(
    operation: str, sizes: tuple[int, int, int, int, int], kind: str, dtype: torch.dtype, device: torch.device
) -> ExpertsBatch:
    """``sizes``: tokens, hidden, intermediate, experts, choices. "zipf": the n-th expert is chosen as 1 / n."""
    T, H, width, E, K = sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    share = torch.ones(E, device=device)
    if kind == "zipf":
        share = 1 / torch.arange(1, E + 1, device=device)[torch.randperm(E, device=device, generator=generator)]
    gumbel = -torch.empty(T, E, device=device).exponential_(generator=generator).log()
    weights, experts = (gumbel + share.log()).softmax(-1).topk(K)
    counts = torch.bincount(experts.flatten(), minlength=E).int()
    batch = ExpertsBatch(
        normal(T, H), moe.Routing(weights / weights.sum(-1, keepdim=True), experts, counts),
        normal(E, 2 * width, H, std=H**-0.5), normal(E, H, width, std=width**-0.5),
    )  # fmt: skip
    if operation == "experts_lora":
        shapes = (E, RANK, H), (E, 2 * width, RANK), (E, RANK, width), (E, H, RANK)
        batch.lora = [normal(*shape, std=shape[-1] ** -0.5) for shape in shapes]
    with torch.no_grad():
        routing = batch.routing._replace(weights=batch.routing.weights.double())
        hidden, gate_up, down = (t.double() for t in (batch.hidden, batch.gate_up, batch.down))
        lora = [t.double() for t in batch.lora]
        batch.expected = (ours(ExpertsBatch(hidden, routing, gate_up, down, lora)),)  # the definition
    batch.upstream = (normal(T, H),)
    for t in (batch.hidden, batch.routing.weights, *batch.lora):
        t.requires_grad_(operation != "experts_forward")
    for t in (batch.gate_up, batch.down):
        t.requires_grad_(operation == "experts")
    return batch


def dense(batch: ExpertsBatch, times: int) -> Callable[[], None]:
    """Products of as many FLOPs, each one call of the library on whole tensors."""
    slots, width = batch.routing.experts.numel(), batch.down.shape[2]
    rows = batch.hidden.detach().repeat(batch.routing.experts.shape[1], 1)
    first, second = batch.gate_up[0].detach(), batch.down[0].detach()
    both, out = rows.new_empty(slots, 2 * width), torch.empty_like(rows)

    def products() -> None:
        for _ in range(times):
            torch.mm(rows, first.T, out=both)
            torch.mm(both[:, :width], second.T, out=out)

    return products


def ours(batch: ExpertsBatch) -> Tensor:
    first = second = None
    if batch.lora:
        a1, b1, a2, b2 = batch.lora
        first, second = (a1, b1, SCALING), (a2, b2, SCALING)
    weights = batch.gate_up, batch.down
    return moe.expert_mlp(batch.hidden, batch.routing, *weights, lora_gate_up=first, lora_down=second)


def merged(batch: ExpertsBatch) -> tuple[Tensor, Tensor]:
    """Both weights with their adapters multiplied out, as PEFT has them for whoever takes a whole weight."""
    if not batch.lora:
        return batch.gate_up, batch.down
    a1, b1, a2, b2 = batch.lora
    return torch.baddbmm(batch.gate_up, b1, a1, alpha=SCALING), torch.baddbmm(batch.down, b2, a2, alpha=SCALING)


def transformers(name: str) -> Function:
    forward = getattr(importlib.import_module("transformers.integrations.moe"), f"{name}_experts_forward")

    def call(batch: ExpertsBatch) -> Tensor:
        gate_up, down = merged(batch)
        module = SimpleNamespace(
            gate_up_proj=gate_up, down_proj=down, num_experts=len(down), has_gate=True, has_bias=False,
            is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=silu_gate,
        )  # fmt: skip
        out: Tensor = forward(module, batch.hidden, batch.routing.experts, batch.routing.weights)
        return out

    return call


def silu_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def scattermoe() -> Function:
    """Its `GLUMLP`, on the batch's weights."""
    layers = importlib.import_module("scattermoe.parallel_experts")

    def call(batch: ExpertsBatch) -> Tensor:
        gate_up, down = merged(batch)
        K = batch.routing.experts.shape[1]
        order = layers.flatten_sort_count(batch.routing.experts, num_experts=len(down))
        h = layers.parallel_linear(batch.hidden, gate_up.mT, K, *order, grouped_out=True)
        gate, up = h.chunk(2, -1)
        weights = batch.routing.weights.to(h.dtype)
        out: Tensor = layers.parallel_linear(F.silu(gate) * up, down.mT, 1, *order, grouped_in=True, gates=weights)
        return out

    return call


PEERS: dict[str, tuple[str, Callable[[], Function]]] = {
    "transformers grouped_mm": ("transformers", partial(transformers, "grouped_mm")),
    "ScatterMoE": ("scattermoe", scattermoe),
}


def implementations(peers: bool) -> tuple[list[Entrant], dict[str, str]]:
    """Those that are here, and why each of the others is not."""
    found, missing = [entrant("onepass", "", ours)], {}
    for name, (package, load) in PEERS.items() if peers else ():
        try:
            found.append(entrant(name, package_version(package), load()))
        except Exception as error:  # a peer may fail to import in any way; the table says so and goes on
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return found, missing


def entrant(name: str, version: str | None, function: Function) -> Entrant:
    return Entrant(name, version, lambda batch: (function(batch),))
