"""Parameters that are partitioned over processes, gathered while a linear head uses them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
_gather: Gather | None = None


def gather_parameters(gather: Gather | None) -> None:
    """Set how parameters that are partitioned over processes are gathered while a linear head uses them.

    FSDP2 (DTensor) needs no setting: parameters are gathered once per call, and their gradients are averaged. Neither
    does DeepSpeed ZeRO-3, for which `deepspeed.zero.GatheredParameters` is used. For any other partitioning,
    ``gather(parameters)`` returns a context manager within which they are complete. None restores the default. The
    ``shape`` of a parameter, or its ``ds_shape`` as in ZeRO-3, must always be that of the complete parameter.
    """
    global _gather
    _gather = gather


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """A context manager within which the parameters are complete."""
    found = [p for p in parameters if p is not None]
    if _gather is not None:
        return _gather(found)
    partitioned = [p for p in found if hasattr(p, "ds_id")]
    if not partitioned:
        return nullcontext()
    from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found]

    gather: AbstractContextManager[Any] = GatheredParameters(partitioned)
    return gather


def whole(parameter: Tensor) -> Tensor:
    """The full tensor of a DTensor, differentiable. Other tensors are returned unchanged.

    Each process computes the gradient of its own rows; that of the DTensor is their mean, as in FSDP2.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import Partial

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    full: Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad and mesh.size() > 1:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full


def local(parameter: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, differentiable. Other tensors are returned unchanged."""
    if not hasattr(parameter, "to_local"):
        return parameter
    part: Tensor = parameter.to_local()
    return part
