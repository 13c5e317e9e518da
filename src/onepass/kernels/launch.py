"""Launching a kernel for less than a small kernel costs.

`kernel[grid](...)` binds, specialises and hashes every argument: 50 µs on a slow host, three times what the launch
itself takes. Here everything that follows from shapes and options is a `Plan`, computed once and found again by one
lookup; a variant of a kernel is named by its constexprs, the dtypes of its tensors and the alignment of those that
are read in vectors. No other argument is specialised (so that no batch size compiles anew), and a compiled variant is
launched as it is.
"""

from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HIP = torch.version.hip is not None
MOST = 4096  # launches that are remembered


class Plan(NamedTuple):
    """What a launch takes besides its tensors."""

    kernel: Any
    programs: int
    numbers: tuple[float, ...]
    constexprs: dict[str, Any]
    num_warps: int
    workspace: int | None = None  # zeros for programs to meet at; 0 where none meet, None where the kernel has none


_launches: dict[tuple[Any, ...], tuple[Callable[..., None], int | None, tuple[Any, ...]]] = {}
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    plan_for: Callable[..., Plan],
    about: tuple[Any, ...],
    vectors: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """Launch ``kernel(*vectors, *tensors, [workspace,] *numbers, **constexprs)`` as ``plan_for(*about)`` says.

    ``vectors`` are those that are read in vectors; the first says on which device.
    """
    device = vectors[0].device  # type: ignore[union-attr]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(plan_for, about, vectors, tensors)
    given = (*vectors, *tensors)
    pointers = [None if t is None else t.data_ptr() for t in given]
    variant: tuple[Any, ...] = (
        device.index,
        *[None if t is None else t.dtype for t in given],
        *[p and p % 16 for p in pointers[: len(vectors)]],
    )
    if HIP:  # Triton compiles tensors below 2 GiB differently
        variant += tuple([t is not None and t.untyped_storage().nbytes() < 2**31 for t in given])
    key = plan_for, about, variant
    known = _launches.get(key)
    if known is None:
        plan = plan_for(*about)
        name = plan.kernel, plan.num_warps, *plan.constexprs.values(), variant
        compiled = _compiled.get(name)
        if compiled is None:
            compiled = with_scratch(plan.kernel[(plan.programs,)])(
                *given, *_zeros(plan.workspace, device), *plan.numbers, **plan.constexprs, num_warps=plan.num_warps
            )
            if isinstance(plan.kernel, JITFunction):  # and not the interpreter
                _compiled[name] = compiled
            return
        if len(_launches) >= MOST:
            _launches.clear()
        run = compiled[(plan.programs, 1, 1)]
        if getattr(compiled.metadata, "global_scratch_size", 0):  # for the descriptors of its programs
            run = with_scratch(run)
        known = run, plan.workspace, (*plan.numbers, *plan.constexprs.values())
        _launches[key] = known
    run, workspace, rest = known
    # Of a tensor, Triton's launcher would ask the driver where it lies.
    run(*pointers, *_zeros(workspace, device), *rest, stream=driver.active.get_current_stream(device.index))


def with_scratch(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with torch's memory for what Triton allocates, which is nobody else's setting."""

    def in_context(*arguments: Any, **options: Any) -> Any:
        context = copy_context()
        context.run(triton.set_allocator, _scratch)
        return context.run(run, *arguments, **options)

    return in_context


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def forget() -> None:
    """Launches are planned anew; what was compiled stays."""
    _launches.clear()


def _zeros(size: int | None, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    if size is None:
        return ()
    return (torch.zeros(size, dtype=torch.float32, device=device) if size else None,)
