"""What the router of a model computes, in terms of `route`, and its results computed by `route`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.core.checks import described
from onepass.core.moe_options import SCORES
from onepass.core.peft import lora_variant
from onepass.logits.invariant_linear import linear
from onepass.logits.partitioned import whole
from onepass.moe.followers import followed_of
from onepass.moe.router import Routing, route


class Prepared(NamedTuple):
    """What happens to hidden states before the gate: ``norm(hidden) * scale * factor`` (Gemma 4)."""

    norm: str  # a child of the router
    scale: str | None  # a parameter of the router
    factor: float


class RouterDescription(NamedTuple):
    """What the router of a model computes, in terms of `route`.

    Names are of attributes of the router, as ``"wg.weight"``.

    Attributes:
        arguments: of `route`, as pairs of name and value.
        function: the method that routes; it is ``"forward"`` unless a block has its routing in a method of its own.
        inputs: the names of this method's parameters.
        gate, gate_bias: the weight ``(E, H)`` and bias of the gate; None for a method whose input are logits.
        prepared: what is done to hidden states before.
        multiplier: of the logits, before the soft-cap.
        selection_bias: the tensor that is added for the selection alone, if the router has it.
        given_bias: the parameter of the method by which it is passed, if the block has it.
        expert_scale: a tensor ``(E,)`` by which weights are multiplied.
        min_sum: a lower bound of the sum that weights are divided by; 0 if there is none.
        float32: whether the gate's GEMM is in float32, else in the dtype of its weight.
        autocast: whether autocast applies to the gate.
        outputs: what the method returns: ``"weights"``, ``"experts"``, ``"dense"`` (the weights, 0 for other experts),
            ``"logits"`` (of `route`), ``"capped"`` logits, ``"raw"`` ones without the multiplier, or the ``"softmax"``,
            ``"sigmoid"`` or ``"sqrtsoftplus"`` of the logits.
        full: the dtype of the outputs over all experts: that of the gate's GEMM (``"gate"``), or ``"float32"``.
        weights: the dtype of the weights: that of the ``"gate"``, the ``"hidden"`` states, or ``"float32"``.
        dims: the numbers of dimensions of the input that the method takes.
        flat: whether outputs have one dimension for the tokens, whatever the input has.
    """

    arguments: tuple[tuple[str, Any], ...]
    function: str = "forward"
    inputs: tuple[str, ...] = ("hidden_states",)
    gate: str | None = "weight"
    gate_bias: str | None = None
    prepared: Prepared | None = None
    multiplier: float = 1.0
    selection_bias: str | None = None
    given_bias: str | None = None
    expert_scale: str | None = None
    min_sum: float = 0.0
    float32: bool = False
    autocast: bool = True
    outputs: tuple[str, ...] = ("logits", "weights", "experts")
    full: str = "gate"
    weights: str = "float32"
    dims: tuple[int, ...] = (2, 3)
    flat: bool = True


class Parts(NamedTuple):
    """A router as it is found in a model."""

    router: nn.Module  # that has the method
    adapters: list[nn.Module]  # of PEFT, around the router or the layer with the gate's weight
    block: nn.Module  # that was asked for; its own router, or what contains it


class Routed(NamedTuple):
    """What `routed` computes."""

    logits: Tensor  # as passed to `route`
    raw: Tensor  # as the gate computes them
    routing: Routing


def unwrapped(module: Any) -> tuple[Any, list[nn.Module]]:
    """A module without the adapters of PEFT, and these."""
    adapters = []
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        adapters.append(module)
        module = module.base_layer
    return module, adapters


def at(module: nn.Module, path: str) -> Any:
    """The attribute of a router with a name as ``"wg.weight"``, without adapters between."""
    *parents, name = path.split(".")
    for parent in parents:
        module = unwrapped(getattr(module, parent))[0]
    return getattr(module, name)


def routed_parts(parts: Parts, d: RouterDescription, given: Tensor, **arguments: Any) -> Routed:
    """Logits and `Routing` of hidden states, or of logits if the router has no gate. ``arguments`` are of `route`."""
    raw = given if d.gate is None else _gate_logits(parts, d, given)
    arguments = {**{n: _constant(v) for n, v in d.arguments}, **arguments}
    bias = arguments["selection_bias"] if "selection_bias" in arguments else selection_bias_of(parts, d)
    if bias is not None:
        arguments["selection_bias"] = whole(bias).flatten()
    logits = raw * d.multiplier if d.multiplier != 1.0 else raw
    followed = None if arguments.get("experts") is not None else followed_of(parts.router)
    routing = route(logits, **arguments) if followed is None else followed.route(logits, arguments)
    weights = routing.weights
    if d.min_sum:
        weights = weights / (weights.sum(-1, keepdim=True) / arguments.get("scale", 1.0)).clamp(min=d.min_sum)
    if d.expert_scale:
        weights = weights * whole(at(parts.router, d.expert_scale)).flatten()[routing.experts]
    return Routed(logits, raw, routing._replace(weights=weights))


def _constant(value: Any) -> Any:
    """A copy of a setting. Dynamo would otherwise look for the attribute of the model that the value came from."""
    if torch.compiler.is_compiling():
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
    return value


def selection_bias_of(parts: Parts, d: RouterDescription) -> Tensor | None:
    """The selection bias of a router, as it or its block has it; None if there is none."""
    if d.selection_bias:
        return at(parts.router, d.selection_bias)
    if d.given_bias is None:
        return None
    for module in (parts.block, parts.router):
        given = getattr(module, d.given_bias, None)
        if isinstance(given, Tensor):
            return given
    raise TypeError(
        f"block: expected the attribute {d.given_bias!r}, which it passes to its router, got "
        f"{type(parts.block).__name__}"
    )


def outputs(d: RouterDescription, found: Routed, hidden: Tensor, tokens: tuple[int, ...]) -> Any:
    """The results of a router in its own form. ``tokens`` is the shape of the tokens in its input."""
    weights, experts = found.routing.weights, found.routing.experts
    full = torch.float32 if d.full == "float32" else found.raw.dtype
    dtype = {"gate": found.raw.dtype, "hidden": hidden.dtype}.get(d.weights, torch.float32)
    results = []
    for kind in d.outputs:
        if kind == "experts":
            result = experts
        elif kind == "weights":
            result = weights.to(dtype)
        elif kind == "dense":
            result = weights.new_zeros(found.raw.shape).scatter(-1, experts, weights).to(full)
        else:
            result = full_output(kind, found, dict(d.arguments).get("softcap")).to(full)
        results.append(result if d.flat or len(tokens) == 1 else result.view(*tokens, result.shape[-1]))
    return tuple(results) if len(results) > 1 else results[0]


FULL = ("logits", "raw", "capped", *SCORES)  # outputs over all experts


def full_output(kind: str, found: Routed, softcap: float | None) -> Tensor:
    """Logits, in the dtype of the gate, or scores of all experts, in float32."""
    if kind in ("logits", "raw"):
        return found.logits if kind == "logits" else found.raw
    z = found.logits.float()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if kind == "sqrtsoftplus":
        return torch.nn.functional.softplus(z).sqrt()
    return z if kind == "capped" else z.softmax(-1) if kind == "softmax" else z.sigmoid()


def call_router(parts: Parts, d: RouterDescription, *inputs: Tensor | None, **arguments: Any) -> Any:
    """What the router's own method returns for its inputs, computed by `route`. ``arguments`` are of `route`."""
    named = dict(zip(d.inputs, inputs))
    hidden = inputs[0]
    assert hidden is not None
    if d.given_bias is not None and "selection_bias" not in arguments:
        arguments["selection_bias"] = named.get(d.given_bias)
    given = inputs[-1] if d.gate is None else hidden
    assert given is not None
    found = routed_parts(parts, d, given.reshape(-1, given.shape[-1]), **arguments)
    return outputs(d, found, hidden, tuple(given.shape[:-1]))


def _gate_logits(parts: Parts, d: RouterDescription, hidden_states: Tensor) -> Tensor:
    assert d.gate is not None
    weight, bias = whole(at(parts.router, d.gate)), None if d.gate_bias is None else at(parts.router, d.gate_bias)
    lora = [factors for layer in parts.adapters for factors in _plain_lora(layer)]
    if not weight.is_floating_point() or weight.dim() != 2:
        raise TypeError(f"block: expected a floating-point gate of shape (E, H), neither quantized nor partitioned, "
                        f"got {described(weight)}")  # fmt: skip
    if not isinstance(hidden_states, Tensor) or not hidden_states.is_floating_point():
        raise TypeError(f"hidden_states: expected a floating-point tensor, got {described(hidden_states)}")
    if hidden_states.dim() < 1 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden_states: expected shape (..., {weight.shape[1]}) for a gate of shape "
                         f"{tuple(weight.shape)}, got {tuple(hidden_states.shape)}")  # fmt: skip
    if d.prepared is not None:
        hidden_states = at(parts.router, d.prepared.norm)(hidden_states)
        if d.prepared.scale is not None:
            hidden_states = hidden_states * whole(at(parts.router, d.prepared.scale))
        hidden_states = hidden_states * d.prepared.factor
    dtype = torch.float32 if d.float32 else weight.dtype
    with _autocast(hidden_states.device, d.autocast):
        logits = adapted = _linear(hidden_states, weight, bias, dtype)
        for A, B, scaling, dropout in lora:
            dtype = torch.float32 if d.float32 else A.weight.dtype
            low = _linear(dropout(hidden_states.to(dtype)), whole(A.weight), None, dtype)
            adapted = adapted + _linear(low, whole(B.weight), B.bias, dtype) * scaling
    return adapted.to(logits.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return linear(x.to(dtype), weight.to(dtype), None if bias is None else whole(bias).to(dtype))


def _autocast(device: torch.device, allowed: bool) -> AbstractContextManager[Any]:
    return nullcontext() if allowed else torch.autocast(device.type, enabled=False)


def _plain_lora(layer: Any) -> Iterator[tuple[Any, Any, float, Any]]:
    """``(A, B, scaling, dropout)`` of every active adapter, as in PEFT's own forward."""
    if not hasattr(layer, "lora_A") or getattr(layer, "parameter_name", "weight") != "weight":
        raise TypeError(f"block: expected plain LoRA on the gate's weight, got {type(layer).__name__}")
    if layer.merged and layer.disable_adapters:
        layer.unmerge()
    if layer.merged or layer.disable_adapters:
        return
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        variant = lora_variant(layer, adapter)
        if variant:
            raise TypeError(f"block: expected plain LoRA on the gate, got {variant} as adapter {adapter!r}")
        yield layer.lora_A[adapter], layer.lora_B[adapter], layer.scaling[adapter], layer.lora_dropout[adapter]
