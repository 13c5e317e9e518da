"""Launching a kernel for less than a small kernel costs.

`kernel[grid](...)` binds, specialises and hashes every argument: 50 µs on a slow host, three times what the launch
itself takes. Here everything that follows from shapes and options is computed once, in a `Plan`; a variant of a
kernel is named by its constexprs, the dtypes of its tensors and the alignment of those that are read in vectors. No
other argument is specialised (so that no batch size compiles anew), and a compiled variant is launched as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

HIP = torch.version.hip is not None


class Plan(NamedTuple):
    """What a launch takes besides its tensors."""

    programs: int
    numbers: tuple[float, ...]
    constexprs: dict[str, Any]
    num_warps: int
    compiled: dict[Any, Any]  # by device, dtypes and alignment; shared by plans of the same constexprs


_variants: dict[tuple[Any, ...], dict[Any, Any]] = {}


def plan(kernel: Any, programs: int, numbers: tuple[float, ...], num_warps: int, **constexprs: Any) -> Plan:
    variant = _variants.setdefault((kernel, num_warps, *constexprs.values()), {})
    return Plan(programs, numbers, constexprs, num_warps, variant)


def launch(
    kernel: Any, plan: Plan, vectors: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor | None]
) -> None:
    """Launch ``kernel(*vectors, *tensors, *numbers, **constexprs)`` on the device of the first of the vectors."""
    device = vectors[0].device  # type: ignore[union-attr]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, plan, vectors, tensors)
    pointers = [None if t is None else t.data_ptr() for t in (*vectors, *tensors)]
    key: tuple[Any, ...] = (
        device.index,
        *[t is not None and t.dtype for t in (*vectors, *tensors)],
        *[p is not None and p % 16 for p in pointers[: len(vectors)]],
    )
    if HIP:  # Triton compiles tensors below 2 GiB differently
        key += tuple(t is not None and t.untyped_storage().nbytes() < 2**31 for t in (*vectors, *tensors))
    compiled = plan.compiled.get(key)
    if compiled is not None:
        # Of a tensor, Triton's launcher would ask the driver where it lies.
        compiled[(plan.programs, 1, 1)](*pointers, *plan.numbers, *plan.constexprs.values())
        return
    compiled = kernel[(plan.programs,)](*vectors, *tensors, *plan.numbers, **plan.constexprs, num_warps=plan.num_warps)
    if isinstance(kernel, JITFunction):  # and not the interpreter
        plan.compiled[key] = compiled
