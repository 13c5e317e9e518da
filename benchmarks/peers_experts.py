"""The installed peers that compute the experts of a MoE layer, called as their users call them.

A function takes an `ExpertsBatch` and returns the result.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from benchmarks.implementations import first_line
from benchmarks.in_turns import Entrant
from benchmarks.operations_experts import MORE_MEMORY, SCALING, ExpertsBatch, decoded, ours, with_more_memory
from onepass.cli.environment import package_version

Function = Callable[[ExpertsBatch], Tensor]


def merged(batch: ExpertsBatch) -> tuple[Tensor, Tensor]:
    """Both weights with their adapters merged, as PEFT does for implementations that take a whole weight.

    Quantized weights are decoded first, as a whole.
    """
    gate_up, down = (w.dequantize() for w in batch.quantized) if batch.quantized else (batch.gate_up, batch.down)
    if batch.options:
        raise NotImplementedError("biases and the activation of gpt-oss are those of onepass alone here")
    if not batch.lora:
        return gate_up, down
    a1, b1, a2, b2 = batch.lora
    return torch.baddbmm(gate_up, b1, a1, alpha=SCALING), torch.baddbmm(down, b2, a2, alpha=SCALING)


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
    """ScatterMoE's `GLUMLP`, on the weights of the batch."""
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


def liger() -> Function:
    """Liger's function, to which its replacement of a model's experts hands the same tensors."""
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction

    def call(batch: ExpertsBatch) -> Tensor:
        gate_up, down = merged(batch)
        routing = batch.routing
        out: Tensor = function.apply(batch.hidden, gate_up, down, routing.experts.int(), routing.weights)
        return out

    return call


def sonicmoe() -> Function:
    """SonicMoE's function of a routing that is given, which transformers calls.

    Its rows of gate and up alternate. They are a copy of the weight, made in the first call of a batch, which has the
    gradient of the weight.
    """
    function = importlib.import_module("sonicmoe.functional").moe_general_routing_inputs
    kind = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    kept: dict[str, Any] = {"of": None}

    def call(batch: ExpertsBatch) -> Tensor:
        if batch.lora or batch.quantized or batch.options:
            raise NotImplementedError("adapters and decoded weights would be merged and copied in every call")
        if kept["of"] is not batch:
            E, rows, H = batch.gate_up.shape
            alternating = batch.gate_up.detach().view(E, 2, rows // 2, H).transpose(1, 2).reshape(E, rows, H)
            kept.update(of=batch, gate_up=alternating.requires_grad_(batch.gate_up.requires_grad))
        gate_up, down = kept["gate_up"], batch.down
        gate_up.grad = None
        routing = batch.routing
        tokens = torch.arange(len(batch.hidden), device=gate_up.device, dtype=torch.int32)
        out: Tensor = function(
            batch.hidden, routing.weights.flatten(), tokens.repeat_interleave(routing.experts.shape[1]),
            routing.experts.flatten().int(), gate_up.permute(1, 2, 0), None, down.permute(1, 2, 0), None, len(down),
            torch.cuda.current_stream().cuda_stream, kind, is_inference_mode_enabled=not torch.is_grad_enabled(),
        )[0]  # fmt: skip
        return out

    return call


PEERS: dict[str, tuple[str, Callable[[], Function]]] = {
    "transformers grouped_mm": ("transformers", partial(transformers, "grouped_mm")),
    "ScatterMoE": ("scattermoe", scattermoe),
    "Liger": ("liger-kernel", liger),
    "SonicMoE": ("sonicmoe", sonicmoe),
}


def entrants_here(peers: dict[str, tuple[str, Callable[[], Function]]]) -> tuple[list[Entrant], dict[str, str]]:
    """The implementations that can be run here, and why each of the other peers cannot."""
    found, missing = [], {}
    for name, (package, load) in peers.items():
        try:
            found.append(entrant(name, package_version(package), load()))
        except Exception as error:  # a peer may fail to import in any way; the table says so and goes on
            missing[name] = f"{type(error).__name__}: {first_line(error)}"
    return found, missing


def entrant(name: str, version: str | None, function: Function) -> Entrant:
    return Entrant(name, version, lambda batch: (function(batch),))


ONEPASS = entrant("onepass", onepass.__version__, ours)
# What quantized weights are compared with.
DECODED = entrant("onepass, decoded weights", onepass.__version__, decoded)
MORE = entrant(f"onepass, max_memory={MORE_MEMORY >> 20} MiB", onepass.__version__, with_more_memory)
