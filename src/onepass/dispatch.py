"""Which path computes, and whether a call goes through torch's dispatcher."""

import inspect
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_dispatch_stack_at, _len_torch_dispatch_stack

from onepass import eager
from onepass.source import Logits


def path_of(*logits: Logits) -> Any:
    """The module that computes: Triton on CUDA and ROCm (or in its interpreter), `eager` for the rest."""
    for x in logits:
        if x.dtype == torch.float64 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            return eager
    return _kernels()


def part_of(x: Logits, name: str, in_torch: Any) -> Any:
    """The module of that name beside the kernels, or the one that does the same in PyTorch."""
    path = path_of(x)
    return in_torch if path is eager else getattr(path, name)


@lru_cache
def _kernels() -> Any:
    from onepass import kernels  # Triton is on Linux only

    return kernels


PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def is_untraced(*arguments: Any) -> bool:
    """Whether all tensors are plain and nothing traces the call (torch.compile, export, fake tensors, subclasses)."""
    for a in arguments:
        if type(a) not in PLAIN and isinstance(a, Tensor):
            return False
    return not torch.compiler.is_compiling()


def is_plain(*arguments: Any) -> bool:
    """Whether the dispatcher may be skipped, which costs more than a small kernel. What traces, and a
    `TorchDispatchMode` (which counts FLOPs, say), goes through the registered operations."""
    return is_untraced(*arguments) and _len_torch_dispatch_stack() == 0


def refuse_forward_mode(*arguments: Any) -> None:
    """A dual tensor would silently lose its tangent: no operation here computes one."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments):
        raise NotImplementedError("onepass: forward-mode differentiation is not implemented, got a dual tensor")


FLOPS: dict[Any, Callable[..., int]] = {}  # of operations


def tell_flop_counters() -> None:
    """The formulas, to FLOP counters that are active. (Torch's table of them is in a module that imports Triton.)"""
    if torch.compiler.is_compiling():
        return
    for n in range(_len_torch_dispatch_stack()):
        registry = getattr(getattr(_get_dispatch_stack_at(n), "counter", None), "flop_registry", None)
        if registry is not None:
            registry.update(FLOPS)


def operation(
    name: str, like: Callable[..., Any], flops: Callable[..., int] | None = None, composite: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``function(tensor, ..., options)`` an operation registered with torch, used unless all tensors are plain.

    The operation takes the fields of the options, a named tuple, as flat arguments. ``like`` takes what the function
    takes, by name, and returns its results unwritten, for what traces. Both may return None among tensors: an operation
    cannot, so that something else stands for it there. ``flops`` takes the same with shapes for tensors, and returns
    what `torch.utils.flop_counter` counts, for an operation whose products are kernels of our own; one without it that
    is made of torch's products is ``composite``: a mode sees those.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        kind, count = last.annotation, len(first)
        fields = [last.replace(name=field, annotation=of) for field, of in get_type_hints(kind).items()]

        def flat(*arguments: Any) -> Any:
            return _without_none(function(*arguments[:count], kind(*arguments[count:])), arguments[0])

        def fake(*arguments: Any) -> Any:
            named = {p.name: a for p, a in zip(first, arguments)}
            return _without_none(like(**named, options=kind(*arguments[count:])), arguments[0])

        prototype: Any = flat
        prototype.__signature__ = signature.replace(
            parameters=[*first, *fields], return_annotation=_always_tensors(signature.return_annotation)
        )
        registered = torch.library.custom_op(name, prototype, mutates_args=())
        registered.register_fake(fake)
        if flops is not None:
            names = [p.name for p in (*first, *fields)]

            def counted(*arguments: Any, **_: Any) -> int:
                shapes = [a.shape if isinstance(a, Tensor) else a for a in arguments]
                return flops(**dict(zip(names, shapes)))

            FLOPS[getattr(torch.ops.onepass, name.partition("::")[2])] = counted
        may_skip = is_untraced if composite else is_plain

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if may_skip(*arguments):
                if forward_ad._current_level >= 0:
                    refuse_forward_mode(*arguments)
                return function(*arguments)
            tell_flop_counters()
            return _with_none(registered(*arguments[:-1], *arguments[-1]))

        return call

    return register


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of ``x`` in a product; None where it is off, and of float64, which it leaves alone."""
    if x.dtype == torch.float64 or not is_autocast_enabled(x):
        return None
    return torch.get_autocast_dtype(x.device.type)


def is_autocast_enabled(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # of meta torch does not know it


ABSENT = torch.uint8  # the dtype of what stands for None: no result has it


def _without_none(results: Any, like: Tensor) -> Any:
    if isinstance(results, Tensor):
        return results
    return type(results)([like.new_empty(0, dtype=ABSENT) if r is None else r for r in results])


def _with_none(results: Any) -> Any:
    if isinstance(results, Tensor):
        return results
    return type(results)([None if r.dtype == ABSENT else r for r in results])


def _always_tensors(annotation: Any) -> Any:
    """Without the None, for torch's schema."""
    if annotation is Tensor:
        return Tensor
    return list[Tensor] if get_origin(annotation) is list else tuple[(Tensor,) * len(get_args(annotation))]  # type: ignore[misc]


def empty_gradient(logits: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    return out if out.stride(-1) == 1 else logits.new_empty(logits.shape)  # of expanded logits


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("onepass: second derivatives are not implemented, got create_graph=True")
