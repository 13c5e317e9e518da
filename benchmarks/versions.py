"""`python -m benchmarks versions`: two versions of onepass on one GPU, and whether any operation has become slower.

One process imports both versions, the baseline as a copy in which the package has another name, and lets them take
turns on the same inputs.

**Many rows**: the time of the device, between events, with a cold cache and the host ahead. The turns change from call
to call. The ratio of the medians is taken in each round; the result is the median of the rounds.

**Few rows**: the wall time, from the call until the device is idle, which is what a user waits for. It depends on how a
process lies in memory, so that several processes are started, one after the other. In each, the least of many timings
counts, since other work on the host only ever adds time. The result is the median of the ratios of the processes.

A ratio above its bound, or an operation that fails in this version, makes the exit status 1. An operation that fails in
the baseline alone is only reported. ``--tiny`` runs small shapes, on a CPU too. Its times have no meaning, and do not
change the exit status.
"""

import os
import re
import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import versions_operations
from benchmarks.harness import Out, check_choices, new_console, now, write
from benchmarks.versions_operations import BASELINE, BOTH, FORWARD, OPERATIONS, WALL
from benchmarks.workers import Failure, Worker
from onepass.cli.environment import environment, output_of

CHECKOUT = Path(__file__).resolve().parents[1]
BOUNDS = {FORWARD: 1.01, BOTH: 1.01, WALL: 1.03}
SWEEPS = 20  # turns of each version in a process, for few rows
NAMES = [operation.name for operation in OPERATIONS]
Case = dict[str, Any]  # of which a process is asked


def versions(
    baseline: Annotated[Path, typer.Option(help="A checkout of the other version.", exists=True, file_okay=False)],
    out: Out = Path(".bench"),
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; repeatable. Default: all.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Of many rows; 7, with --tiny 2.", min=1)] = None,
    processes: Annotated[int | None, typer.Option(help="For few rows; 7, with --tiny 1.", min=1)] = None,
    names: Annotated[tuple[str, str] | None, typer.Option(help="Of both versions, instead of their commits.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes, to see whether everything runs.")] = False,
) -> None:
    """Compare the speed of this version with that of another on one GPU; write a table and a JSON."""
    check_choices((op, NAMES))
    if not (baseline / "src" / "onepass").is_dir():
        raise typer.BadParameter(f"expected a checkout of another version, got {baseline}", param_hint="--baseline")
    if versions_operations.DEVICE.type == "cpu" and not tiny:
        raise typer.BadParameter("there is no GPU, and a CPU runs --tiny alone")
    new, old = names or (os.environ.get("ONEPASS_COMMIT") or name_of(CHECKOUT), name_of(baseline))
    rounds, processes = rounds or (2 if tiny else 7), processes or (1 if tiny else 7)
    report: dict[str, Any] = {"date": now(), "environment": environment(), "new": new, "old": old, "rounds": rounds}
    report |= {"processes": processes, "tiny": tiny, "results": [], "sources": {}, "failed": []}
    console, path = new_console(), out / "versions.json"
    with renamed(baseline) as folder:
        compare_few_rows(folder, cases_of(op or NAMES, tiny, few=True), report, console)
        compare_many_rows(folder, cases_of(op or NAMES, tiny, few=False), report, path, console)
    write(report, path)
    console.print(table(report))
    for f in report["failed"]:
        console.print(f"failed: {f['operation']} {'x'.join(map(str, f['shape']))}: {f['errors']}", highlight=False)
    above, failed = sum(r["above"] for r in report["results"]), len(report["failed"])
    console.print(f"{above} of {len(report['results'])} above their bound, {failed} failed", highlight=False)
    if (above and not tiny) or any("new" in f["errors"] for f in report["failed"]):
        raise typer.Exit(1)


@contextmanager
def renamed(baseline: Path) -> Iterator[Path]:
    """A folder with the baseline's package under another name, and with the operations that call it."""
    with TemporaryDirectory() as folder:
        package = Path(folder) / BASELINE
        shutil.copytree(baseline / "src" / "onepass", package, ignore=shutil.ignore_patterns("__pycache__"))
        operations = Path(folder) / f"{BASELINE}_operations.py"
        shutil.copy(str(versions_operations.__file__), operations)
        for path in [operations, *package.rglob("*.py"), *package.rglob("*.json")]:
            path.write_text(re.sub(r"\bonepass\b", BASELINE, path.read_text()))
        yield Path(folder)


def start(folder: Path, *arguments: str) -> Worker:
    path = os.pathsep.join(filter(None, [str(CHECKOUT / "src"), str(folder), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), path])}
    return Worker("benchmarks.versions_worker", *arguments, environment=environment)


def cases_of(chosen: Sequence[str], tiny: bool, few: bool) -> list[Case]:
    cases = []
    for index, operation in enumerate(OPERATIONS):
        passes, shapes = ([WALL], operation.few) if few else (operation.passes, operation.shapes)
        for shape in shapes if operation.name in chosen else ():
            small = [max(1, n // by) for n, by in zip(shape, operation.tiny)]
            cases.append({"index": index, "shape": small if tiny else list(shape), "passes": list(passes)})
    return cases


def compare_many_rows(folder: Path, cases: list[Case], report: dict[str, Any], path: Path, console: Console) -> None:
    worker = start(folder)
    try:
        for case in track(cases, "many rows", console=console, transient=True):
            try:
                found = times_of(worker, case, report, report["rounds"])
                note_sources(worker, case, report)
            except Failure as failure:
                report["failed"].append(about(case) | {"errors": failure.args[0]})
                worker.stop()  # an error of CUDA stays in its process
                worker = start(folder)
            else:
                for name, times in found.items():
                    ratios = [new / old for new, old in zip(times["new_ms"], times["old_ms"])]
                    report["results"].append(record(case, name, times, ratios))
            write(report, path)  # after every case, in case that a later one fails
    finally:
        worker.stop()


def compare_few_rows(folder: Path, cases: list[Case], report: dict[str, Any], console: Console) -> None:
    least: list[dict[str, list[float]]] = [{"new_ms": [], "old_ms": []} for _ in cases]
    failed: dict[int, dict[str, str]] = {}
    for process in track(range(report["processes"] if cases else 0), "few rows", console=console, transient=True):
        worker = start(folder, "2")
        try:
            for n, case in enumerate(cases):
                if n in failed:
                    continue
                try:
                    times = times_of(worker, case, report, 1 if report["tiny"] else SWEEPS)[WALL]
                    if process == 0:
                        note_sources(worker, case, report)
                except Failure as failure:
                    failed[n] = failure.args[0]
                    worker.stop()
                    worker = start(folder, "2")
                else:
                    for version, of_version in times.items():
                        least[n][version].append(min(of_version))
        finally:
            worker.stop()
    for n, case in enumerate(cases):
        if n in failed:
            report["failed"].append(about(case) | {"errors": failed[n]})
        else:
            ratios = [new / old for new, old in zip(least[n]["new_ms"], least[n]["old_ms"])]
            report["results"].append(record(case, WALL, least[n], ratios))


def times_of(worker: Worker, case: Case, report: dict[str, Any], rounds: int) -> dict[str, dict[str, list[float]]]:
    """The times of both versions by pass.

    Raises:
        Failure: with the errors by version.
    """
    found = asked(worker, "compare", **case, rounds=rounds, tiny=report["tiny"])
    if "errors" in found:
        raise Failure(found["errors"])
    return found


def asked(worker: Worker, do: str, **request: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = worker.ask(do, **request)
        return found
    except Failure as failure:
        raise Failure({"new": f"or the baseline: {failure}"}) from None


def record(case: Case, name: str, times: dict[str, list[float]], ratios: list[float]) -> dict[str, Any]:
    ratio = statistics.median(ratios)
    return about(case) | times | {
        "pass": name, "ratio": ratio, "least": min(ratios), "most": max(ratios), "bound": BOUNDS[name],
        "above": ratio > BOUNDS[name],
    }  # fmt: skip


def about(case: Case) -> dict[str, Any]:
    return {"operation": OPERATIONS[case["index"]].name, "shape": case["shape"]}


def note_sources(worker: Worker, case: Case, report: dict[str, Any]) -> None:
    name = OPERATIONS[case["index"]].name
    found = asked(worker, "sources", **case)
    report["sources"][name] = dict(sorted((report["sources"].get(name, {}) | found).items()))


def name_of(checkout: Path) -> str:
    """The commit of a checkout, with a ``+`` if it was changed; the name of a folder that is not a checkout."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    return ((checkout / ".git").exists() and output_of(*command)) or checkout.resolve().name


def table(report: dict[str, Any]) -> Table:
    """The results, the largest ratio last."""
    new, old = report["new"], report["old"]
    columns = ["operation", "shape", "pass", f"{old}, ms", f"{new}, ms", "ratio", "least", "most", "bound", ""]
    found = Table(*columns, title=f"{new} against {old}", title_justify="left")
    for column in found.columns[3:-1]:
        column.justify = "right"
    for r in sorted(report["results"], key=lambda r: r["ratio"]):
        times = (f"{statistics.median(r[key]):.4f}" for key in ("old_ms", "new_ms"))
        ratios = (f"{r[key]:.4f}" for key in ("ratio", "least", "most"))
        head = r["operation"], "x".join(map(str, r["shape"])), r["pass"]
        found.add_row(*head, *times, *ratios, f"{r['bound']:.2f}", "above" if r["above"] else "")
    return found
