"""Parameters that are partitioned over processes, gathered while a linear head uses them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from onepass.core.checks import described
from onepass.core.collectives import process_group
from onepass.core.dispatch import constant_in_trace
from onepass.logits.fsdp2 import divide_factor

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
_gather: Gather | None = None


def gather_parameters(gather: Gather | None) -> None:
    """Set how parameters that are partitioned over processes are gathered while a linear head uses them.

    FSDP2 (DTensor) needs no setting: parameters are gathered once per call, and their gradients are averaged. DeepSpeed
    ZeRO-3 needs none either: `deepspeed.zero.GatheredParameters` is used. For any other partitioning,
    ``gather(parameters)`` must return a context manager within which the parameters are complete. None restores the
    default. The ``shape`` of a parameter, or its ``ds_shape`` as in ZeRO-3, must always be the complete shape.

    Raises:
        TypeError: ``gather`` is neither callable nor None.
    """
    global _gather
    if gather is not None and not callable(gather):
        raise TypeError(f"gather: expected a callable or None, got {described(gather)}")
    _gather = gather


def are_partitioned(*parameters: Tensor | None) -> bool:
    """Whether `gathered` completes parameters, which autograd must then not save: they are partitioned afterwards."""
    return _gather is not None or any(hasattr(p, "ds_id") or hasattr(p, "ds_shape") for p in parameters)


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """A context manager within which the parameters are complete."""
    found = [p for p in parameters if p is not None]
    if _gather is not None:
        return _gather(found)
    partitioned = [p for p in found if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found]

    return GatheredParameters(partitioned)


def rows_of_dtensor(weight: Tensor, vocab_group: Any) -> int | None:
    """The rows of a weight on all processes of ``vocab_group``; None unless it is a DTensor that this group shards."""
    if not hasattr(weight, "device_mesh"):
        return None
    dim = dimension_of(vocab_group.group_name, weight.device_mesh, weight.placements, "weight")  # type: ignore[attr-defined]
    return None if dim is None else weight.shape[0]


def whole(parameter: Tensor, vocab_group: Any = None, name: str = "weight") -> Tensor:
    """The full tensor of a DTensor or, with ``vocab_group``, the rows that belong to this process of that group.

    It is differentiable. Other tensors are returned unchanged. The processes over which it is gathered each compute the
    gradient of their own batch; that of the DTensor is the mean, or their sum divided by the factor that was set for
    the parameter's unit of FSDP2 (``set_gradient_divide_factor``), which a compiled function does not look up.

    Raises:
        ValueError: the processes of ``vocab_group`` are no dimension of the DTensor's mesh, or its rows are not sharded
            over that dimension.
    """
    if not hasattr(parameter, "device_mesh"):  # of a method, Dynamo says that a DTensor does not have it
        return parameter
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh: Any = parameter.device_mesh
    dim = None
    if vocab_group is not None:
        dim = dimension_of(vocab_group.group_name, mesh, parameter.placements, name)  # type: ignore[attr-defined]
    gathered = [n for n in range(mesh.ndim) if n != dim]
    placements = [Replicate() if n in gathered else Shard(0) for n in range(mesh.ndim)]
    grad_placements = [Partial() if n in gathered else Shard(0) for n in range(mesh.ndim)]
    processes = mesh.size() if dim is None else mesh.size() // mesh.size(dim)
    part: Tensor = parameter.redistribute(placements=placements).to_local(grad_placements=grad_placements)  # type: ignore[attr-defined]

    def averaged(gradient: Tensor) -> Tensor:
        factor = processes if is_compiling() else divide_factor(parameter, processes)
        return gradient if factor == 1 else gradient / factor

    if part.requires_grad:
        part.register_hook(averaged)
    return part


def dimension_of(vocab_group: str, mesh: Any, placements: Any, name: str) -> int | None:
    """The mesh dimension of a DTensor whose process group is ``vocab_group``; None if they share only this process."""
    ranks = set(dist.get_process_group_ranks(process_group(vocab_group)))
    for dim in range(mesh.ndim):
        if ranks == set(dist.get_process_group_ranks(mesh.get_group(dim))):
            if len(ranks) > 1 and not placements[dim].is_shard(0):
                raise ValueError(f"{name}: expected a DTensor with rows sharded over vocab_group, got {placements}")
            if not in_order(mesh, dim):
                raise ValueError(f"{name}: expected a mesh with ascending ranks along vocab_group, got {mesh}")
            return dim
    if len(ranks.intersection(mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(
            f"vocab_group: expected the processes of one dimension of the mesh of {name}, {mesh}, got {sorted(ranks)}"
        )
    return None


_in_order: "WeakKeyDictionary[Any, dict[int, bool]]" = WeakKeyDictionary()


def in_order(mesh: Any, dim: int) -> bool:
    """Whether all ranks along a dimension of a mesh ascend, as those of its process groups do."""
    known = _in_order.setdefault(mesh, {})
    if dim not in known:
        known[dim] = bool((mesh.mesh.movedim(dim, -1).diff(dim=-1) > 0).all())
    return known[dim]


constant_in_trace(dimension_of)
constant_in_trace(in_order)
