"""Launching a kernel for less than a small kernel costs.

`kernel[grid](...)` binds, specialises and hashes every argument: 50 µs on a slow host, three times what the launch
itself takes. Here a variant of a kernel is named by its constexprs, the dtypes of its tensors and the alignment of
those that are read in vectors; no other argument is specialised (so that no batch size compiles anew), and a variant
that was compiled is launched as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime.jit import JITFunction

HIP = torch.version.hip is not None

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    programs: int,
    vectors: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    constexprs: dict[str, Any],
    num_warps: int,
) -> None:
    """Launch ``kernel(*vectors, *tensors, *numbers, **constexprs)`` on the device of the first tensor."""
    device = vectors[0].device  # type: ignore[union-attr]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, vectors, tensors, numbers, constexprs, num_warps)
    arguments = (*vectors, *tensors, *numbers)
    key = (
        kernel,
        device.index,
        num_warps,
        *constexprs.values(),
        *[t is not None and (t.dtype, t.data_ptr() % 16) for t in vectors],
        *[t is not None and t.dtype for t in tensors],
        # Triton's ROCm backend compiles tensors below 2 GiB differently.
        HIP and tuple(t is not None and t.untyped_storage().nbytes() < 2**31 for t in (*vectors, *tensors)),
    )
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*arguments, *constexprs.values())
        return
    compiled = kernel[(programs,)](*arguments, **constexprs, num_warps=num_warps)
    if isinstance(kernel, JITFunction):  # and not the interpreter
        _compiled[key] = compiled
