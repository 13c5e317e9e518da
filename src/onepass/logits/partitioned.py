"""Parameters that are partitioned over processes, made whole while they are used."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

Gather = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]
_gather: Gather | None = None


def gather_parameters(gather: Gather | None) -> None:
    """Say how parameters that are partitioned over processes are made whole while a linear head uses them.

    FSDP2's (DTensor) need nothing: they are gathered once a call, and their gradients are scattered. Nor do DeepSpeed's
    ZeRO-3, for which `deepspeed.zero.GatheredParameters` is used. For any other: ``gather(parameters)`` returns a
    context manager within which they are whole; None takes it back. Their ``shape``, or a ``ds_shape`` as ZeRO-3's
    have, must be that of the whole at any time.
    """
    global _gather
    _gather = gather


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
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
    """A DTensor's full tensor, differentiably."""
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full
