"""The examples, as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onepass

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *launcher):
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(onepass.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    script = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / name], env=environment, capture_output=True, text=True
    )
    assert script.returncode == 0, script.stderr
    return script.stdout


def test_there_is_a_test_for_each():
    tested = {"sft.py", "distillation.py", "policy_loss.py", "trl_grpo.py", "tensor_parallel.py"}
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == tested


@pytest.mark.parametrize("name, value, factor", [
    ("sft.py", "loss", 0.7), ("distillation.py", "student .* loss", 0.5), ("policy_loss.py", "reward", 2.0),
])  # fmt: skip
def test_it_learns(name, value, factor):
    pytest.importorskip("transformers")
    found = [float(number) for number in re.findall(rf"{value} (-?[\d.]+)", run(name))]
    assert len(found) == 4
    assert found[-1] < factor * found[0] if factor < 1 else found[-1] > factor * found[0]


def test_trl():
    pytest.importorskip("trl")
    printed = run("trl_grpo.py")
    assert "-> onepass.integrations.trl." in printed and re.search(r"reward 0\.\d+ after 5 steps", printed)


def test_tensor_parallel():
    """The losses of two processes are those of one."""
    pytest.importorskip("transformers")
    both = [run("tensor_parallel.py"), run("tensor_parallel.py", "-m", "torch.distributed.run", "--nproc-per-node", "2",
                                           "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")]  # fmt: skip
    alone, sharded = ([float(number) for number in re.findall(r"loss ([\d.]+)", printed)] for printed in both)
    assert len(alone) == 4 and alone[-1] < 0.8 * alone[0]
    assert sharded == pytest.approx(alone, rel=1e-4) and "66 of 131" in both[1]
