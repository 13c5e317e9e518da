"""Which path computes, and whether a call goes through torch's dispatcher."""

import inspect
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, get_type_hints

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


@lru_cache
def _kernels() -> Any:
    from onepass import kernels  # Triton is on Linux only

    return kernels


def is_plain(*tensors: Tensor) -> bool:
    """Plain tensors in eager mode skip the dispatcher, which costs more than a small kernel; everything that traces or
    wraps (torch.compile, export, fake tensors, tensor subclasses) goes through the registered operations."""
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter):
            return False
    return not torch.compiler.is_compiling()


def operation(name: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``function(tensor, ..., options)`` an operation registered with torch, used unless all tensors are plain.

    The operation takes the fields of the options, a named tuple, as flat arguments. ``like`` takes what the function
    takes, by name, and returns its results unwritten, for what traces.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        kind, count = last.annotation, len(first)
        fields = [last.replace(name=field, annotation=of) for field, of in get_type_hints(kind).items()]

        def flat(*arguments: Any) -> Any:
            return function(*arguments[:count], kind(*arguments[count:]))

        def fake(*arguments: Any) -> Any:
            return like(**{p.name: a for p, a in zip(first, arguments)}, options=kind(*arguments[count:]))

        prototype: Any = flat
        prototype.__signature__ = signature.replace(parameters=[*first, *fields])
        registered = torch.library.custom_op(name, prototype, mutates_args=())
        registered.register_fake(fake)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if is_plain(*[a for a in arguments if isinstance(a, Tensor)]):
                return function(*arguments)
            return registered(*arguments[:-1], *arguments[-1])

        return call

    return register


def empty_gradient(logits: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    return out if out.stride(-1) == 1 else logits.new_empty(logits.shape)  # of expanded logits


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("onepass: second derivatives are not implemented, got create_graph=True")
