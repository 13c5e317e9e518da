"""Processes that measure for a benchmark, and answer its requests over pipes.

Requests are lines of JSON on stdin. The answers go to a pipe of their own, because libraries may print.
"""

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SECONDS_TO_ANSWER = 300


class Failure(Exception):
    """What went wrong in a worker."""


class Worker:
    """A running process.

    Args:
        module: the module that it runs; it calls `serve`.
        arguments: of the module.
        environment: variables besides those of this process.
    """

    def __init__(self, module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, str(write), *arguments], text=True, pass_fds=[write],
            stdin=subprocess.PIPE, stdout=2, env=os.environ | (environment or {}),
        )  # fmt: skip
        os.close(write)
        self.replies = os.fdopen(read)

    def ask(self, do: str, **request: Any) -> Any:
        """The answer to a request.

        Raises:
            Failure: the request failed, or the process has ended or does not answer.
        """
        with suppress(BrokenPipeError):  # the answer tells
            print(json.dumps({"do": do, **request}), file=self.process.stdin, flush=True)
        if not select.select([self.replies], [], [], SECONDS_TO_ANSWER)[0]:
            raise Failure(f"no answer in {SECONDS_TO_ANSWER} s")
        line = self.replies.readline()
        answer = json.loads(line) if line else {"error": f"the process ended: {self.process.wait()}"}
        if "error" in answer:
            raise Failure(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.replies.close()


def serve(replies: int, answer_to: Callable[[dict[str, Any]], Any]) -> None:
    """Answer requests until stdin ends. An error is an answer too, after which the next request is read."""
    with os.fdopen(replies, "w") as channel:
        for line in sys.stdin:
            try:
                answer = {"result": answer_to(json.loads(line))}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:300]}
            print(json.dumps(answer), file=channel, flush=True)
