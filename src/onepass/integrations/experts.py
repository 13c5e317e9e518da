"""`experts_implementation="onepass"`: transformers' experts on `onepass.moe.expert_mlp`."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onepass.moe.eager_experts import activate
from onepass.moe.experts import Adapter, expert_mlp
from onepass.moe.routing import Routing
from onepass.options import ACTIVATIONS, ExpertOptions

NAME = "onepass"


class Gate(NamedTuple):
    """How a class of experts makes one of gate and up."""

    activation: str
    interleaved: bool
    alpha: float
    limit: float


_gates: "WeakKeyDictionary[nn.Module, Gate]" = WeakKeyDictionary()


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any
) -> Tensor:
    """In the place of `forward` of a class that transformers' ``use_experts_implementation`` decorates.

    Raises:
        NotImplementedError: no gate, a norm behind the experts, or a gate that is none of `expert_mlp`'s.
    """
    if not self.has_gate or self.has_post_expert_norm:
        what = "experts with a norm of their own" if self.has_gate else "experts without a gate"
        raise NotImplementedError(f"experts_implementation='{NAME}': {type(self).__name__} has {what}")
    gate = gate_of(self)
    gate_up, lora_gate_up = weight_of(self, "gate_up_proj")
    down, lora_down = weight_of(self, "down_proj")
    routing = Routing(top_k_weights, top_k_index, top_k_index)  # whose counts are not read
    return expert_mlp(
        hidden_states, routing, gate_up, down, activation=gate.activation, interleaved=gate.interleaved,
        alpha=gate.alpha, limit=gate.limit, transposed=self.is_transposed,  # type: ignore[arg-type]
        gate_up_bias=self.gate_up_proj_bias if self.has_bias else None,  # type: ignore[arg-type]
        down_bias=self.down_proj_bias if self.has_bias else None,  # type: ignore[arg-type]
        lora_gate_up=lora_gate_up, lora_down=lora_down,
    )  # fmt: skip


def gate_of(experts: nn.Module) -> Gate:
    """The one of ours that does what the experts' own ``_apply_gate`` does, on numbers that tell them apart."""
    known = _gates.get(experts)
    if known is None:
        probe = torch.linspace(-21.0, 23.0, 96).view(2, 48).roll(5, -1)
        with torch.no_grad():
            theirs = experts._apply_gate(probe)  # type: ignore[operator]
        for gate in candidates(experts):
            first, second = (probe[:, ::2], probe[:, 1::2]) if gate.interleaved else probe.chunk(2, -1)
            ours = activate(first, second, ExpertOptions(gate.activation, alpha=gate.alpha, limit=gate.limit))
            if theirs.shape == ours.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
                known = _gates[experts] = gate
                break
        else:
            raise NotImplementedError(
                f"experts_implementation='{NAME}': {type(experts).__name__}._apply_gate is none of "
                f"{', '.join(ACTIVATIONS)} of gate and up, side by side or in turns"
            )
    return known


def candidates(experts: nn.Module) -> list[Gate]:
    alpha, limit = (
        float(next((getattr(experts, n) for n in names if hasattr(experts, n)), default))
        for names, default in ((("alpha", "swiglu_alpha"), 1.702), (("limit", "swiglu_limit"), 7.0))
    )
    return [Gate(a, interleaved, alpha, limit) for a in ACTIVATIONS for interleaved in (False, True)]


def weight_of(experts: nn.Module, name: str) -> tuple[Tensor, Adapter | None]:
    """The weight and PEFT's adapter on it, apart while it is one adapter; else what PEFT makes of all together."""
    parametrized = getattr(experts, "parametrizations", {})
    if name in parametrized and len(parametrized[name]) == 1:
        proxy, weight = parametrized[name][0], parametrized[name].original
        if type(proxy).__name__ == "_LoraFactorsProxy":
            left, right = (proxy.lhs, proxy.rhs) if not experts.is_transposed else (proxy.rhs.mT, proxy.lhs.mT)
            return weight, (right, left, float(proxy.scaling))
    return getattr(experts, name), None


def register() -> None:
    """Add the name to transformers' experts; a second call does nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
