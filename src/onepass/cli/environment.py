"""GPU, driver and versions, which the demo, `onepass doctor` and the benchmarks record with their results."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import onepass


def package_version(name: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """GPU, driver and versions, for the head of every table and JSON."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_memory_gib": round(gpu.total_memory / 2**30, 1) if gpu else None,
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "onepass": onepass.__version__,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the source tree that onepass runs from, with a ``+`` if it was changed; None if it is no checkout.

    A tree that was copied without its ``.git`` is told by the environment variable ONEPASS_COMMIT.
    """
    if "ONEPASS_COMMIT" in os.environ:
        return os.environ["ONEPASS_COMMIT"]
    root = Path(onepass.__file__).parent
    if output_of("git", "-C", str(root), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # also where onepass is installed inside of another repository
    head = output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if output_of("git", "-C", str(root), "status", "--porcelain", "--", str(root)) else "")


def output_of(*command: str) -> str | None:
    """The first line that a command prints, None if it fails or does not exist."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else None
