"""The launch of every kernel of onepass: `launch` checks what a kernel assumes, and costs less than a small kernel.

**Checks.** A kernel declares what it assumes about each argument as an annotation: `Flat`, `Rows`, `Strided` or `Out`
for a tensor (in quotes, since Triton accepts no class there), ``tl.int32``, ``tl.int64`` or ``tl.float32`` for a
number. `launch` copies an input that is not contiguous if the kernel assumes that it is, raises for what it cannot
correct, and converts every number to its declared type. A kernel with an undeclared argument cannot be launched. The
alignment of the tensors is part of a compiled variant, so that no kernel assumes more alignment than its tensors have.

**Cost.** ``kernel[grid](...)`` binds, specializes and hashes every argument: 50 µs on a slow host, three times the
launch itself. Here a `Plan` holds everything that follows from shapes and options. It is kept, and later found
by one lookup; so is which inputs are copied. The key includes the dtype, alignment, contiguity and device of every
tensor, so that only launches that were checked are in the table. Numbers are not specialized: a new number of rows
compiles a variant only if the plan has other constants for it. A compiled variant is launched directly. A caller whose
tensors are always of the same kinds may `repeat` a launch with pointers alone.
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

from onepass.core.memo import keep
from onepass.kernels.layout import power_of_two
from onepass.kernels.zeros import LARGEST, zeros

HIP = torch.version.hip is not None
KNOBS = triton.knobs.runtime


class Flat:
    """Annotation of a kernel's argument: a contiguous input."""


class Rows:
    """Annotation: an input or output with a contiguous last dimension. The launcher passes the other strides."""


class Strided:
    """Annotation: an input or output of which the launcher passes every stride that the kernel uses."""


class Out:
    """Annotation: a contiguous output."""


TENSORS = (Flat, Rows, Strided, Out)


class Plan(NamedTuple):
    """Everything that a launch needs besides its tensors."""

    kernel: Any
    programs: int
    numbers: tuple[float, ...]
    constexprs: dict[str, Any]
    num_warps: int
    workspace: int | None = None  # its size in words; 0 if it is not needed, None if the kernel has no such argument
    registers: int | None = None  # per thread, at most; only NVIDIA GPUs take a limit


class Launch(NamedTuple):
    """A compiled variant and its arguments, besides tensors."""

    compiled: Any
    run: Callable[..., None]
    programs: int
    workspace: int | None
    rest: tuple[Any, ...]  # numbers and constexprs


Copied = tuple[bool, ...]  # for each tensor, whether the kernel takes a contiguous copy of it
_launches: dict[tuple[Any, ...], Launch | Copied] = {}
_repeated: dict[Any, Launch] = {}  # those that `repeat` and `repeated` find
_quick: dict[Any, tuple[Launch, Callable[..., None]]] = {}  # some of these, and what `quick` has made of them
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    plan_for: Callable[..., Plan], about: tuple[Any, ...], tensors: Sequence[torch.Tensor | None], repeated: Any = None
) -> None:
    """Launch ``kernel(*tensors, [workspace,] *numbers, **constexprs)`` as ``plan_for(*about)`` says.

    Args:
        plan_for: returns the `Plan`. Its result is kept for each ``about`` and kind of tensors.
        about: everything that the plan depends on, and the strides of tensors that are `Rows` or `Strided`; hashable.
        tensors: in the order of the kernel's signature, with None for optional ones. The first determines the device.
        repeated: the key by which `repeat` and `repeated` find this launch. It is kept only if all tensors are aligned,
            contiguous and as they are in memory.
    """
    index = tensors[0].get_device()  # type: ignore[union-attr]
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return launch(plan_for, about, tensors, repeated)
    pointers: list[int | None] = []
    kinds: list[Any] = [index]  # what `guarded` checks of each tensor: device, dtype, alignment and layout
    usual = True
    for t in tensors:
        if t is None:
            pointers.append(None)
            kinds.append(None)
        else:
            pointer = t.data_ptr()
            pointers.append(pointer)
            kinds.append(t.dtype)
            if pointer & 15 or not pointer or t.get_device() != index or not t.is_contiguous() or t.is_neg():
                usual = False
    if not usual:
        given = [t for t in tensors if t is not None]
        kinds += [
            (t.get_device(), t.data_ptr() & 15 == 0, t.is_contiguous() or -t.stride(-1), is_lazy(t)) for t in given
        ]
    variant = tuple(kinds)
    if HIP:  # Triton compiles tensors below 2 GiB differently
        variant += tuple([t is not None and t.untyped_storage().nbytes() < 2**31 for t in tensors])
    key = plan_for, about, variant
    known = _launches.get(key)
    if known is None:
        device = tensors[0].device  # type: ignore[union-attr]
        plan = plan_for(*about)
        passed = guarded(plan.kernel, tensors, device)
        copied = tuple([t is not given for t, given in zip(passed, tensors)])
        if any(copied):
            keep(_launches, key, copied)
            return launch(plan_for, about, passed)
        numbers = typed(plan.kernel, len(tensors) + (plan.workspace is not None), plan.numbers)
        size = plan.workspace
        if size and size <= LARGEST:  # a power of two: `zeros` keeps cleared rows for each size
            size = power_of_two(size)
        name = plan.kernel, plan.num_warps, plan.registers, *plan.constexprs.values(), variant
        compiled = _compiled.get(name)
        if compiled is None:
            limit = {} if plan.registers is None else {"maxnreg": plan.registers}
            compiled = with_scratch(plan.kernel[(plan.programs,)])(
                *tensors,
                *_workspace(size, device),
                *numbers,
                **plan.constexprs,
                num_warps=plan.num_warps,
                **limit,
            )
            if isinstance(plan.kernel, JITFunction):  # not the interpreter's function
                _compiled[name] = compiled
            return
        run = compiled.run
        if getattr(compiled.metadata, "global_scratch_size", 0):  # for tensor descriptors
            run = with_scratch(run)
        known = Launch(compiled, run, plan.programs, size, (*numbers, *plan.constexprs.values()))
        keep(_launches, key, known)
    elif not isinstance(known, Launch):
        copies = [copy_of(t) if copied else t for t, copied in zip(tensors, known)]  # type: ignore[arg-type]
        return launch(plan_for, about, copies)
    if known.workspace is not None:
        space = zeros(known.workspace, tensors[0].device) if known.workspace else None  # type: ignore[union-attr]
        pointers.append(None if space is None else space.data_ptr())
    if repeated is not None and usual and not HIP:
        keep(_repeated, repeated, known)
    start(known, index, pointers)


def repeat(name: Any, inputs: Sequence[torch.Tensor]) -> tuple[Any, Launch | None]:
    """The key of a launch of these inputs, for `launch` to keep it, and the launch, for `start`, if it can be repeated.

    It can if `launch` has kept one for inputs of these dtypes, all inputs are aligned to 16 bytes, contiguous, as they
    are in memory, and on the current device. The caller guarantees the same of its outputs, which are new, and that
    the device, shapes, strides of single rows and options follow from the ``name``.
    """
    key = (name, *[t.dtype for t in inputs])
    known = _repeated.get(key)
    if known is None:
        return key, None
    index = torch.cuda.current_device()
    for t in inputs:
        pointer = t.data_ptr()
        if pointer & 15 or not pointer or t.get_device() != index or not t.is_contiguous() or t.is_neg():
            return key, None
    return key, known


def repeated(key: Any) -> Launch | None:
    """A launch that was kept, if any, for inputs that `repeat` has checked, or the caller in the same way."""
    return _repeated.get(key)


def start(known: Launch, index: int, pointers: Sequence[int | None]) -> None:
    """Launch a compiled variant on the current stream of a device. The ``pointers`` include that of the workspace."""
    compiled, run, programs, _, rest = known
    # Pointers, since Triton's launcher asks the driver about the memory of every tensor.
    arguments = *pointers, *rest
    stream, enter, leave = driver.active.get_current_stream(index), KNOBS.launch_enter_hook, KNOBS.launch_exit_hook
    hooks: tuple[Any, ...] = (None, None, None)  # what `compiled[grid]` prepares even if no profiler has set any
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        hooks = compiled.launch_metadata((programs, 1, 1), stream, *arguments), enter, leave
    run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments)


def quick(key: Any) -> Callable[..., None] | None:
    """`start` of the launch that `repeated` finds, as a function of device, stream and pointers, in less time."""
    known = _repeated.get(key)
    if known is None:
        return None
    of, begin = _quick.get(key, (None, None))
    if of is not known:
        begin = quick_start(known)
        keep(_quick, key, (known, begin))
    return begin


def quick_start(known: Launch) -> Callable[..., None]:
    """The function that `quick` returns, of ``(index, stream, *pointers)``. A stream of None is the current one."""
    compiled, run, programs, _, rest = known
    kernel: tuple[Any, ...] = (compiled.function,)
    # The function of Triton 3.6 that its launcher calls after it has found that the kernel takes no scratch memory.
    no_scratch = getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0
    if triton.__version__.startswith("3.6.") and type(run).__name__ == "CudaLauncher" and no_scratch:
        kernel = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None)
        run = run.launch
    kernel += compiled.packed_metadata, None, None, None

    def begin(index: int, stream: int | None, *pointers: int | None) -> None:
        enter, leave = KNOBS.launch_enter_hook, KNOBS.launch_exit_hook
        if stream is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            start(known, index, pointers)
        else:
            run(programs, 1, 1, stream, *kernel, *pointers, *rest)

    return begin


@cache
def declared(function: Callable[..., Any]) -> tuple[tuple[str, Any], ...]:
    """The name and annotation of every argument of a kernel that is not a constexpr, in order."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return tuple((p.name, p.annotation) for p in parameters if p.annotation is not tl.constexpr)


def guarded(kernel: Any, tensors: Sequence[torch.Tensor | None], device: torch.device) -> Sequence[torch.Tensor | None]:
    """The tensors as the kernel declares them. Inputs that should be contiguous and are not are copied.

    Raises:
        TypeError: an argument is not declared as a tensor.
        ValueError: a tensor is on another device, or does not have the declared layout.
    """
    passed = []
    for tensor, (name, kind) in zip(tensors, declared(kernel.fn)):
        if kind not in TENSORS:
            raise TypeError(f"{kernel.fn.__name__}: {name} is given a tensor, and is not declared to take one")
        if tensor is not None:
            where = f"{kernel.fn.__name__}: {name}"
            if tensor.device != device:
                raise ValueError(f"{where}: expected device {device}, that of the first tensor, got {tensor.device}")
            if kind is Flat or (kind is Strided and is_lazy(tensor) and tensor.is_contiguous()):
                tensor = copy_of(tensor)
            elif is_lazy(tensor):
                what = "a lazily negated tensor" if tensor.is_neg() else "lazy zeros"
                raise ValueError(f"{where}: expected a tensor with its values in memory, got {what}; pass its clone()")
            elif kind is Out and not tensor.is_contiguous():
                raise ValueError(f"{where}: expected a contiguous tensor to write to, got strides {tensor.stride()}")
            elif kind is Rows and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise ValueError(f"{where}: expected a contiguous last dimension, got strides {tensor.stride()}")
        passed.append(tensor)
    return passed


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values differ from those in its memory: negated (`torch.Tensor.is_neg`), or all 0."""
    return tensor.is_neg() or tensor._is_zerotensor()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of these values, itself if it is one."""
    return tensor.clone(memory_format=torch.contiguous_format) if is_lazy(tensor) else tensor.contiguous()


def typed(kernel: Any, first: int, numbers: Sequence[Any]) -> tuple[int | float, ...]:
    """The numbers, converted to the types that the kernel declares from its argument ``first`` on.

    Raises:
        TypeError: an argument has no declared type, or the kernel declares more or fewer numbers.
        ValueError: a number is not representable in its declared type.
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
    """Make Triton allocate through torch during ``run``. Its allocator is set in a copy of the context only."""

    def in_context(*arguments: Any, **options: Any) -> Any:
        context = copy_context()
        context.run(triton.set_allocator, _scratch)
        return context.run(run, *arguments, **options)

    return in_context


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """An allocator with Triton's signature."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def forget() -> None:
    """Clear the tables of launches. Compiled variants are kept."""
    _launches.clear()
    _repeated.clear()
    _quick.clear()


def _workspace(size: int | None, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """The workspace argument of a launch: zeros, None if its size is 0, or no argument if its size is None."""
    if size:
        return (zeros(size, device).view(torch.float32),)
    return () if size is None else (None,)
