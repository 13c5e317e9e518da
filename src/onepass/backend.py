"""The choice of a backend: Triton kernels on CUDA and ROCm (or in Triton's interpreter), plain PyTorch elsewhere.

Autograd functions, registered operations and losses of tiles call `backend_of` to find their implementation.
"""

import os
from typing import Any

import torch

from onepass import reference
from onepass.core.memo import memo

KERNELS, PLAIN = "Triton kernels", "plain PyTorch"


def backend_of(*inputs: Any) -> Any:
    """Return `onepass.kernels` or `onepass.reference`, two modules that define the same functions.

    The device and dtype of the inputs decide. float64 is always computed in plain PyTorch.
    """
    for x in inputs:
        if x.dtype == torch.float64 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
            return reference
    return _kernels()


def name_of_backend(*inputs: Any) -> str:
    """What `backend_of` returns, for messages."""
    return PLAIN if backend_of(*inputs) is reference else KERNELS


@memo
def _kernels() -> Any:
    """Import the kernels on first use."""
    from onepass import kernels  # Triton is available on Linux only

    return kernels
