"""MoE models whose experts are sharded over processes, by transformers' expert parallelism and by FSDP2."""

import contextlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

from onepass.integrations import expert_shards
from onepass.integrations import transformers_experts as integration

pytest.importorskip("peft")
WORKER = Path(__file__).parent / "expert_parallel_worker.py"


def has_implementations():
    return Version(transformers.__version__) >= Version("5.23")


@pytest.mark.skipif(not has_implementations(), reason="transformers chooses an EPImplementation from 5.23 on")
def test_as_one_process(tmp_path):
    """Losses and gradients of ten steps, and checkpoints; see the worker's layouts."""
    names = {2: ["of_two", "without_rows", "unsupported", "mixed_precision"], 4: ["of_four"], 1: ["of_one"]}
    jobs = [dict(ranks=n, variants=[], functions=[f"expert_parallel_worker.{f}" for f in names[n]]) for n in names]
    environment = os.environ | {"TRITON_INTERPRET": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", WORKER, tmp_path, json.dumps(jobs)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=400,
    )  # fmt: skip
    assert not process.returncode, process.stdout
