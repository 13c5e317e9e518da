"""Which of the paths a test runs on."""

import os


def interpreted(device):
    """Whether kernels run in Triton's interpreter, where every program takes milliseconds."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
