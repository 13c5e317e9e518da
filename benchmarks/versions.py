"""`python -m benchmarks versions`: two versions of onepass on one GPU, and whether any operation has become slower.

**Many rows**: the time of the device, between events, with a cold cache and the host ahead. Two processes, one for each
version, prepare an operation on the same inputs and measure it in turns, in an order that is swapped from round to
round. Only one of them measures at a time. The ratio of the times is taken in each round; the result is the median.

**Few rows**: the wall time, from the call until the device is idle, which is what a user waits for. It depends on the
process and on what else the host does by more than on the version. So several pairs of processes are started, one of
each version, all on the same two cores. Both take many short timings in turns, and the least counts. The result is the
ratio of the least times of all processes, since other work on the host only ever adds time; the spread is that of the
ratios of the pairs.

A ratio above its bound, or an operation that fails in this version, makes the exit status 1. An operation that fails in
the baseline alone is only reported. ``--tiny`` runs small shapes, on a CPU too. Its times have no meaning, and do not
change the exit status.
"""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness import Out, check_choices, new_console, now, write
from benchmarks.versions_operations import BOTH, DEVICE, FORWARD, OPERATIONS, WALL
from benchmarks.versions_processes import CHECKOUT, Failure, Version, ask
from onepass.cli.environment import environment, output_of

BOUNDS = {FORWARD: 1.01, BOTH: 1.01, WALL: 1.03}
SWEEPS = 10
NAMES = [operation.name for operation in OPERATIONS]
Case = dict[str, Any]  # what a process is asked to prepare


def versions(
    baseline: Annotated[Path, typer.Option(help="A checkout of the other version.", exists=True, file_okay=False)],
    out: Out = Path(".bench"),
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}; repeatable. Default: all.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each version; 7, with --tiny 2.", min=1)] = None,
    pairs: Annotated[
        int | None, typer.Option(help="Processes of each version, for few rows; 5, with --tiny 1.", min=1)
    ] = None,
    names: Annotated[tuple[str, str] | None, typer.Option(help="Of both versions, instead of their commits.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small shapes, to see whether everything runs.")] = False,
) -> None:
    """Compare the speed of this version with that of another on one GPU; write a table and a JSON."""
    check_choices((op, NAMES))
    if not (baseline / "src" / "onepass").is_dir():
        raise typer.BadParameter(f"expected a checkout of another version, got {baseline}", param_hint="--baseline")
    if DEVICE.type == "cpu" and not tiny:
        raise typer.BadParameter("there is no GPU, and a CPU runs --tiny alone")
    new, old = names or (os.environ.get("ONEPASS_COMMIT") or name_of(CHECKOUT), name_of(baseline))
    rounds, pairs = rounds or (2 if tiny else 7), pairs or (1 if tiny else 5)
    report: dict[str, Any] = {"date": now(), "environment": environment(), "new": new, "old": old, "rounds": rounds}
    report |= {"pairs": pairs, "tiny": tiny, "results": [], "sources": {}, "failed": []}
    both = [Version("new", CHECKOUT), Version("old", baseline)]
    console = new_console()
    compare_many_rows(both, cases_of(op or NAMES, tiny, few=False), rounds, report, out / "versions.json", console)
    compare_few_rows(both, cases_of(op or NAMES, tiny, few=True), pairs, report, console)
    write(report, out / "versions.json")
    console.print(table(report))
    for f in report["failed"]:
        console.print(f"failed: {f['operation']} {'x'.join(map(str, f['shape']))}: {f['errors']}", highlight=False)
    above, failed = sum(r["above"] for r in report["results"]), len(report["failed"])
    console.print(f"{above} of {len(report['results'])} above their bound, {failed} failed", highlight=False)
    if (above and not tiny) or any("new" in f["errors"] for f in report["failed"]):
        raise typer.Exit(1)


def cases_of(chosen: Sequence[str], tiny: bool, few: bool) -> list[Case]:
    cases = []
    for index, operation in enumerate(OPERATIONS):
        passes, shapes = ([WALL], operation.few) if few else (operation.passes, operation.shapes)
        for shape in shapes if operation.name in chosen else ():
            small = [max(1, n // by) for n, by in zip(shape, operation.tiny)]
            cases.append({"index": index, "shape": small if tiny else list(shape), "passes": list(passes)})
    return cases


def compare_many_rows(
    both: Sequence[Version], cases: list[Case], rounds: int, report: dict[str, Any], path: Path, console: Console
) -> None:
    for version in both if cases else ():
        version.start()
    try:
        for case in track(cases, "many rows", console=console, transient=True):
            try:
                compare(both, case, rounds, report)
            except Failure as failure:
                report["failed"].append(about(case) | {"errors": failure.args[0]})
                for version in both:  # an error of CUDA stays in its process
                    version.restart()
            write(report, path)  # after every case, in case that a later one fails
    finally:
        for version in both if cases else ():
            version.stop()


def compare(both: Sequence[Version], case: Case, rounds: int, report: dict[str, Any]) -> None:
    """The times of the passes of an operation, by round."""
    milliseconds = 1 if report["tiny"] else 60  # of one measurement
    estimates = ask(both, "prepare", **case)
    for name in case["passes"]:
        host, wall = (min(e[name][i] for e in estimates) for i in range(2))
        flushes = 0 if DEVICE.type == "cpu" else min(32, 1 + int(host / 0.04))  # twice as long as the host takes
        repeats = min(200, max(2, int(milliseconds / (wall + 0.1 * flushes))))
        times: list[list[float]] = [[], []]
        # The clocks change while a long operation runs, so that it takes more turns, and shorter ones.
        for turn in range(3 * rounds if wall > 10 else rounds):
            for who in order_of(turn):
                times[who] += ask([both[who]], "measure", name=name, repeats=repeats, flushes=flushes)
        ratios = [new / old for new, old in zip(*times)]
        report["results"].append(record(case, name, times, statistics.median(ratios), ratios))
    note_sources(both[0], case, case["passes"], report)
    ask(both, "free")


def compare_few_rows(
    both: Sequence[Version], cases: list[Case], pairs: int, report: dict[str, Any], console: Console
) -> None:
    times: list[list[list[float]]] = [[[], []] for _ in cases]
    failed: dict[int, dict[str, str]] = {}
    for pair in track(range(pairs if cases else 0), "few rows", console=console, transient=True):
        found = None
        while found is None:  # once more without an operation that failed
            rest = {n: case for n, case in enumerate(cases) if n not in failed}
            for version in both:
                version.start(cores=2)
            try:
                found = time_in_processes(both, rest, failed, report, with_sources=pair == 0)
            finally:
                for version in both:
                    version.stop()
        for n, least in found.items():
            for who in range(2):
                times[n][who].append(least[who])
    for n, case in enumerate(cases):
        if n in failed:
            report["failed"].append(about(case) | {"errors": failed[n]})
        else:
            new, old = times[n]
            ratio = min(new) / min(old)
            report["results"].append(record(case, WALL, times[n], ratio, [a / b for a, b in zip(new, old)]))


def time_in_processes(
    both: Sequence[Version], cases: dict[int, Case], failed: dict[int, dict[str, str]], report: dict[str, Any],
    with_sources: bool,
) -> dict[int, list[float]] | None:  # fmt: skip
    """The least wall times of each of the cases in two processes that run; None if one failed and is in ``failed``.

    The versions take short turns in several sweeps. A disturbance of the host then lasts for both, and not for all
    timings of a case.
    """
    sweeps, seconds, calls = (1, 0.0, 3) if report["tiny"] else (SWEEPS, 0.04, 20)
    least: dict[int, list[float]] = {}
    for sweep in range(sweeps):
        for n, case in cases.items():
            name = f"{n} {WALL}"
            try:
                if sweep == 0:
                    ask(both, "prepare", **case, prefix=f"{n} ")
                    if with_sources:
                        note_sources(both[0], case, [name], report)
                for who in order_of(sweep):
                    [milliseconds] = ask([both[who]], "wall", name=name, seconds=seconds, calls=calls)
                    of_case = least.setdefault(n, [milliseconds] * 2)
                    of_case[who] = milliseconds if sweep == 0 else min(milliseconds, of_case[who])
            except Failure as failure:
                failed[n] = failure.args[0]
                return None
    return least


def order_of(turn: int) -> tuple[int, int]:
    return (0, 1) if turn % 2 == 0 else (1, 0)


def record(case: Case, name: str, times: list[list[float]], ratio: float, ratios: list[float]) -> dict[str, Any]:
    return about(case) | {
        "pass": name, "new_ms": times[0], "old_ms": times[1], "ratio": ratio, "least": min(ratios),
        "most": max(ratios), "bound": BOUNDS[name], "above": ratio > BOUNDS[name],
    }  # fmt: skip


def about(case: Case) -> dict[str, Any]:
    return {"operation": OPERATIONS[case["index"]].name, "shape": case["shape"]}


def note_sources(new: Version, case: Case, names: list[str], report: dict[str, Any]) -> None:
    [found] = ask([new], "sources", names=names)
    name = OPERATIONS[case["index"]].name
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
        of = min if r["pass"] == WALL else statistics.median
        times = (f"{of(r[key]):.4f}" for key in ("old_ms", "new_ms"))
        ratios = (f"{r[key]:.4f}" for key in ("ratio", "least", "most"))
        head = r["operation"], "x".join(map(str, r["shape"])), r["pass"]
        found.add_row(*head, *times, *ratios, f"{r['bound']:.2f}", "above" if r["above"] else "")
    return found
