"""The one place where a kernel is launched: it guards what the kernel assumes, and costs less than a small kernel.

**The guard.** A kernel declares in its signature what it assumes of each argument, as an annotation: `Flat`, `Rows`,
`Strided` or `Out` of a tensor (in quotes, since Triton takes no class there), ``tl.int32``, ``tl.int64`` or
``tl.float32`` of a number. `launch` copies an input that is not contiguous where the kernel takes it to be, refuses
what it cannot make right, and gives every number its declared type. A kernel that does not declare an argument cannot
be launched. The alignment of tensors is part of what is compiled, so that no kernel assumes more of it than there is.

**The cost.** ``kernel[grid](...)`` binds, specialises and hashes every argument: 50 µs on a slow host, three times what
the launch itself takes. Here everything that follows from shapes and options is a `Plan`, computed once and found again
by one lookup, with the dtype, alignment, contiguity and device of every tensor in the key: what was not checked is not
in the table. No other argument is specialised, so that no batch size compiles anew, and a compiled variant is launched
as it is.
"""

import inspect
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HIP = torch.version.hip is not None
MOST = 4096  # launches that are remembered


class Flat:
    """Of a kernel's argument: an input that is contiguous."""


class Rows:
    """An input or output whose last dimension is contiguous; the launcher passes the strides of the others."""


class Strided:
    """An input or output of which the launcher passes every stride that the kernel uses."""


class Out:
    """An output that is contiguous."""


TENSORS = (Flat, Rows, Strided, Out)


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


def launch(plan_for: Callable[..., Plan], about: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> None:
    """Launch ``kernel(*tensors, [workspace,] *numbers, **constexprs)`` as ``plan_for(*about)`` says.

    ``tensors`` are in the order of the kernel's signature, None where it has none; the first says on which device.
    ``about`` holds all that the plan follows from, and the strides of tensors that are `Rows` or `Strided`.
    """
    device = tensors[0].device  # type: ignore[union-attr]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(plan_for, about, tensors)
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    # Dtype, alignment, contiguity (else the last stride) and device: what the guard has looked at.
    variant: tuple[Any, ...] = tuple(
        [
            None if t is None else (t.dtype, not p & 15, t.is_contiguous() or -t.stride(-1), t.get_device())
            for t, p in zip(tensors, pointers)
        ]
    )
    if HIP:  # Triton compiles tensors below 2 GiB differently
        variant += tuple([t is not None and t.untyped_storage().nbytes() < 2**31 for t in tensors])
    key = plan_for, about, variant
    known = _launches.get(key)
    if known is None:
        plan = plan_for(*about)
        passed = guarded(plan.kernel, tensors, device)
        if any(t is not given for t, given in zip(passed, tensors)):
            return launch(plan_for, about, passed)
        numbers = typed(plan.kernel, len(tensors) + (plan.workspace is not None), plan.numbers)
        name = plan.kernel, plan.num_warps, *plan.constexprs.values(), variant
        compiled = _compiled.get(name)
        if compiled is None:
            compiled = with_scratch(plan.kernel[(plan.programs,)])(
                *tensors, *_zeros(plan.workspace, device), *numbers, **plan.constexprs, num_warps=plan.num_warps
            )
            if isinstance(plan.kernel, JITFunction):  # and not the interpreter
                _compiled[name] = compiled
            return
        if len(_launches) >= MOST:
            _launches.clear()
        run = compiled[(plan.programs, 1, 1)]
        if getattr(compiled.metadata, "global_scratch_size", 0):  # for the descriptors of its programs
            run = with_scratch(run)
        known = run, plan.workspace, (*numbers, *plan.constexprs.values())
        _launches[key] = known
    run, workspace, rest = known
    # Of a tensor, Triton's launcher would ask the driver where it lies.
    run(*pointers, *_zeros(workspace, device), *rest, stream=driver.active.get_current_stream(device.index))


@cache
def declared(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """The name and annotation of every argument of a kernel that is no constexpr, in their order."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return tuple((p.name, p.annotation) for p in parameters if p.annotation is not tl.constexpr)


def guarded(kernel: Any, tensors: Sequence[torch.Tensor | None], device: torch.device) -> Sequence[torch.Tensor | None]:
    """The tensors as the kernel declares them: inputs that are not contiguous are copied.

    Raises:
        TypeError: an argument is not declared to be a tensor.
        ValueError: a tensor is on another device, or cannot be what is declared.
    """
    passed = []
    for tensor, (name, kind) in zip(tensors, declared(kernel.fn)):
        if kind not in TENSORS:
            raise TypeError(f"{kernel.fn.__name__}: {name} is given a tensor, and is not declared to take one")
        if tensor is not None:
            where = f"{kernel.fn.__name__}: {name}"
            if tensor.device != device:
                raise ValueError(f"{where}: expected device {device}, that of the first tensor, got {tensor.device}")
            if kind is Flat:
                tensor = tensor.contiguous()
            elif kind is Out and not tensor.is_contiguous():
                raise ValueError(f"{where}: expected a contiguous tensor to write to, got strides {tensor.stride()}")
            elif kind is Rows and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{where}: expected a contiguous last dimension, got strides {tensor.stride()}")
        passed.append(tensor)
    return passed


def typed(kernel: Any, first: int, numbers: Sequence[Any]) -> tuple[int | float, ...]:
    """The numbers, in the types that the kernel declares from its argument ``first`` on.

    Raises:
        TypeError: an argument has no declared type, or there are more or fewer than the kernel declares.
        ValueError: a number is not one of that type.
    """
    arguments = declared(kernel.fn)[first:]
    if len(arguments) != len(numbers):
        raise TypeError(f"{kernel.fn.__name__}: expected {len(arguments)} numbers, got {len(numbers)}")
    found = []
    for number, (name, kind) in zip(numbers, arguments):
        if kind == tl.float32:
            found.append(float(number))
        elif kind in (tl.int32, tl.int64):
            bits = 31 if kind == tl.int32 else 63
            if int(number) != number or not -(2**bits) <= number < 2**bits:
                raise ValueError(f"{kernel.fn.__name__}: {name}: expected an {kind}, got {number!r}")
            found.append(int(number))
        else:
            raise TypeError(f"{kernel.fn.__name__}: {name} is given a number, and declares no type of it")
    return tuple(found)


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
