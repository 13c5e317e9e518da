"""The choice of a backend: Triton kernels on CUDA and ROCm (or in Triton's interpreter), plain PyTorch elsewhere."""

import os
from functools import lru_cache
from typing import Any

import torch

from onepass import reference

DEBUG = os.environ.get("ONEPASS_DEBUG") == "1"


def is_debugging() -> bool:
    """Whether values are looked at on a GPU too, at the price of synchronizations (``ONEPASS_DEBUG=1``)."""
    return DEBUG


def backend_of(*inputs: Any) -> Any:
    """`onepass.kernels` or `onepass.reference`: two modules with the same functions.

    The inputs decide by device and dtype: float64 is always computed in PyTorch.
    """
    for x in inputs:
        if x.dtype == torch.float64 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            return reference
    return _kernels()


@lru_cache
def _kernels() -> Any:
    from onepass import kernels  # Triton is on Linux only

    return kernels
