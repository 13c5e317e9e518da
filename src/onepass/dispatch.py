"""Which path computes, and whether a call goes through torch's dispatcher."""

import inspect
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

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


def is_plain(*arguments: Any) -> bool:
    """Plain tensors in eager mode skip the dispatcher, which costs more than a small kernel; everything that traces or
    wraps (torch.compile, export, fake tensors, tensor subclasses) goes through the registered operations."""
    for a in arguments:
        if type(a) not in PLAIN and isinstance(a, Tensor):
            return False
    return not torch.compiler.is_compiling()


def operation(name: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``function(tensor, ..., options)`` an operation registered with torch, used unless all tensors are plain.

    The operation takes the fields of the options, a named tuple, as flat arguments. ``like`` takes what the function
    takes, by name, and returns its results unwritten, for what traces. Both may return None among tensors: an operation
    cannot, so that something else stands for it there.
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

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if is_plain(*arguments):
                return function(*arguments)
            return _with_none(registered(*arguments[:-1], *arguments[-1]))

        return call

    return register


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of ``x`` in a product; None where it is off, and of float64, which it leaves alone."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype != torch.float64 and torch.is_autocast_enabled(kind) else None


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
