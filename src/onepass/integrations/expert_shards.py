"""Experts that are sharded over processes: the part of their weights and of PEFT's factors that this process uses.

Under expert parallelism (transformers' ``ep_dispatch_experts``) a process holds some experts, whole. Their weights are
DTensors, of which only the local tensor is read. The factors of a LoRA adapter are not sharded by expert: they are
parameters of all experts, of which a process uses those of its own, or DTensors that FSDP2 has sharded. The modules
that own them are never called, so that FSDP2 does not gather them. (ZeRO-3 gathers a parameter when it is read.)
"""

from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from onepass.core.collectives import Replicated
from onepass.logits.partitioned import whole

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


def local_factors(experts: nn.Module, name: str, weight: Tensor, base: Any, factors: Factors) -> Factors:
    """The factors of this process' experts, in the dtype of their weight.

    Args:
        experts: the module, whose ``config.distributed_config`` has the sizes of the meshes.
        name: of the parameter, for errors.
        weight: what this process computes with, ``(experts of this process, ..., ...)``.
        base: the parameter that the adapter belongs to, a DTensor if it is sharded.
        factors: of all experts, ``(E, ..., R)``, ``(E, R, ...)`` and the scaling.

    Raises:
        NotImplementedError: the experts are sharded over another dimension, as by tensor parallelism.
    """
    left, right, scaling = factors
    if len(left) != len(weight):
        first = own_experts(base, len(left), len(weight))
        group = group_of_same_batch(experts, base)
        left, right = (
            (t if group is None else Replicated.apply(t, group.group_name))[first : first + len(weight)]
            for t in (left, right)
        )
    if left.shape[1] != weight.shape[1] or right.shape[2] != weight.shape[2]:
        raise NotImplementedError(
            f"{type(experts).__name__}.{name}: expected whole experts for an adapter of {left.shape[1]} x "
            f"{right.shape[2]}, got shards of {weight.shape[1]} x {weight.shape[2]}; tensor parallelism of experts "
            "has no adapters: shard them by expert (ep_size) instead"
        )
    return left.to(weight.dtype), right.to(weight.dtype), scaling


def own_experts(base: Any, total: int, own: int) -> int:
    """The first expert of this process: experts are the last dimension of the mesh, behind those of FSDP2."""
    mesh = getattr(base, "device_mesh", None)
    dim = -1 if mesh is None else mesh.ndim - 1
    if mesh is None or mesh.size(dim) * own != total:
        raise NotImplementedError(
            f"an adapter of {total} experts, of which this process holds {own}: expected a weight that is a DTensor "
            f"sharded into {total / own:g} equal parts, got {'a plain tensor' if mesh is None else mesh}"
        )
    rank: int = mesh.get_local_rank(dim)
    return rank * own


def group_of_same_batch(experts: nn.Module, base: Any) -> Any:
    """The processes that share this process' batch and hold different experts; None if there are no others.

    Each of them has the gradients of its own experts, and their sum is that of the batch, as for any other parameter.
    """
    config = getattr(getattr(experts, "config", None), "distributed_config", None)
    size = getattr(config, "tp_size", 1)
    if size == 1:
        return None
    mesh = base.device_mesh
    dim = mesh.ndim - 1
    return mesh.get_group(dim) if mesh.size(dim) == size else tensor_group(size)


# By the default process group: the groups of one that was destroyed are not taken for those of the next.
_tensor_groups: "WeakKeyDictionary[Any, dict[int, Any]]" = WeakKeyDictionary()


def tensor_group(size: int) -> Any:
    """transformers' group of ``size`` tensor-parallel processes, which have successive ranks. All processes call it."""
    known = _tensor_groups.setdefault(dist.group.WORLD, {})
    if size not in known:
        ranks = range(dist.get_world_size())
        known[size] = dist.new_subgroups_by_enumeration([[*ranks[n : n + size]] for n in ranks[::size]])[0]
    return known[size]
