"""The examples, as a user runs them."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import forks
import onepass

EXAMPLES = Path(__file__).parents[1] / "examples"
OF_ONE_PROCESS = "sft.py", "distillation.py", "policy_loss.py", "preference_losses.py", "tensor_parallel.py"
OF_TRL = "trl_grpo.py", "trl_grpo_parity.py", "trl_grpo_replay.py"
ALL_OF_THEM = """
import runpy, sys
paths, sys.argv[1:] = sys.argv[1:], []
sys.path.insert(0, paths[0].rpartition("/")[0])
for path in paths:
    print("example", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""
# As torchrun does, in processes that need not import the libraries again.
OF_TWO = """
import os, runpy, socket, sys
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = str(free.getsockname()[1])
os.environ |= {"TORCHELASTIC_RUN_ID": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
other = os.fork()
os.environ["RANK"] = "0" if other else "1"
runpy.run_path(sys.argv[1], run_name="__main__")
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def environment():
    left = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    return left | {"PYTHONPATH": str(Path(onepass.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}


def output_of(script):
    assert script.returncode == 0, script.stderr
    return script.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each example prints, all run by one process."""
    pytest.importorskip("transformers")
    names = [*OF_ONE_PROCESS, *OF_TRL * (find_spec("trl") is not None)]
    paths, folder = [EXAMPLES / name for name in names], tmp_path_factory.mktemp("examples")
    script = forks.run(ALL_OF_THEM, *paths, folder=folder, environment=environment())
    parts = output_of(script).split("example ")[1:]
    return {Path(path).name: text for path, _, text in (part.partition("\n") for part in parts)}


def test_there_is_a_test_for_each():
    assert {path.name for path in EXAMPLES.iterdir() if path.suffix == ".py"} == {*OF_ONE_PROCESS, *OF_TRL}


@forks.GROUP
@pytest.mark.parametrize("name, value, factor", [
    ("sft.py", "loss", 0.7), ("distillation.py", "student .* loss", 0.5), ("policy_loss.py", "reward", 2.0),
    ("preference_losses.py", "loss", 0.7),
])  # fmt: skip
def test_it_learns(printed, name, value, factor):
    found = [float(number) for number in re.findall(rf"{value} (-?[\d.]+)", printed[name])]
    assert len(found) == 4
    assert found[-1] < factor * found[0] if factor < 1 else found[-1] > factor * found[0]


@forks.GROUP
def test_trl(printed):
    pytest.importorskip("trl")
    text = printed["trl_grpo.py"]
    assert "-> onepass.integrations.trl." in text and re.search(r"reward 0\.\d+ after 5 steps", text)


@forks.GROUP
def test_trl_with_the_samplers_options(printed):
    """The ratios of fresh samples are nearer to 1 with each of the sampler's options, and with all of them tenfold."""
    pytest.importorskip("trl")
    found = re.findall(r"step \d, (.*): mean \|ratio - 1\| (\S+), KL", printed["trl_grpo_parity.py"])
    own, kept, exact = ([float(error) for of, error in found if of == name] for name in dict(found))
    assert len(own) == len(kept) == len(exact) == 5
    assert all(e < 0.1 * o for e, o in zip(exact, own))
    assert sum(exact) < 0.6 * sum(kept) < 0.6 * sum(own)


@forks.GROUP
def test_trl_with_the_samplers_experts(printed):
    """The weights are the same and the experts are not: replayed, the ratios are 1 up to the arithmetic."""
    pytest.importorskip("trl")
    text = printed["trl_grpo_replay.py"]
    own, replayed = ([float(error) for error in re.findall(rf"{of} experts: mean \|ratio - 1\| (\S+)", text)]
                     for of in ("own", "replayed"))  # fmt: skip
    changed = [int(n) for n in re.findall(r"(\d+) of \d+ choices differ", text)]
    assert len(own) == len(replayed) == len(changed) == 3 and min(changed) > 0
    assert all(r < 5e-6 < 5e-4 < o for r, o in zip(replayed, own))


@forks.GROUP
def test_tensor_parallel(printed, tmp_path):
    """The losses of two processes are those of one."""
    example = EXAMPLES / "tensor_parallel.py"
    both = output_of(forks.run(OF_TWO, example, folder=tmp_path, environment=environment()))
    alone, sharded = ([float(number) for number in re.findall(r"loss ([\d.]+)", text)]
                      for text in (printed["tensor_parallel.py"], both))  # fmt: skip
    assert len(alone) == 4 and alone[-1] < 0.8 * alone[0]
    assert sharded == pytest.approx(alone, rel=1e-4) and "66 of 131" in both
