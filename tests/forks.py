"""A process that has imported other libraries, which takes many seconds, and forks one for each call.

What is run in it finds a Python that has just been started but for these imports. onepass is not one of them.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import onepass

GROUP = pytest.mark.xdist_group("forks")  # one worker has the process
LIBRARIES = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.trainer",
    "transformers.loss.loss_utils", "transformers.models.llama.modeling_llama", "peft",
)  # fmt: skip
FORKS = """
import contextlib, gc, importlib, json, os, signal, sys, warnings
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.collect()
gc.freeze()  # else each looks through all of torch when it ends
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["environment"])
        for descriptor, file in enumerate(call["files"]):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
        sys.argv[1:], sys.path[0] = call["arguments"], call["path"]
        warnings._processoptions(call["warnings"])  # as those of the command line
        signal.alarm(call["timeout"])
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
names = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(call["code"], "<string>", "exec"), names)
"""


@cache
def process() -> "subprocess.Popen[str]":
    """Ends with this one, whose pipe it reads."""
    left = {n: v for n, v in os.environ.items() if n not in ("ONEPASS_PATCH", "TRITON_INTERPRET")}
    environment = left | {"PYTHONPATH": str(Path(onepass.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", FORKS, *LIBRARIES]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    code: str, *arguments: object, folder: Path, environment: Mapping[str, str] = os.environ, path: object = "",
    warnings: tuple[str, ...] = (), stdin: str = "", timeout: int = 400,
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run some code as ``python -c`` does. ``path`` is where it looks for modules first."""
    files = [folder / f".{name}-{os.getpid()}" for name in ("stdin", "stdout", "stderr")]
    files[0].write_text(stdin)
    call = dict(
        code=code, arguments=list(map(str, arguments)), folder=str(folder), environment=dict(environment),
        files=list(map(str, files)), path=str(path), warnings=warnings, timeout=timeout,
    )  # fmt: skip
    print(json.dumps(call), file=process().stdin, flush=True)
    answer = process().stdout
    assert answer is not None
    returned = int(answer.readline())
    _, out, err = (file.read_text() for file in files)
    for file in files:
        file.unlink()
    return subprocess.CompletedProcess(arguments, returned, out, err)


def run_file(file: Path, folder: Path, *arguments: object, **options: Any) -> tuple[int, str]:
    """Run a file with the folder and the arguments: its exit code, and what it printed."""
    code = f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"
    done = run(code, folder, *arguments, folder=folder, path=file.parent, **options)
    return done.returncode, done.stdout + done.stderr


SPAWN = """
import gc, os, pickle, signal, sys, traceback
sys.path[:0] = sys.argv[1:]
function, arguments, processes = pickle.loads(bytes.fromhex(sys.stdin.read()))
gc.freeze()
children = []
for rank in range(processes):
    children.append(os.fork())
    if not children[-1]:
        try:
            function(rank, *arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
while children:
    child, status = os.wait()
    children.remove(child)
    if status:  # others may wait for it
        for other in children:
            os.kill(other, signal.SIGKILL)
        sys.exit(1)
"""


def spawn(function: Any, arguments: tuple[Any, ...], processes: int) -> None:
    """As that of torch, from the process that has imported the libraries, and without ``TRITON_INTERPRET``."""
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        given = pickle.dumps((function, arguments, processes)).hex()
        done = run(SPAWN, tests, tests.parent, folder=Path(folder), environment=environment, stdin=given)
    assert not done.returncode, done.stderr
