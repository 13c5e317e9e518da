"""`route_block`: `route` with the gate and the settings of a MoE block of transformers.

A router is recognized by what it computes: it is run on a few numbers (`recognition.py`). In transformers 4, the gate
of a block is a Linear, and the block does everything else itself, so that there is no router to run. These blocks are
listed by name, in a table here.
"""

from collections.abc import Callable
from functools import cache, wraps
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from onepass.core.checks import check_choice, described
from onepass.moe.family import Parts, Routed, RouterDescription, call_router, routed_parts, unwrapped
from onepass.moe.followers import followed_of
from onepass.moe.probe import method, methods_of
from onepass.moe.recognition import adapters_of, described_method
from onepass.moe.router import Routing


class Attribute(tuple[str, ...]):
    """Names of an attribute of the router or of its block; the first one that exists has the value."""


K = Attribute(["top_k"])
NORMALIZE = Attribute(["norm_topk_prob"])
SOFTMAX = {"k": K, "score": "softmax", "renormalize": True, "eps": 0.0}
QWEN = {**SOFTMAX, "renormalize": NORMALIZE}
DEEPSEEK_V3 = {
    "k": K, "score": "sigmoid", "renormalize": NORMALIZE, "scale": Attribute(["routed_scaling_factor"]), "eps": 1e-20,
    "n_group": Attribute(["num_group", "n_group"]), "topk_group": Attribute(["topk_group"]),
    "selection_bias": Attribute(["e_score_correction_bias"]), "float32": True,
}  # fmt: skip
DEEPSEEK_V2 = {**DEEPSEEK_V3, "score": "softmax", "group_score": "max", "renormalize": False, "eps": 0.0,
               "topk_method": Attribute(["topk_method"])}  # fmt: skip
del DEEPSEEK_V2["selection_bias"]
ERNIE = {
    **SOFTMAX, "renormalize": False, "selection_bias": Attribute(["moe_statics.e_score_correction_bias"]),
    "float32": True, "autocast": False, "min_sum": Attribute(["norm_min"]),
}  # fmt: skip
EARLIER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Mixtral", "MiniMax", "HunYuanMoEV1"), SOFTMAX),
    **dict.fromkeys(("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Olmoe"), QWEN),
    **dict.fromkeys(("DeepseekV3", "Glm4Moe", "Dots1"), DEEPSEEK_V3),
    "DeepseekV2": DEEPSEEK_V2,
    "Ernie4_5_Moe": ERNIE,
}
# Any other class must have all of these attributes, under the names of DeepSeek-V3's own code.
OTHER = {**DEEPSEEK_V3, "score": Attribute(["scoring_func"])}
SUFFIXES = ("SparseMoeBlock", "MoE", "Moe", "TopKRouter", "TopkRouter", "MoEGate", "Gate")
NAMES = {name + suffix: name for name in EARLIER for suffix in SUFFIXES}


def recognized_parts(block: nn.Module) -> tuple[Parts, RouterDescription] | None:
    """The router of a block, or the block itself if it routes, with its description; None if there is none.

    The router is run once for its class and settings, on a few numbers on the CPU; see `recognition`.
    """
    block, outer = unwrapped(block)
    children = [(name, *unwrapped(child)) for name, child in block.named_children()]
    for _, router, adapters in [("", block, outer), *sorted(children, key=lambda c: c[0] not in ("gate", "router"))]:
        d = own_description(router)
        if d is not None:
            return Parts(router, [*adapters, *adapters_of(router, d)], block), d
    return None


def own_description(router: nn.Module) -> RouterDescription | None:
    """What the first method of a module computes that routes; None if there is none."""
    for name in methods_of(type(router)):  # type: ignore[arg-type]
        d = described_method(router, name)
        if d is not None:
            return d
    return None


def own_method(router: nn.Module) -> tuple[str, Callable[..., Any]]:
    """The name of the method of a router that routes, and its replacement by `route`."""
    d = own_description(router)
    assert d is not None
    return d.function, routing_method(method(type(router), d.function), d.function)


@cache
def routing_method(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The replacement for a method that routes. It calls the original of a module whose router is not recognized."""

    number = id(original)

    @wraps(original)
    def replacement(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        d = described_method(self, name, number)
        if d is not None:
            given = dict(zip(d.inputs, args)) | kwargs
            inputs = [given.get(n) for n in d.inputs]
            x = inputs[0 if d.gate else -1]
            if len(args) <= len(d.inputs) >= len(given) and isinstance(x, Tensor) and x.dim() in d.dims:
                return call_router(Parts(self, adapters_of(self, d), self), d, *inputs)
        if followed_of(self) is not None:
            got = ", ".join(map(described, (*args, *kwargs.values())))
            raise TypeError(f"model: expected routers that are called as they were recognized, got "
                            f"{type(self).__name__}.{name}({got})")  # fmt: skip
        return original(self, *args, **kwargs)

    replacement.__module__ = __name__
    replacement.of_library = original  # type: ignore[attr-defined]
    return replacement


def routed(module: nn.Module, hidden_states: Tensor, **arguments: Any) -> Routed:
    """Logits and `Routing` of a router, or the router of a block, for hidden states ``(..., H)``.

    Args:
        arguments: of `route`. They override those of the router.

    Raises:
        TypeError: the router is not recognized.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"block: expected a MoE block or router, got {described(module)}")
    parts, d = recognized_parts(module) or earlier_parts(module)
    if d.gate is None:
        found = routed_parts(parts, d, gate_of(parts.block)(hidden_states), **arguments)
        tokens = hidden_states.shape[:-1]
        weights, experts = (t.view(*tokens, -1) for t in found.routing[:2])
        return found._replace(routing=found.routing._replace(weights=weights, experts=experts))
    return routed_parts(parts, d, hidden_states, **arguments)


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

    The options of `route` are found by what the router computes: once for its class and settings, a copy of it is run
    on a few numbers, and its experts and weights are compared with those of `route`. A router for which options are
    found is *recognized*; docs/moe.md lists the model families of transformers. Logits are computed in the precision of
    the router, scores and weights in float32. A PEFT LoRA on the gate is computed by separate GEMMs,
    ``x Wᵀ + scaling (x Aᵀ) Bᵀ``, so that ``B A`` is never added to a sharded ``W``.

    Args:
        block: the block, or its router if that has all settings. A block of transformers 4, which has no router module,
            is identified by its class, or by the attributes of DeepSeek-V3's own code: ``top_k``, ``scoring_func``,
            ``e_score_correction_bias``, ``n_group``, ``topk_group``, ``norm_topk_prob``, ``routed_scaling_factor``.
        hidden_states: ``(..., H)``, to which the noise of ``router_jitter_noise`` must already be applied.
        token_mask, losses, experts, count_changed: see `route`.

    Returns:
        `Routing` of the tokens ``(...)``, differentiable with respect to hidden states, gate and LoRA.

    Raises:
        TypeError: the router is not recognized, or its gate has an adapter other than plain LoRA.
        TypeError, ValueError, IndexError: as `route`.
    """
    given = {"experts": experts, "count_changed": count_changed}
    return routed(block, hidden_states, token_mask=token_mask, losses=losses, **given).routing


def gate_of(block: nn.Module) -> nn.Module:
    """The child of a block that computes the logits, or the block itself."""
    return next((m for m in (getattr(block, n, None) for n in ("gate", "router")) if isinstance(m, nn.Module)), block)


def earlier_parts(block: nn.Module) -> tuple[Parts, RouterDescription]:
    """As `recognized_parts`, for blocks that route themselves with a Linear as gate, and routers with all settings."""
    block, outer = unwrapped(block)
    gate = gate_of(block)
    router, adapters = unwrapped(gate) if gate is not block else (block, outer)
    linear, path = router, "weight"
    if isinstance(getattr(router, "wg", None), nn.Module):
        (linear, adapters), path = unwrapped(router.wg), "wg.weight"
    if not isinstance(getattr(linear, "weight", None), Tensor):
        raise TypeError(f"block: expected a MoE block with a 'gate' or 'router', or a router with a 'weight', "
                        f"got {type(block).__name__}, which has none")  # fmt: skip
    classes = [c.__name__ for m in (router, block) for c in type(m).__mro__]  # FSDP2 makes subclasses
    name = next((NAMES[c] for c in classes if c in NAMES), None)
    settings = {
        argument: _read(value, router, block, name) if isinstance(value, Attribute) else value
        for argument, value in (EARLIER[name] if name else OTHER).items()
    }
    method = settings.pop("topk_method", None)
    if method is not None:
        check_choice(method, "topk_method", ("greedy", "group_limited_greedy"))
    if method == "greedy":
        settings |= {"n_group": 1, "topk_group": 1}
    own: dict[str, Any] = {key: settings.pop(key) for key in ("float32", "autocast", "min_sum") if key in settings}
    bias = None if getattr(linear, "bias", None) is None else path.replace("weight", "bias")
    d = RouterDescription(tuple(settings.items()), gate=path, gate_bias=bias, **own)
    return Parts(router, adapters, block), d


def _read(names: Attribute, router: nn.Module, block: nn.Module, family: str | None) -> Any:
    for module in (router, block):
        for name in names:
            try:
                return attrgetter(name)(module)
            except AttributeError:
                pass
    wanted = f"the attribute {' or '.join(map(repr, names))} on it or its router"
    if family:
        raise TypeError(f"block: expected {wanted}, for {family}, got {type(block).__name__}")
    raise TypeError(
        "block: expected a router that computes what `route` does (the k largest softmax, sigmoid or sqrt-softplus "
        "scores of one gate, with a selection bias, groups of experts, renormalization and a scale), or a block with "
        f"{wanted}, got {type(block).__name__}"
    )
