"""Experts that are sharded over processes: the part of their weights and of PEFT's factors that this process uses.

Under expert parallelism (transformers' ``ep_dispatch_experts``) a process holds some experts, whole. Their weights are
DTensors, of which only the local tensor is read. The factors of a LoRA adapter are not sharded by expert: they are
parameters of all experts, of which a process uses those of its own, or DTensors that FSDP2 has sharded. The modules
that own them are never called, so that FSDP2 does not gather them. (ZeRO-3 gathers a parameter when it is read.)
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onepass.core.collectives import Replicated
from onepass.core.dispatch import constant_in_trace
from onepass.logits.partitioned import whole
from onepass.moe.probe import closed_over, module_of

Factors = tuple[Tensor, Tensor, float]


def local_weight(experts: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The experts of this process, of a weight or bias that may be a DTensor.

    Raises:
        ValueError: FSDP2 or ZeRO-3 have not gathered it, or a DTensor is sharded over another dimension than experts.
    """
    check_gathered(weight, f"{type(experts).__name__}.{name}")
    if not hasattr(weight, "device_mesh"):
        return weight
    own: Tensor = weight.to_local()  # type: ignore[attr-defined]
    count = getattr(experts, "num_experts", len(own))
    if own.shape[1:] != weight.shape[1:] or len(own) != count:
        placements, mesh = weight.placements, weight.device_mesh  # type: ignore[attr-defined]
        raise ValueError(
            f"{type(experts).__name__}.{name}: expected all of {count} experts on this process, got "
            f"{tuple(own.shape)} of {tuple(weight.shape)}, a DTensor with {placements} on {mesh}. FSDP2 gathers it for "
            "a call of the module to which fully_shard was applied, and expert parallelism shards it by expert"
        )
    return own


def check_gathered(parameter: Tensor, name: str) -> None:
    """Raise a ValueError if a parameter that ZeRO-3 partitions is not whole."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    if shape != tuple(parameter.shape):
        raise ValueError(
            f"{name}: expected a parameter of shape {shape}, got {tuple(parameter.shape)}, as ZeRO-3 partitions it; it "
            "gathers parameters in a forward of DeepSpeed's engine, for calls of modules, not of their forward"
        )


def is_sharded(experts: nn.Module, *parameters: Tensor) -> bool:
    """Whether any of an adapter's parameters and its experts' weight is sharded over processes."""
    return getattr(experts, "_is_expert_parallel", False) or any(
        hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in parameters
    )


def whole_factors(wrapper: Any, adapter: str, like: Tensor) -> Factors:
    """``wrapper.get_delta_factors(adapter)`` of PEFT's `ParamWrapper`, of all experts, wherever they are sharded.

    PEFT reads no more of ``like`` than its dtype, which is that of the factors.
    """
    found = {}
    for name in ("lora_A", "lora_B"):
        weight = getattr(wrapper, name)[adapter].weight
        check_gathered(weight, f"{wrapper.parameter_name}.{name}")
        found[name] = {adapter: SimpleNamespace(weight=whole(weight))}
    view = SimpleNamespace(**found, get_param=lambda: like, **{
        name: getattr(wrapper, name) for name in ("num_experts", "scaling", "_did_swap_in_out_features")
    })  # fmt: skip
    return type(wrapper).get_delta_factors(view, adapter)


def local_factors(experts: nn.Module, name: str, weight: Tensor, factors: Factors) -> Factors:
    """The factors of this process' experts, in the dtype of their weight.

    Args:
        experts: the module, to which transformers has applied expert parallelism if it has not all experts.
        name: of the parameter, for errors.
        weight: what this process computes with, ``(experts of this process, ..., ...)``.
        factors: of all experts, ``(E, ..., R)``, ``(E, R, ...)`` and the scaling.

    Raises:
        NotImplementedError: the experts are sharded over another dimension, as by tensor parallelism, or not by
            transformers' expert parallelism.
    """
    left, right, scaling = factors
    if len(left) != len(weight):
        sizes = len(left), len(weight)
        traced = torch.compiler.is_compiling()
        first, group = own_experts_of_object(id(experts), *sizes) if traced else own_experts(experts, *sizes)
        left, right = (
            (t if group is None else Replicated.apply(t, group))[first : first + len(weight)] for t in (left, right)
        )
    if left.shape[1] != weight.shape[1] or right.shape[2] != weight.shape[2]:
        raise NotImplementedError(
            f"{type(experts).__name__}.{name}: expected whole experts for an adapter of {left.shape[1]} x "
            f"{right.shape[2]}, got shards of {weight.shape[1]} x {weight.shape[2]}; tensor parallelism of experts "
            "has no adapters: shard them by expert (ep_size) instead"
        )
    return left.to(weight.dtype), right.to(weight.dtype), scaling


def own_experts(experts: nn.Module, total: int, own: int) -> tuple[int, str | None]:
    """The first expert of this process, and the group of processes that share its batch; None if there are no others.

    Each of these has the gradients of its own experts, and their sum is that of the batch, as for any other parameter.
    """
    implementation = implementation_of(experts)
    if implementation is None or implementation.ep_mesh.size() * own != total:
        raise NotImplementedError(
            f"an adapter of {total} experts, of which this process holds {own}: expected experts that transformers "
            f"(5.23 or later) has sharded by its 'ep_dispatch_experts' into {total / own:g} equal parts, got "
            f"{'a forward in which no EPImplementation is found' if implementation is None else implementation.ep_mesh}"
        )
    of_batch = implementation.tp_mesh
    group = of_batch.get_group().group_name if of_batch.size() > 1 else None
    return implementation.ep_mesh.get_local_rank() * own, group


def own_experts_of_object(number: int, total: int, own: int) -> tuple[int, str | None]:
    """`own_experts` of `module_of` the number, as a constant of a graph."""
    return own_experts(module_of(number), total, own)


constant_in_trace(own_experts_of_object)


def implementation_of(experts: nn.Module) -> Any:
    """The `EPImplementation` of experts, which has the meshes that are used; None if there is none.

    The config is no substitute: that of the experts may be a part of the model's, which alone has the sizes.
    transformers holds the implementation in the closure of ``experts.forward``, which others may have wrapped.
    """
    held: list[Any] = [vars(experts).get(name) for name in ("forward", "_old_forward")]  # accelerate keeps the second
    for f in held:  # which grows
        if all(hasattr(f, name) for name in ("ep_mesh", "tp_mesh", "experts_forward")):
            if getattr(f.experts_forward, "__self__", experts) is experts:  # not those of another model
                return f
            continue
        inner = [getattr(f, name, None) for name in ("__wrapped__", "__func__", "func")]
        given = [*f.args, *f.keywords.values()] if isinstance(f, partial) else []
        inner += [*closed_over(f), *given]
        held += [x for x in inner if callable(x) and all(x is not y for y in held)]
    return None
