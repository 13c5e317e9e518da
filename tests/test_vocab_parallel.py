"""Logits whose vocabulary is sharded over processes: every loss against one process that holds all logits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forks

pytestmark = forks.GROUP
DEPRECATED = "`torch.distributed."  # what torch says of names that it deprecates begins so
WORKER = Path(__file__).parent / "vocab_parallel_worker.py"


def run(folder, *jobs, interpreter=False):
    """Run jobs, one after the other: of how many processes failed, and what they printed."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreter else "", "OMP_NUM_THREADS": "1"}
    warnings = "ignore", f"error:{DEPRECATED}:FutureWarning"
    if not interpreter:
        return forks.run_file(WORKER, folder, json.dumps(jobs), environment=environment, warnings=warnings)
    options = [o for warning in warnings for o in ("-W", warning)]  # Triton is imported anew
    process = subprocess.run(
        [sys.executable, *options, WORKER, folder, json.dumps(jobs)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=300,
    )  # fmt: skip
    return process.returncode, process.stdout


def job(ranks, variants=(), linear=(), **rest):
    return dict(ranks=ranks, variants=variants, linear=linear) | rest


# (dtype, whether there is padding, whether rows are hard) and (dtype, padding, several tiles, sequence parallel)
HARD, DOUBLE, HALF = ("float32", True, True), ("float64", False, True), ("bfloat16", False, False)
TILED, IN_DOUBLE, IN_HALF = ("float32", True, True, False), (*DOUBLE[:2], False, False), (*HALF[:2], False, False)
SEQUENCE = ("float32", True, True, True)  # ranks that have equal parts of the rows


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["shares", "whole"])
def test_every_loss(tmp_path, step):
    """Two processes take every loss; other numbers and float64 take a third, another one for each variant, or all."""
    failed, printed = run(
        tmp_path,
        job(1, [HARD], [TILED, SEQUENCE], share=(0, step)),
        job(
            2,
            [HARD],
            [TILED],
            functions=["merge_gradcheck", "hard_pairs", "disagreement", "dtensor", "mesh", "odd_shards", "few_columns"],
        ),
        job(2, [DOUBLE], [IN_DOUBLE], share=(1, step)),
        job(
            3,
            [HARD, HALF],
            [TILED, IN_HALF, SEQUENCE, ("float64", False, False, True)],
            functions=["hard_pairs", "materialized"],
            share=(0, step),
        ),
        job(4, [HARD], [TILED], share=(2, step)),
    )
    assert not failed, printed


def test_patches(tmp_path):
    """Of other libraries."""
    names = "patched_torch", "patched_torchtitan", "patched_megatron"
    failed, printed = run(tmp_path, job(2, functions=[f"patched_worker.{name}" for name in names]))
    assert not failed, printed


def test_meshes(tmp_path):
    """FSDP2 and a sharded vocabulary together."""
    names = [f"mesh_worker.{name}" for name in ("linear_heads", "logits_of_a_head", "unsupported")]
    failed, printed = run(tmp_path, job(4, functions=[*names, "mean_group_cases.of_a_mesh"]))
    assert not failed, printed


def test_compiled(tmp_path):
    names = ["compiled_worker.heads", "compiled_worker.classes", "compiled_worker.refused", "mean_group_cases.compiled"]
    failed, printed = run(tmp_path, job(2, functions=names))
    assert not failed, printed


@pytest.mark.exhaustive
def test_more_compiled(tmp_path):
    names = [f"compiled_worker.{name}" for name in ("logits", "shapes", "dtensors", "after_an_error")]
    if shutil.which(os.environ.get("CXX", "g++")):  # a fresh machine has no C++ compiler
        names.append("compiled_worker.inductor")
    failed, printed = run(tmp_path, job(2, functions=names), job(4, functions=["mean_group_cases.compiled_of_a_mesh"]))
    assert not failed, printed


def test_the_kernels(tmp_path):
    """In the interpreter, on two processes."""
    cases = ["statistics 1", "statistics of K 0", "statistics of a support", "topk renormalized"]
    pairs = ["kl_div sharded 3", "kl_div sharded 4", "kl_div head 6"]
    failed, printed = run(
        tmp_path,
        job(
            2, [HARD], cases=[*cases, "cross_entropy 0"], functions=["odd_shards", "unlike_operands", "second_backward"]
        ),
        job(2, [HALF], cases=cases[:1]),
        job(2, linear=[TILED], cases=[*cases[2:], "log_probs of a support", pairs[2]]),
        job(2, [HARD], cases=pairs[:2], functions=["hard_pairs"]),
        interpreter=True,
    )
    assert not failed, printed


@pytest.mark.gpu
@pytest.mark.parametrize(
    "what",
    [
        job(1, [HARD]),
        job(2, [HARD, DOUBLE, HALF]),
        job(2, linear=[TILED, IN_DOUBLE, IN_HALF], functions=["hard_pairs"]),
        job(3, [HARD], [TILED, SEQUENCE]),
    ],
    ids=["one", "two", "heads of two", "three"],
)
def test_gpus(tmp_path, what):
    """One for each process with NCCL, or one for all processes."""
    failed, printed = run(tmp_path, what | {"gpu": True})
    assert not failed, printed


def test_a_rank_that_fails_makes_the_others_fail(tmp_path):
    failed, printed = run(tmp_path, job(2, functions=["one_rank_fails"], timeout=5))
    assert failed == 2 and "only here" in printed, printed
