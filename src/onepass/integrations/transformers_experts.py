"""`experts_implementation="onepass"`: experts of transformers, with PEFT's adapters, on `onepass.moe.expert_mlp`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from inspect import unwrap
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.utils._python_dispatch import _disable_current_modes

from onepass.core import moe_options
from onepass.core.dispatch import constant_in_trace
from onepass.core.moe_options import ACTIVATIONS, Activation, ExpertOptions
from onepass.core.quantized import Weight
from onepass.integrations.expert_shards import Factors, is_sharded, local_factors, local_weight, whole_factors
from onepass.integrations.patching import original, unsupported
from onepass.moe.experts import Adapter, expert_mlp
from onepass.moe.probe import Same, children_of, closed_over, held_by, key_of, module_of, reached
from onepass.moe.quantized import QuantizedWeight
from onepass.moe.quantized_modules import CHECKS, LIMIT
from onepass.moe.router import Routing
from onepass.reference.experts import activate

NAME = "onepass"
INTERFACE = "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"
FP8 = "transformers.integrations.finegrained_fp8", "ALL_FP8_EXPERTS_FUNCTIONS"
EXCHANGES = "transformers.distributed.expert_parallel", "EPImplementationInterface", "5.23"
SINCE = "5.7"  # the first version of transformers whose models accept a registered name
COMBINE = "transformers.distributed.expert_parallel", "AllToAllEP._combine_tokens"
PEFT = "peft.tuners.lora.layer", "ParamWrapper._activate_lora"
PEFT_MERGE = "peft.tuners.lora.layer", "ParamWrapper.merge"
PEFT_UNMERGE = "peft.tuners.lora.layer", "ParamWrapper.unmerge"
PEFT_PLAN = "peft.tuners.lora.model", "get_tp_plan_and_mesh"
DEFAULTS = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}
METHOD = "_onepass_gate_index"  # of the classes of experts that have run: `traced_gate_index`
GATES = [(activation, interleaved) for activation in get_args(Activation) for interleaved in (False, True)]
CLAMPED = moe_options.ALPHA, moe_options.LIMIT  # where the experts have none
OF_CLAMPED = "alpha", "swiglu_alpha", "limit", "swiglu_limit"  # the attributes of experts that have one
# Other globals, as modules and classes, are compared by identity.
OF_VALUES = bool, int, float, str, list, tuple, dict, set, frozenset, Tensor, nn.Module
PROBE = 48  # columns of gate and up that a gate is tried on
HELD = "_onepass_adapters"  # the attribute of experts that has the LoRA factors while their forward runs


class Gate(NamedTuple):
    """How a class of experts combines gate and up."""

    activation: Activation
    interleaved: bool
    alpha: float
    limit: float


_gates: "WeakKeyDictionary[nn.Module, tuple[Any, int]]" = WeakKeyDictionary()  # settings, and their `gate_index`
# By whether inference mode is on: autograd cannot save tensors that were made in it.
_quantized: "WeakKeyDictionary[nn.Module, dict[bool, dict[str, tuple[Any, QuantizedWeight | None]]]]"
_quantized = WeakKeyDictionary()


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any
) -> Tensor:
    """The `forward` of a class that transformers' ``use_experts_implementation`` decorates.

    Raises:
        NotImplementedError: no gate, a norm after the experts, or an activation that `expert_mlp` does not have.
    """
    gate = gate_of(self, hidden_states)
    gate_up, lora_gate_up = weight_of(self, "gate_up_proj", hidden_states.dtype)
    down, lora_down = weight_of(self, "down_proj", hidden_states.dtype)
    routing = Routing(top_k_weights, top_k_index, None)
    return expert_mlp(
        hidden_states, routing, gate_up, down, activation=gate.activation, interleaved=gate.interleaved,
        alpha=gate.alpha, limit=gate.limit, transposed=option(self, "is_transposed"),
        gate_up_bias=bias_of(self, "gate_up_proj_bias"), down_bias=bias_of(self, "down_proj_bias"),
        lora_gate_up=lora_gate_up, lora_down=lora_down, max_memory=getattr(self, LIMIT, None),
    )  # fmt: skip


def is_chosen(experts: Any) -> bool:
    """Whether ``experts_implementation`` of a module of transformers is that of onepass."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def combine_tokens(self: Any, expert_output: Tensor, state: Any) -> Tensor:
    """`AllToAllEP._combine_tokens`; see `expert_exchange.combine_tokens`, which is called for experts of this name."""
    ours = is_chosen(getattr(self.experts_forward, "__self__", None))
    # The module imports DTensor.
    combine = import_module("onepass.integrations.expert_exchange").combine_tokens if ours else original(*COMBINE)
    out: Tensor = combine(self, expert_output, state)
    return out


def option(experts: nn.Module, name: str) -> bool:
    """An option of ``use_experts_implementation``; instances of earlier versions lack it and have the default."""
    return getattr(experts, name, DEFAULTS[name])


def gate_of(experts: nn.Module, hidden: Tensor | None = None) -> Gate:
    """The activation that gives the results of the experts' own ``_apply_gate``, tried on a few numbers.

    Args:
        hidden: of the dtype and device of the experts; needed where torch traces this.

    Raises:
        NotImplementedError: see `experts_forward`.
    """
    has_norm = option(experts, "has_post_expert_norm")
    if has_norm or not option(experts, "has_gate") or not hasattr(experts, "_apply_gate"):
        what = "a norm after the experts" if has_norm else "no gate of gate and up"
        raise NotImplementedError(f"experts_implementation='{NAME}': {type(experts).__name__} has {what}")
    kind: Any = type(experts)
    if hidden is None or not torch.compiler.is_compiling():
        if not hasattr(kind, METHOD):
            setattr(kind, METHOD, traced_gate_index)
        return gate_at(experts, gate_index(experts))
    # Traced on a row, whose result is not used: torch compiles again if anything changes that the gate reads.
    experts._apply_gate(hidden.new_zeros((1, PROBE)))  # type: ignore[operator]
    if hasattr(kind, METHOD):
        return gate_at(experts, getattr(experts, METHOD)())
    return gate_at(experts, gate_index_of_object(id(experts)))


def traced_gate_index(experts: nn.Module) -> int:
    """`gate_index` as a constant of a graph.

    It is a method of the experts, since torch compiles a function again for each object that is its argument: layers of
    a class of which one has run before share a graph.
    """
    with _disable_current_modes():
        return gate_index(experts)


def gate_index_of_object(number: int) -> int:
    """`gate_index` of `module_of` the number, which torch compiles for this module alone."""
    return traced_gate_index(module_of(number))


traced_gate_index.__name__ = METHOD  # torch looks a method up by its name
constant_in_trace(traced_gate_index)
constant_in_trace(gate_index_of_object)


def gate_index(experts: nn.Module) -> int:
    """The number of the gate of the experts: see `gate_at`."""
    used = gate_settings(experts)
    known = _gates.get(experts)
    if known is not None and known[0] == used:
        return known[1]
    probe = torch.linspace(-21.0, 23.0, 2 * PROBE).view(2, PROBE).roll(5, -1)
    probe = torch.cat([probe, 1000 * probe])  # beyond any limit
    with torch.no_grad():
        theirs = experts._apply_gate(probe)  # type: ignore[operator]
    for n in range(len(GATES)):
        gate = gate_at(experts, n)
        first, second = (probe[:, ::2], probe[:, 1::2]) if gate.interleaved else probe.chunk(2, -1)
        ours = activate(first, second, ExpertOptions(gate.activation, alpha=gate.alpha, limit=gate.limit))
        if theirs.shape == ours.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            _gates[experts] = used, n
            return n
    raise NotImplementedError(
        f"experts_implementation='{NAME}': {type(experts).__name__}._apply_gate is none of "
        f"{', '.join(ACTIVATIONS)} of gate and up, side by side or in turns"
    )


def gate_settings(experts: nn.Module) -> tuple[Any, ...]:
    """The attributes and globals that ``_apply_gate`` uses, itself or by what it calls, as a key that can be compared.

    Raises:
        NotImplementedError: it uses a parameter or a buffer, or a tensor that requires a gradient, which would be lost.
    """
    kind: Any = type(experts)
    method: Any = unwrap(vars(experts).get("_apply_gate", kind._apply_gate))
    functions, names = reached(kind, getattr(method, "__func__", method))
    held = vars(experts) | experts._modules
    used = [held.get(n, getattr(kind, n, None)) for n in names] + [held.get(n) for n in OF_CLAMPED]
    beside = [f.__globals__.get(n) for f in functions for n in names if n not in held]
    beside += [value for f in functions for value in closed_over(f)]
    parts = [m for v in (*used, *beside) if isinstance(v, nn.Module) for m in v.modules()]
    tensors = experts._parameters | experts._buffers
    trained = any(isinstance(v, Tensor) and v.requires_grad for v in (*used, *beside))
    if trained or any(m._parameters or m._buffers for m in parts) or not tensors.keys().isdisjoint(names):
        raise NotImplementedError(
            f"experts_implementation='{NAME}': {kind.__name__}._apply_gate uses parameters, buffers or tensors that "
            "require a gradient"
        )
    keys = [key_of_used(v) for v in used]
    return method, *keys, *[key_of_used(v) if isinstance(v, OF_VALUES) else Same(v) for v in beside]


def key_of_used(value: Any) -> Any:
    """`key_of` a value, and of a module what its forward depends on."""
    return (held_by(value), children_of(value)) if isinstance(value, nn.Module) else key_of(value)


def gate_at(experts: nn.Module, n: int) -> Gate:
    """The gate of this number, with the parameters that the experts would have for it."""
    activation, interleaved = GATES[n]
    if activation != "swiglu_clamped":
        return Gate(activation, interleaved, *CLAMPED)
    alpha, limit = (
        float(next((x for n in names if (x := getattr(experts, n, None)) is not None), default))
        for names, default in zip((OF_CLAMPED[:2], OF_CLAMPED[2:]), CLAMPED)
    )
    return Gate(activation, interleaved, alpha, limit)


def bias_of(experts: nn.Module, name: str) -> Tensor | None:
    return local_weight(experts, name, getattr(experts, name)) if option(experts, "has_bias") else None


def weight_of(experts: nn.Module, name: str, dtype: torch.dtype) -> tuple[Weight, Adapter | None]:
    """The weight and its adapter, separately if there is one adapter; else the sum that PEFT computes, and None.

    Both are those of this process' experts. A quantized weight is a `QuantizedWeight` with values of ``dtype``.
    """
    held, parametrized = experts.__dict__.get(HELD, {}), getattr(experts, "parametrizations", {})
    factors, sharded = held.get(name, (None, False))
    weight: Any = None
    quantized = quantized_of(experts, name)
    if quantized is not None:
        # PEFT leaves its parametrization of a parametrized weight behind: it would apply when adapters are disabled.
        if factors is None and name in parametrized and any("_Lora" in type(p).__name__ for p in parametrized[name]):
            raise NotImplementedError(
                f"{type(experts).__name__}.{name}: PEFT would add its adapter to a weight in "
                f"{quantized.format.name!r}; call onepass.patch('transformers') first, which keeps them apart"
            )
        weight = quantized.to(dtype)
        factors = factors and (factors[0].to(dtype), factors[1].to(dtype), factors[2])
    elif factors is None and name in parametrized and len(parametrized[name]) == 1:
        proxy = parametrized[name][0]
        if type(proxy).__name__ == "_LoraFactorsProxy":  # PEFT is not patched
            factors, weight = (proxy.lhs, proxy.rhs, proxy.scaling), parametrized[name].original
    if quantized is None:
        weight = local_weight(experts, name, getattr(experts, name) if weight is None else weight)
    if factors is None:
        return weight, None
    if sharded:
        factors = local_factors(experts, name, weight, factors)
    left, right, scaling = factors
    return weight, (left.mT, right.mT, scaling) if option(experts, "is_transposed") else (right, left, scaling)


def quantized_of(experts: nn.Module, name: str) -> QuantizedWeight | None:
    """The quantized weight of experts, which is checked once; None if it is a tensor.

    Raises:
        NotImplementedError: the experts are sharded over processes.
    """
    parametrized = getattr(experts, "parametrizations", {})
    data: Any = parametrized[name].original if name in parametrized else getattr(experts, name)
    if isinstance(data, Tensor) and data.is_floating_point() and data.element_size() > 1:
        if _quantized:
            _quantized.pop(experts, None)  # codes that `dequantize_experts` has replaced
        return None
    if is_sharded(experts, data):
        raise NotImplementedError(
            f"experts_implementation='{NAME}': {type(experts).__name__}.{name} is sharded over processes, which "
            f"requires a weight that is not quantized, got {data.dtype}"
        )
    if torch.compiler.is_compiling():
        return QuantizedWeight.from_transformers(experts, name)  # nothing is checked
    tensors = [t for t in (data, *scales_of(experts, name)) if isinstance(t, Tensor)]
    key = id(data), *[(t.data_ptr(), t.is_inference() or t._version, t.device, t.requires_grad) for t in tensors]
    known = _quantized.setdefault(experts, {}).setdefault(torch.is_inference_mode_enabled(), {})
    if name not in known or known[name][0] != key:
        known[name] = key, QuantizedWeight.from_transformers(experts, name)
    return known[name][1]


def scales_of(experts: nn.Module, name: str) -> list[Any]:
    """What `QuantizedWeight.from_transformers` reads beside the codes of a weight."""
    parametrized = getattr(experts, "parametrizations", {})
    if name not in parametrized:
        return [getattr(experts, f"{name}_scale_inv", None), getattr(experts, f"{name}_scales", None)]
    kind = parametrized[name][0]
    state = getattr(kind, "quant_state", None)
    held = state, getattr(state, "state2", None)
    return [*kind._buffers.values(), getattr(kind, "row_stats", None), getattr(state, "offset", None),
            *[getattr(s, n, None) for s in held for n in ("absmax", "code")]]  # fmt: skip


def factors_of(wrapper: Any, adapters: Sequence[str]) -> Factors:
    """The factors of all adapters together. PEFT's `get_delta_factors` would decode the weight for its dtype."""
    found = [whole_factors(wrapper, name, wrapper.lora_A[name].weight) for name in adapters]
    left = torch.cat([left * scaling for left, _, scaling in found], 2)
    return left, torch.cat([right for _, right, _ in found], 1), 1.0


@contextmanager
def activate_lora(self: Any, active_adapters: Sequence[str]) -> Iterator[None]:
    """Pass the factors of an adapter to the experts; PEFT's own adds their product to the weights of all experts."""
    experts = self.get_base_layer()
    adapters = [name for name in active_adapters if name in self.lora_A]
    ours = is_chosen(experts)
    quantized = ours and quantized_of(experts, self.parameter_name) is not None
    base: Any = self.get_param() if ours and not quantized else None
    sharded = base is not None and is_sharded(
        experts, base, *(m[n].weight for m in (self.lora_A, self.lora_B) for n in adapters)
    )
    if not (ours and adapters and (quantized or (len(adapters) == 1 and self.num_experts > 1))):
        if sharded and adapters:
            raise NotImplementedError(
                f"experts_implementation='{NAME}': {type(experts).__name__}.{self.parameter_name} is sharded over "
                f"processes, which requires one adapter, got adapters {adapters}"
            )
        with original(*PEFT)(self, active_adapters):
            yield
        return
    held = experts.__dict__.setdefault(HELD, {})
    if quantized:
        factors = factors_of(self, adapters)
    else:
        factors = whole_factors(self, adapters[0], base) if sharded else self.get_delta_factors(adapters[0])
    held[self.parameter_name] = factors, sharded
    try:
        yield
    finally:
        del held[self.parameter_name]


def merge_lora(self: Any, *args: Any, **kwargs: Any) -> None:
    """`ParamWrapper.merge`, with an error where PEFT would add the adapter to a decoded copy, and lose it.

    It is also an error where PEFT would add the product for all experts to a part of the weight.
    """
    check_not_quantized(self, "merge an adapter into it")
    factors = [module.weight for of_all in (self.lora_A, self.lora_B) for module in of_all.values()]
    is_part = hasattr(self.get_param(), "device_mesh") and not all([hasattr(f, "device_mesh") for f in factors])
    if is_part or getattr(self.get_base_layer(), "_is_expert_parallel", False):
        raise NotImplementedError(
            f"{self.parameter_name}: expected a weight that is whole on every process, to merge an adapter into it, "
            "got one that is sharded over processes; save the adapter, and merge it where the model is not sharded"
        )
    original(*PEFT_MERGE)(self, *args, **kwargs)


def unmerge_lora(self: Any) -> None:
    """`ParamWrapper.unmerge`, with an error where the weight has been quantized with a merged adapter."""
    if self.merged:
        check_not_quantized(self, "take a merged adapter out of it")
    original(*PEFT_UNMERGE)(self)


def check_not_quantized(wrapper: Any, purpose: str) -> None:
    """Raise if PEFT would write to a decoded copy of a quantized weight."""
    quantized = quantized_of(wrapper.get_base_layer(), wrapper.parameter_name)
    if quantized is not None:
        raise ValueError(
            f"{wrapper.parameter_name}: expected a weight that is not quantized, to {purpose}, got "
            f"{quantized.format.name!r}; call onepass.moe.dequantize_experts(model) before"
        )


def tp_plan_and_mesh(model: Any, current_key: str) -> tuple[str | None, Any]:
    """Tell PEFT that adapters of experts have no tensor-parallel plan: it takes the experts for a linear layer.

    The plan of the model has entries for experts, also if expert parallelism has replaced them.
    """
    module = current_key.rpartition(".")[0]
    of_experts = original(*PEFT_PLAN)(model, module)[0] == "moe_tp_experts"
    return (None, None) if of_experts else original(*PEFT_PLAN)(model, current_key)


def register() -> None:
    """Register the name with transformers, permanently, so that models can be set to it. Versions before 5.7 reject
    names other than their own, and those before 5.23 know no exchange of tokens by its name."""
    if not unsupported(INTERFACE[0], SINCE):
        getattr(import_module(INTERFACE[0]), INTERFACE[1]).register(NAME, experts_forward)
        CHECKS[NAME] = gate_of
        of_fp8 = getattr(import_module(FP8[0]), FP8[1], None)  # not in all versions
        if of_fp8 is not None:
            of_fp8.register(NAME, experts_forward)
    module, registry, since = EXCHANGES
    if not unsupported(module, since) and distributed.is_available():
        exchange = import_module("onepass.integrations.expert_exchange")  # which imports DTensor
        getattr(import_module(module), registry).register(NAME, exchange.OnepassEP)
