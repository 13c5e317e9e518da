"""`python -m benchmarks autotune`: a first step with the autotuned kernels of other libraries and of onepass, once with
tuning, and once in a process that knows the choices.

The first process tunes within a session, which keeps its choices in ``tuned.json``. They are exported, and the second
process begins a session on the export. What is counted is how often Triton's benchmarker is called; what is timed are
steps, without the imports of the libraries. (What the first process compiled is in Triton's cache on disk, as it is for
any second process.)
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

import onepass
from benchmarks.harness import Out, new_console, now, write
from onepass import autotune as tuning
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
    """A replacement for `Autotuner.do_bench` that does the same and notes every call."""

    def do_bench(tuner: Any) -> Callable[..., Any]:
        calls.append(tuner.base_fn.__name__)
        benchmark: Callable[..., Any] = tuner._do_bench or driver.active.get_benchmarker()
        return benchmark

    return property(do_bench)


def one_process(store: Path) -> dict[str, Any]:
    calls: list[str] = []
    Autotuner.do_bench = counted(calls)
    random(16, 16).sum().backward()
    libraries = {
        name: load for name, load in LIBRARIES.items() if package_version(name) is not None or name == "onepass"
    }
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}

    def run(name: str) -> None:
        out = steps[name]()
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()

    def in_session(names: Collection[str]) -> int:
        with tuning.session(store) as kept:
            for name in names:
                if name not in steps:  # a session also reaches kernels that are imported after it began
                    steps[name] = libraries[name]()
                torch.cuda.synchronize()
                start = time.perf_counter()
                run(name)
                seconds.setdefault(name, time.perf_counter() - start)
        return len(kept)

    found = in_session(libraries)
    kernels = sorted({r.kernel for r in tuning.collect()})
    benchmarked = len(calls)
    from benchmarks.sources import sources_of  # only now, since it imports kernels of onepass

    sources = sources_of(lambda: in_session(["onepass"]))
    return {"seconds": seconds, "benchmarked": benchmarked, "kernels": kernels, "records": found, "sources": sources}


def autotune(out: Out = Path(".bench")) -> None:
    """Time a first step with and without tuning; write a table and a JSON. Needs a GPU, and Liger or fla."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("expected a GPU")
    out.mkdir(parents=True, exist_ok=True)
    tuned, exported = out / "tuned.json", out / "exported.json"
    for path in (tuned, exported):
        path.unlink(missing_ok=True)
    found: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for process, store in (("tunes", tuned), ("knows", exported)):
        if process == "knows":
            command = ["-m", "onepass", "autotune", "export", str(tuned), "--out", str(exported)]
            subprocess.run([sys.executable, *command], check=True)
        child = [sys.executable, "-m", "benchmarks.autotune", str(store)]
        output = subprocess.run(child, check=True, stdout=subprocess.PIPE).stdout
        found[process] = json.loads(output.splitlines()[-1])
        sources |= found[process].pop("sources")
    versions = {name: package_version(name) for name in LIBRARIES if name != "onepass"}
    report = {"date": now(), "environment": environment() | versions, "results": found}
    write(report | {"sources": {"autotune": dict(sorted(sources.items()))}}, out / "autotune.json")
    table = Table(
        "process", "candidates benchmarked", *[f"first step of {name}, s" for name in found["tunes"]["seconds"]]
    )
    for process, of in found.items():
        table.add_row(process, str(of["benchmarked"]), *[f"{s:.2f}" for s in of["seconds"].values()])
    console = new_console()
    console.print(table)
    console.print(f"{len(found['tunes']['kernels'])} kernels, {found['tunes']['records']} keys")


if __name__ == "__main__":
    print(json.dumps(one_process(Path(sys.argv[1]))))
