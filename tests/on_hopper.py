"""The mark of tests whose kernels only Hopper GPUs run."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")
ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not import_module("onepass.kernels.hopper_tiles").SUPPORTED,
    reason="takes a Hopper GPU, and Triton 3.6 or later",
)
