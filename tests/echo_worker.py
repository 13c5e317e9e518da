"""A worker of `benchmarks.workers` for test_benchmark_versions.py."""

import os
import sys

from benchmarks.workers import serve


def answer_to(request):
    match request["do"]:
        case "echo":
            return request["value"]
        case "exit":
            os._exit(3)
    raise KeyError(request["do"])


if __name__ == "__main__":
    serve(int(sys.argv[1]), answer_to)
