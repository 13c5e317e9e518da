"""The processes of `versions.py`: one for each version, and the pipes to it."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]  # whose benchmarks measure both versions
SECONDS_TO_ANSWER = 300


class Failure(Exception):
    """What went wrong, by version."""


class Version:
    """A version of onepass, and the process that measures it while it is running.

    Args:
        role: ``"new"`` or ``"old"``.
        checkout: the folder with the version's ``src``.
    """

    process: "subprocess.Popen[str]"

    def __init__(self, role: str, checkout: Path) -> None:
        self.role, self.source = role, checkout.resolve() / "src"

    def start(self, cores: int | None = None) -> None:
        """Start the process, on the first ``cores`` cores if that is given."""
        pin = [] if cores is None else [str(cores)]
        path = os.pathsep.join(filter(None, [str(self.source), os.environ.get("PYTHONPATH")]))
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.versions_worker", str(write), *pin], text=True,
            pass_fds=[write], stdin=subprocess.PIPE, stdout=2, cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        os.close(write)
        self.replies = os.fdopen(read)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.replies.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def send(self, **request: Any) -> None:
        with suppress(BrokenPipeError):  # `receive` tells
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        if not select.select([self.replies], [], [], SECONDS_TO_ANSWER)[0]:
            return {"error": f"no answer in {SECONDS_TO_ANSWER} s"}
        line = self.replies.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended: {self.process.wait()}"}
        return answer


def ask(versions: Sequence[Version], do: str, **request: Any) -> list[Any]:
    """Send a request to all of the versions at once and return their answers.

    Raises:
        Failure: at least one of them failed.
    """
    for version in versions:
        version.send(do=do, **request)
    answers = [version.receive() for version in versions]
    if errors := {v.role: a["error"] for v, a in zip(versions, answers) if "error" in a}:
        raise Failure(errors)
    for version, answer in zip(versions, answers):
        if version.source not in Path(answer["file"]).resolve().parents:
            sys.exit(f"{answer['file']} was imported, not the onepass of {version.source}")
    return [answer["result"] for answer in answers]
