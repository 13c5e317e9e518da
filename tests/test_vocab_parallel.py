"""Logits whose vocabulary is sharded over processes: every loss against one process that holds all logits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "vocab_parallel_worker.py"


def run(ranks, folder, interpreter=False, **what):
    """Start the processes of a group, and return what those that failed have printed."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreter else "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", WORKER, str(rank), str(ranks), str(folder / "store"), json.dumps(what)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    printed = [process.communicate(timeout=300)[0] for process in processes]
    return [text for text, process in zip(printed, processes) if process.returncode]


# (dtype, whether there is padding, whether rows are hard) and (dtype, padding, several tiles, sequence parallel)
VARIANTS = [("float64", False, True), ("float32", True, True), ("bfloat16", False, False)]
LINEAR = [("float64", False, False, False), ("float32", True, True, False), ("bfloat16", False, False, False)]


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_every_loss(ranks, tmp_path):
    equal_parts = ranks in (1, 3)  # of the hidden states
    sequence = [("float64", False, False, True), ("float32", True, True, True)] if equal_parts else []
    functions = ["merge_gradcheck", "disagreement", "dtensor", "mesh"] if ranks == 2 else []
    assert not run(ranks, tmp_path, cases=[], variants=VARIANTS, linear=LINEAR + sequence, functions=functions)


def test_the_kernels(tmp_path):
    """In the interpreter, on two processes."""
    cases = ["statistics 1", "statistics of K 0", "cross_entropy none 0", "topk renormalized"]
    variants = [("float32", True, True), ("bfloat16", False, False)]
    assert not run(2, tmp_path, interpreter=True, cases=cases, variants=variants, linear=LINEAR[1:2])


def test_a_rank_that_fails_makes_the_others_fail(tmp_path):
    failed = run(2, tmp_path, cases=[], variants=[], functions=["one_rank_fails"], timeout=5)
    assert len(failed) == 2 and any("only here" in text for text in failed), failed
