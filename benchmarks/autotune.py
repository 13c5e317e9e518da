"""A first step with other libraries' autotuned kernels and ours, tuned, and again in a process that knows the choices.

    python benchmarks/autotune.py --out FOLDER

The first process tunes within a session, which keeps its choices in FOLDER/tuned.json; they are exported; the second
process begins a session on the export. Counts how often Triton's benchmarker is called, and times steps without the
libraries' imports. (What the first process compiled is in Triton's cache on disk, as it is for any second process.)
Needs a GPU, and Liger or flash-linear-attention. Writes FOLDER/autotune.json and prints a table.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

import onepass
from onepass import autotune
from onepass.cli.environment import environment, package_version

Step = Callable[[], torch.Tensor]
ROWS, HIDDEN, VOCAB, WIDTH = 4096, 2048, 32000, 128


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def liger() -> Step:
    from liger_kernel.ops.dyt import LigerDyTFunction

    return lambda: LigerDyTFunction.apply(random(ROWS, HIDDEN), random(1), random(HIDDEN), random(HIDDEN))


def flash_linear_attention() -> Step:
    from fla.modules.norm.l2norm import l2norm
    from fla.ops.utils.logsumexp import logsumexp_fwd

    def step() -> torch.Tensor:
        x = random(ROWS, HIDDEN)
        logsumexp_fwd(x.detach())
        heads = l2norm(x).view(ROWS, -1, WIDTH)  # other kernels than for whole rows
        return l2norm(heads)

    return step


def ours() -> Step:
    target = torch.zeros(ROWS, dtype=torch.long, device="cuda")
    return lambda: onepass.cross_entropy(random(ROWS, VOCAB), target)


LIBRARIES: dict[str, Callable[[], Step]] = {
    "liger-kernel": liger, "fla-core": flash_linear_attention, "onepass": ours,
}  # fmt: skip


def counted(calls: list[Any]) -> property:
    """Instead of `Autotuner.do_bench`: the same, and says that it was called."""

    def do_bench(tuner: Any) -> Callable[..., Any]:
        calls.append(tuner.base_fn.__name__)
        benchmark: Callable[..., Any] = tuner._do_bench or driver.active.get_benchmarker()
        return benchmark

    return property(do_bench)


def one_process(store: Path) -> dict[str, Any]:
    calls: list[str] = []
    Autotuner.do_bench = counted(calls)
    random(16, 16).sum().backward()
    seconds = {}
    with autotune.session(store) as kept:
        for name, load in LIBRARIES.items():
            if package_version(name) is None and name != "onepass":
                continue
            forward = load()
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = forward()
            out.backward(torch.ones_like(out))
            torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - start
    records = autotune.collect()
    kernels = {r.kernel for r in records}
    return {"seconds": seconds, "benchmarked": len(calls), "kernels": sorted(kernels), "records": len(kept)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".bench"))
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)  # of a process that this one starts
    given = parser.parse_args()
    if given.store is not None:
        print(json.dumps(one_process(given.store)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    tuned, exported = given.out / "tuned.json", given.out / "exported.json"
    for path in (tuned, exported):
        path.unlink(missing_ok=True)
    found = {}
    for process, store in (("tunes", tuned), ("knows", exported)):
        if process == "knows":
            command = ["-m", "onepass", "autotune", "export", str(tuned), "--out", str(exported)]
            subprocess.run([sys.executable, *command], check=True)
        child = [sys.executable, __file__, "--store", str(store)]
        found[process] = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    versions = {name: package_version(name) for name in LIBRARIES if name != "onepass"}
    report = {"environment": environment() | versions, "results": found}
    (given.out / "autotune.json").write_text(json.dumps(report, indent=1) + "\n")
    table = Table(
        "process", "candidates benchmarked", *[f"first step of {name}, s" for name in found["tunes"]["seconds"]]
    )
    for process, of in found.items():
        table.add_row(process, str(of["benchmarked"]), *[f"{s:.2f}" for s in of["seconds"].values()])
    Console().print(table)
    Console().print(f"{len(found['tunes']['kernels'])} kernels, {found['tunes']['records']} keys")


if __name__ == "__main__":
    main()
