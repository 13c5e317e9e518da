"""Which path computes, and whether a call goes through torch's dispatcher."""

import os
from functools import lru_cache
from typing import Any

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


def empty_gradient(logits: Tensor) -> Tensor:
    out = torch.empty_like(logits)
    return out if out.stride(-1) == 1 else logits.new_empty(logits.shape)  # of expanded logits


def refuse_second_derivatives() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("onepass: second derivatives are not implemented, got create_graph=True")
