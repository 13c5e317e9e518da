"""`route` with the settings of a MoE block of transformers, which are read from the attributes of the block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.core.checks import check_choice, described
from onepass.logits.invariant_linear import linear
from onepass.logits.partitioned import whole
from onepass.moe.followers import ATTRIBUTE
from onepass.moe.router import Routing, route


class Attribute(tuple[str, ...]):
    """Names of an attribute of the router or of its block; the first one that exists has the value."""


class Family(NamedTuple):
    """How a family routes. A value is constant, or an `Attribute` of the model."""

    arguments: dict[str, Any]  # of `route`
    weights: str = (
        "float32"  # the dtype of the router's weights: that of the "logits" or the "hidden" states, or float32
    )
    float32: bool = False  # whether the gate's GEMM is in float32, else in the dtype of its weight
    autocast: bool = True  # whether autocast applies to the gate
    topk_method: Attribute | None = None  # tells whether experts are grouped
    min_sum: Attribute | None = None  # a lower bound of the sum that weights are divided by


K = Attribute(["top_k"])
NORMALIZE = Attribute(["norm_topk_prob"])
SCALE = Attribute(["routed_scaling_factor"])
BIAS = Attribute(["e_score_correction_bias"])
GROUPS = {"n_group": Attribute(["num_group", "n_group"]), "topk_group": Attribute(["topk_group"])}

SOFTMAX = {"k": K, "score": "softmax", "renormalize": True, "eps": 0.0}
SIGMOID = {"k": K, "score": "sigmoid", "renormalize": True, "eps": 0.0, "selection_bias": BIAS}

MIXTRAL = Family(SOFTMAX)
QWEN = Family({**SOFTMAX, "renormalize": NORMALIZE}, weights="logits")
DEEPSEEK_V3 = Family({**SIGMOID, **GROUPS, "renormalize": NORMALIZE, "scale": SCALE, "eps": 1e-20}, float32=True)

FAMILIES = {
    "Mixtral": MIXTRAL,
    "MiniMax": MIXTRAL,
    "HunYuanMoEV1": Family(SOFTMAX, weights="logits"),
    "Qwen2Moe": QWEN,
    "Qwen3Moe": QWEN,
    "Qwen3Next": QWEN,
    "Olmoe": QWEN,
    "GptOss": Family({**SOFTMAX, "renormalize": False, "score_after_topk": True}, weights="logits"),
    "Ernie4_5_Moe": Family(
        {**SOFTMAX, "renormalize": False, "selection_bias": Attribute(["moe_statics.e_score_correction_bias"])},
        weights="hidden", float32=True, autocast=False, min_sum=Attribute(["norm_min"]),
    ),
    "DeepseekV2": Family(
        {**SOFTMAX, **GROUPS, "group_score": "max", "renormalize": False, "scale": SCALE},
        float32=True, topk_method=Attribute(["topk_method"]),
    ),
    "DeepseekV3": DEEPSEEK_V3,
    "Glm4Moe": DEEPSEEK_V3,
    "Dots1": DEEPSEEK_V3,
    "MiniMaxM2": Family(SIGMOID),
}  # fmt: skip
# Any other class must have all of these attributes, under the names of DeepSeek-V3's own code.
OTHER = DEEPSEEK_V3._replace(arguments={**DEEPSEEK_V3.arguments, "score": Attribute(["scoring_func"])})

SUFFIXES = ("SparseMoeBlock", "MoE", "Moe", "MLP", "TopKRouter", "TopkRouter", "MoEGate", "Gate")
FAMILY_OF = {name + suffix: name for name in FAMILIES for suffix in SUFFIXES}


def route_block(
    block: nn.Module,
    hidden_states: Tensor,
    *,
    token_mask: Tensor | None = None,
    losses: bool = False,
    experts: Tensor | None = None,
    count_changed: bool = False,
) -> Routing:
    """`route` with the gate and the settings of a MoE block of transformers.

    Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, OLMoE, DeepSeek-V2, DeepSeek-V3, GLM-4-MoE, MiniMax, MiniMax-M2, gpt-oss,
    ERNIE-4.5-MoE, Hunyuan-MoE and dots1 are recognized by class. Logits are computed in the precision of the
    family, scores and weights in float32. A PEFT LoRA on the gate is a GEMM of its own,
    ``x Wᵀ + scaling (x Aᵀ) Bᵀ``, so that ``B A`` is never added to a sharded ``W``.

    Args:
        block: the block, or its router if that has all settings. Any other class must have the attributes of
            DeepSeek-V3's own code: ``top_k``, ``scoring_func``, ``e_score_correction_bias``, ``n_group``,
            ``topk_group``, ``norm_topk_prob``, ``routed_scaling_factor``.
        hidden_states: ``(..., H)``, including the noise of a block that is trained with ``router_jitter_noise``.
        token_mask, losses, experts, count_changed: see `route`.

    Returns:
        `Routing` of the tokens ``(...)``, differentiable with respect to hidden states, gate and LoRA.

    Raises:
        TypeError: the block lacks an attribute, which is named, or its gate has an adapter other than plain LoRA.
        TypeError, ValueError, IndexError: as `route`.
    """
    given = {"experts": experts, "count_changed": count_changed}
    return _routed(block, hidden_states, token_mask=token_mask, losses=losses, **given)[1]


def router_outputs(router: nn.Module, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The results of a family's router, ``(logits, weights, experts)``, with weights in the family's dtype.

    ``given`` are arguments of `route` that the block passes to its router.
    """
    logits, routing, family = _routed(router, hidden_states, **given)
    dtype = {"logits": logits.dtype, "hidden": hidden_states.dtype}.get(family.weights, torch.float32)
    return logits, routing.weights.to(dtype), routing.experts


def _routed(block: nn.Module, hidden_states: Tensor, **given: Any) -> tuple[Tensor, Routing, Family]:
    if not isinstance(block, nn.Module):
        raise TypeError(f"block: expected a MoE block or router, got {described(block)}")
    router, linear, adapters, block = _parts(block)
    name = _family(router, block)
    family = FAMILIES[name] if name else OTHER

    def said(value: Any) -> Any:
        return _read(value, router, block, name) if isinstance(value, Attribute) else value

    arguments = given | {argument: said(value) for argument, value in family.arguments.items() if argument not in given}
    if "selection_bias" in arguments:
        arguments["selection_bias"] = whole(arguments["selection_bias"]).flatten()
    if family.topk_method:
        method = said(family.topk_method)
        check_choice(method, "topk_method", ("greedy", "group_limited_greedy"))
        if method == "greedy":
            arguments["n_group"] = arguments["topk_group"] = 1
    logits = _logits(linear, adapters, hidden_states, family)
    followed = None if arguments.get("experts") is not None else getattr(router, ATTRIBUTE, None)
    routing = route(logits, **arguments) if followed is None else followed.route(logits, arguments)
    if family.min_sum:
        total = routing.weights.sum(-1, keepdim=True).clamp(min=said(family.min_sum))
        routing = routing._replace(weights=routing.weights / total)
    return logits, routing, family


def _parts(block: nn.Module) -> tuple[nn.Module, nn.Module, list[nn.Module], nn.Module]:
    """The router, the layer with its weight, the adapters of that layer, and the block (or the router again)."""
    block, adapters = _unwrapped(block)
    router = block
    for name in ("gate", "router"):
        if isinstance(getattr(block, name, None), nn.Module):
            router, adapters = _unwrapped(getattr(block, name))
            break
    linear = router
    if isinstance(getattr(router, "wg", None), nn.Module):
        linear, adapters = _unwrapped(router.wg)
    if not isinstance(getattr(linear, "weight", None), Tensor):
        raise TypeError(f"block: expected a MoE block with a 'gate' or 'router', or a router with a 'weight', "
                        f"got {type(block).__name__}, which has none")  # fmt: skip
    return router, linear, adapters, block


def _unwrapped(module: Any) -> tuple[nn.Module, list[nn.Module]]:
    adapters = []
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        adapters.append(module)
        module = module.base_layer
    return module, adapters


def _family(router: nn.Module, block: nn.Module) -> str | None:
    for module in (router, block):
        for cls in type(module).__mro__:  # FSDP2 and parametrizations make subclasses
            if cls.__name__ in FAMILY_OF:
                return FAMILY_OF[cls.__name__]
    return None


def bias_of(router: nn.Module, block: nn.Module) -> Tensor | None:
    """The selection bias of a router; None if its family has none."""
    name = _family(router, block)
    names = (FAMILIES[name] if name else OTHER).arguments.get("selection_bias")
    bias: Tensor | None = None if names is None else _read(names, router, block, name)
    return bias


def _read(names: Attribute, router: nn.Module, block: nn.Module, family: str | None) -> Any:
    for module in (router, block):
        for name in names:
            try:
                return attrgetter(name)(module)
            except AttributeError:
                pass
    wanted = " or ".join(map(repr, names))
    of = f"for {family}" if family else f"of a class that is none of {', '.join(FAMILIES)}"
    raise TypeError(f"block: expected the attribute {wanted} on it or its router, {of}, got {type(block).__name__}")


def _logits(linear: Any, adapters: list[nn.Module], hidden_states: Tensor, family: Family) -> Tensor:
    lora = [factors for layer in adapters for factors in _plain_lora(layer)]
    weight, bias = whole(linear.weight), getattr(linear, "bias", None)
    if not weight.is_floating_point() or weight.dim() != 2:
        raise TypeError(f"block: expected a floating-point gate of shape (E, H), neither quantised nor partitioned, "
                        f"got {described(weight)}")  # fmt: skip
    if not isinstance(hidden_states, Tensor) or not hidden_states.is_floating_point():
        raise TypeError(f"hidden_states: expected a floating-point tensor, got {described(hidden_states)}")
    if hidden_states.dim() < 1 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden_states: expected shape (..., {weight.shape[1]}) for a gate of shape "
                         f"{tuple(weight.shape)}, got {tuple(hidden_states.shape)}")  # fmt: skip
    dtype = torch.float32 if family.float32 else weight.dtype
    with _autocast(hidden_states.device, family.autocast):
        logits = adapted = _linear(hidden_states, weight, bias, dtype)
        for A, B, scaling, dropout in lora:
            dtype = torch.float32 if family.float32 else A.weight.dtype
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
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None or getattr(layer, "use_dora", {}).get(adapter):
            kind = "DoRA" if variant is None else type(variant).__name__
            raise TypeError(f"block: expected plain LoRA on the gate, got {kind} as adapter {adapter!r}")
        yield layer.lora_A[adapter], layer.lora_B[adapter], layer.scaling[adapter], layer.lora_dropout[adapter]
