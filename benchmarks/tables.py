"""The tables of results: one function for the results of each benchmark, which `benchmarks.table` puts into pages."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.implementations import OF_TORCH
from benchmarks.sources import staleness

Report = dict[str, Any]
Reports = dict[Path, Report]
HEADS = """\
From hidden states (`linear_*`), forward and backward (`_forward`: alone), against the GEMMs that each requires, over
all rows, one cuBLAS call each; "extra GiB" is the peak beyond inputs and gradients.

"""

ON_CPU = """\
The losses of `onepass demo` in turns, one call each. "torch" upcasts bfloat16 logits, as transformers does; "torch,
rounded" leaves them as they are, and rounds each log-probability and the loss to bfloat16. "MiB at once" is the most
that tensors took beyond the inputs.
"""

EXPERT_PARALLEL = """\
Forward and backward of experts that transformers shards over GPUs, its `grouped_mm` beside onepass below the same
exchange: with `all_to_all` each GPU has a batch of its own, with `all_reduce` all share one. The exchange `onepass` is
compared with `grouped_mm` below `all_to_all`. All run under `onepass.patch`: below `all_to_all`, the rows that come
back are summed by onepass for its own experts, and by transformers for `grouped_mm`. `experts_lora` has frozen weights
and adapters of rank 16 on both, by PEFT with `onepass.patch`. Without it, PEFT cannot add them to sharded weights, so
`grouped_mm` gets the weights of each GPU's experts with their adapters multiplied out. The times are those of the
slowest GPU, in turns, from an idle GPU on. "Scaling" is the time of one GPU without an exchange, relative to this one.
"Kernels" is their time in a profile of one call on the first GPU, without what that waits for the host; "exchange" is
its share of this time, with what it waits for the other GPU. "Error" is the largest of the result and all gradients,
relative to float64 on one GPU, in the norm.
"""


FEW_ROWS = 1024  # up to which the host is the limit of a loss of logits
EARLIER_COMMANDS = {"onepass bench-head": "python -m benchmarks heads", "onepass bench": "python -m benchmarks logits"}


def operations_of(report: Report) -> dict[str, None]:
    """What the sources of a report are recorded for: its operations, trainers or models."""
    if isinstance(report["results"], dict):
        return {"autotune": None}
    key = next(key for key in ("operation", "trainer", "model") if key in report["results"][0])
    return {r[key]: None for r in report["results"]}


def marked(report: Report, operations: Iterable[str]) -> str:
    """A paragraph that says that results are of an earlier version; empty if they are not."""
    sentence = staleness(report, operations)
    since = ": its sources have changed since" if sentence.startswith("Stale") else ""
    return f"**Of an earlier version ({commit_of(report)}){since}.**\n\n" if sentence else ""


def marks_of(report: Report) -> tuple[str, dict[str, str]]:
    """`marked` of the whole report, and of each of its operations where they differ."""
    each = {operation: marked(report, [operation]) for operation in operations_of(report)}
    if len(set(each.values())) > 1:
        return "", each
    return next(iter(each.values())), dict.fromkeys(each, "")


def changed_sources(path: Path, report: Report) -> list[str]:
    """For each sentence of `staleness` on a report: its file, the operations and the sentence."""
    found: dict[str, list[str]] = {}
    for operation in operations_of(report):
        found.setdefault(staleness(report, [operation]), []).append(operation)
    return [f"{path.name}, {', '.join(of)}: {sentence}" for sentence, of in found.items() if sentence]


def commit_of(report: Report) -> str:
    return str(report["environment"]["commit"])[:7]


def command_of(report: Report) -> str:
    """A paragraph with the command that measures this today; empty if the report does not record it."""
    command = report.get("command", "")
    for earlier, today in EARLIER_COMMANDS.items():
        command = command.replace(f"{earlier} ", f"{today} ")
    return f"`{command}`\n\n" if command else ""


def where(path: Path, report: Report) -> str:
    here = report["environment"]
    copy = f", copy {report['copy_gb_per_s']:.0f} GB/s" if "copy_gb_per_s" in report else ""
    return (
        f"`{path.name}`: {here['gpu']}, driver {here['driver']}, torch {here['torch']}, triton {here['triton']}, "
        f"commit {commit_of(report)}{copy}"
    )


def origin(report: Report, operation: str) -> str:
    """The GPU of the results of an operation, and whether they are of an earlier version; for summaries."""
    gpu = str(report["environment"]["gpu"]).removeprefix("NVIDIA ").split()[0]
    return gpu + (", earlier version" if staleness(report, [operation]) else "")


def size(r: dict) -> str:
    masked = f", {r['masked']:.0%} masked" if r.get("masked") else ""
    return " × ".join(str(r[k]) for k in ("rows", "hidden", "vocab") if r.get(k)) + masked


def share(r: dict) -> str:
    return f"{r['share_of_copy']:.1%}" if r["share_of_copy"] else ""


def gib(r: dict) -> str:
    return "" if r["extra_bytes"] is None else f"{r['extra_bytes'] / 2**30:.2f}"


def named(r: dict) -> str:
    """The implementation and its version, which a peer without metadata does not tell. That of onepass is a commit."""
    known = not r["implementation"].startswith("onepass") and r["version"] is not None
    return f"{r['implementation']} {r['version']}" if known else r["implementation"]


def grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cells(r: dict | None, few_rows: bool) -> list[str]:
    """Of one pass: time and share of the copy's bandwidth; for few rows, where the host is the limit, three times."""
    if r is None:
        return [""] * (3 if few_rows else 2)
    if not few_rows:
        return [f"{r['ms']:.3f}", share(r)]
    # None where the device is the limit; earlier results have no cold time.
    kernels = [r["kernel_us"], r.get("cold_kernel_us")]
    return [f"{r['wall_ms']:.3f}", *("" if us is None else f"{us:.1f}" for us in kernels)]


def rank(runs: dict[str, dict], few_rows: bool) -> float:
    time = "wall_ms" if few_rows else "ms"
    return runs["forward+backward"][time] if "forward+backward" in runs else float("inf")


def by_implementation(results: list[dict]) -> dict[tuple[str, str], dict[str, dict]]:
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for r in results:
        found.setdefault((r["implementation"], r["version"]), {})[r["pass"]] = r
    return found


def logits_table(results: list[dict]) -> str:
    few_rows = results[0]["kernel_us"] is not None
    columns = ("{}: wall, ms", "kernels, µs", "cold, µs") if few_rows else ("{}, ms", "of copy")
    head = [c.format(name) for name in ("forward", "forward + backward") for c in columns]
    rows = []
    for _, group in groupby(results, key=size):
        passes = by_implementation(list(group))
        for (name, _), runs in sorted(passes.items(), key=lambda item: rank(item[1], few_rows)):
            last = runs.get("forward+backward", runs["forward"])
            row = [named(last), size(last)]
            row += cells(runs.get("forward"), few_rows) + cells(runs.get("forward+backward"), few_rows)
            row.append(f"{last['extra_bytes'] / 1e6:.1f}")
            mark = "**" if name == "onepass" else ""
            rows.append([f"{mark}{cell}{mark}" if cell else "" for cell in row])
    return grid(["", "rows × vocabulary", *head, "extra MB"], rows)


def summary(reports: Reports) -> str:
    """Forward + backward of more than `FEW_ROWS` rows: ours, the fastest peer, and torch."""
    rows = []
    for report in reports.values():
        both = [r for r in report["results"] if r["pass"] == "forward+backward" and r["kernel_us"] is None]
        large = [r for r in both if r["rows"] > FEW_ROWS]
        for (operation, shape), group in groupby(large, key=lambda r: (r["operation"], size(r))):
            found = {r["implementation"]: r for r in group}
            ours, torch = found.pop("onepass"), {n: found.pop(n, None) for n in OF_TORCH}
            if not found:
                continue
            best = min(found.values(), key=lambda r: r["ms"])
            times = [f"{r['ms']:.2f}" if r else "" for r in torch.values()]
            peer = f"{best['ms']:.3f} ({named(best)})"
            about = [f"`{operation}`", shape, origin(report, operation)]
            rows.append([*about, f"**{ours['ms']:.3f}**", share(ours), peer, *times])
    of_torch = ["torch.compile", "eager, in the logits' dtype", "eager, of a float32 copy"]
    head = ["forward + backward, ms", "rows × vocabulary", "GPU", "onepass", "of copy", "best peer", *of_torch]
    return grid(head, rows)


def head_table(results: list[dict]) -> str:
    rows = []
    for _, group in groupby(results, key=size):
        for r in sorted(group, key=lambda r: r["ms"]):
            mark = "**" if r["implementation"] == "onepass" else ""
            row = [named(r), size(r), f"{r['ms']:.2f}", f"{r['ratio']:.3f}", gib(r)]
            rows.append([f"{mark}{cell}{mark}" if cell else "" for cell in row])
    return grid(["", "rows × hidden × vocabulary", "ms", "× bare GEMMs", "extra GiB"], rows)


def head_summary(reports: Reports) -> str:
    """Of every case: ours, the fastest peer, and torch."""
    rows = []
    for report in reports.values():
        for (operation, shape), group in groupby(report["results"], key=lambda r: (r["operation"], size(r))):
            found = {r["implementation"]: r for r in group if r["error"] is not None}  # the bare GEMMs have none
            ours, torch = found.pop("onepass"), [found.pop(n, None) for n in ("torch.compile", "torch eager")]
            best = min(found.values(), key=lambda r: r["ms"], default=None)
            peer = f"{best['ms']:.1f}, {gib(best)} GiB ({named(best)})" if best else ""
            times = [f"{r['ms']:.1f}" if r else "" for r in torch]
            about = [f"`{operation}`", shape, origin(report, operation)]
            rows.append([*about, f"**{ours['ms']:.1f}**", f"{ours['ratio']:.3f}", gib(ours), peer, *times])
    columns = ["GPU", "onepass", "× bare GEMMs", "extra GiB", "best peer", "torch.compile", "eager"]
    return HEADS + grid(["ms", "rows × hidden × vocabulary", *columns], rows) if rows else ""


def expert_table(path: Path, report: Report) -> str:
    rows = []
    sizes = "tokens", "hidden", "intermediate", "experts", "choices"
    weighed = any(r.get("weight_bytes") for r in report["results"])
    for (operation, *shape, routing), group in groupby(
        report["results"], key=lambda r: (r["operation"], *[r[s] for s in sizes], r["routing"])
    ):
        for r in sorted(group, key=lambda r: r["ms"]):
            mark = "**" if r["implementation"] == "onepass" else ""
            row = [named(r), f"{r['ms']:.2f}", f"{r['ratio']:.2f}", gib(r)]
            if weighed:
                weights = r.get("weight_bytes")
                row.append(f"{(r['extra_bytes'] + weights) / 2**30:.2f}" if weights and r["extra_bytes"] else "")
            case = [f"`{operation}`", " × ".join(map(str, shape)), routing]
            rows.append(case + [f"{mark}{cell}{mark}" if cell else "" for cell in row])
    about = f"{where(path, report)}\n\n{command_of(report)}{marked(report, operations_of(report))}"
    head = ["", " × ".join(sizes), "routing", "", "ms", "× dense", "extra GiB"]
    return about + grid(head + ["with the weights"] * weighed, rows)


def expert_parallel_table(path: Path, report: Report) -> str:
    """Experts of one GPU and of several, below the expert parallelism of transformers."""
    here, rows = report["environment"], []
    for r in report["results"]:
        mark = "**" if r["implementation"] == "onepass" else ""
        scaling = f"{r['scaling']:.2f}" if r["scaling"] else ""
        kernels = ["", ""] if r["kernel_ms"] is None else [f"{r['kernel_ms']:.2f}", f"{r['exchange_share']:.0%}"]
        ratio = f"{r['ratio']:.3f}" if r["ratio"] else ""
        row = [r["implementation"], f"{r['ms']:.2f}", ratio, scaling, *kernels, gib(r)]
        row.append(f"{r['error']:.1e}")
        case = [f"`{r['operation']}`", r["exchange"], str(r["processes"])]
        rows.append(case + [f"{mark}{cell}{mark}" if cell else "" for cell in row])
    packages = ", ".join(f"{name} {here[name]}" for name in ("transformers", "peft"))
    sizes = " × ".join(str(report["results"][0][s]) for s in ("hidden", "intermediate", "experts", "choices"))
    about = (
        f"{where(path, report)}, {packages}; hidden × intermediate × experts × choices: {sizes}, "
        f"{report['results'][0]['tokens']} tokens a GPU.\n\n{command_of(report)}{EXPERT_PARALLEL}\n"
        f"{marked(report, operations_of(report))}"
    )
    missing = "".join(f"\n- not run: {what}: {why}" for what, why in report["not_run"].items())
    head = [
        "",
        "exchange",
        "GPUs",
        "",
        "ms",
        "× grouped_mm",
        "scaling",
        "kernels, ms",
        "exchange",
        "extra GiB",
        "error",
    ]
    return f"## {path.stem}\n\n{about}" + grid(head, rows) + missing + "\n" * bool(missing)


def trainer_table(path: Path, report: Report) -> str:
    here, sizes = report["environment"], report["sizes"]
    about = (
        f"{where(path, report)}, TRL {here['trl']}, transformers {here['transformers']}; {sizes['batch']} completions "
        f"of {sizes['length']} tokens, vocabulary {sizes['vocab']}, bf16 autocast.\n\n"
        f"{command_of(report)}{marked(report, operations_of(report))}"
    )
    columns = {"ms a step": "ms", "ms of kernels": "kernel_ms", "of the head": "head_ms", "two GEMMs": "two_gemms_ms"}
    columns = {title: key for title, key in columns.items() if key in report["results"][0]}
    about_step = ["trainer", "adapter", "hidden", "kind"]
    about_step = [key for key in about_step if key in report["results"][0]]
    rows = []
    for r in report["results"]:
        peaks = [f"{r[k] / 2**30:.2f}" for k in ("peak_bytes", "step_peak_bytes")]
        rows.append([*[str(r[k]) for k in about_step], *[f"{r[k]:.1f}" for k in columns.values()], *peaks])
    missing = "".join(f"\n- not run: {what}: {why}" for what, why in report.get("not_run", {}).items())
    titles = [{"adapter": "trains", "kind": "heads of"}.get(key, key) for key in about_step]
    head = [*titles, *columns, "peak GiB, forward + backward", "of the step"]
    return about + grid(head, rows) + missing + "\n" * bool(missing)


def lm_table(path: Path, report: Report) -> str:
    here = report["environment"]
    packages = ", ".join(f"{name} {here[name]}" for name in ("transformers", "peft", "liger-kernel") if here[name])
    rows = []
    for r in report["results"]:
        limit = "" if r["max_memory"] is None else f"{r['max_memory'] >> 20} MiB"
        times = [f"{r['ms']:.1f}", f"{r['least_ms']:.1f} to {r['most_ms']:.1f}"]
        busy = f"{r['busy_ms']:.1f}" if r.get("busy_ms") else ""  # older reports have none
        rows.append([r["model"], r["step"], r["way"], limit, *times, busy, f"{r['peak_bytes'] / 2**30:.2f}"])
    head = ["model", "step", "way", "`max_memory`", "ms, median", "least to most", "device busy, ms", "peak GiB"]
    about = f"{where(path, report)}, {packages}; sequences of {report['length']} tokens.\n\n"
    about += command_of(report) + marked(report, operations_of(report))
    missing = "".join(f"\n- not run: {what}: {why}" for what, why in report["not_run"].items())
    picture = "\n![Time against memory of the bare step](lm.png)\n"
    return about + grid(head, rows) + missing + "\n" * bool(missing) + picture


def decoder_table(path: Path, report: Report) -> str:
    sizes = report["sizes"]
    rows = []
    for r in report["results"]:
        whole = r["whole"]
        peaks = [f"{p / 2**30:.1f}" for p in (r["peak_bytes"], whole["peak_bytes"])]
        rows.append(
            [r["model"], r["way"], f"{r['ms']:.0f}", f"{r['losses'][-1]:.4f}", peaks[0], str(whole["layers"]), peaks[1]]
        )
    head = [
        "model",
        "way",
        "ms",
        "last loss",
        f"peak GiB, {sizes['layers']} layers",
        "layers of the model",
        "peak GiB, extrapolated",
    ]
    here = report["environment"]
    packages = ", ".join(f"{name} {here[name]}" for name in ("transformers", "peft") if here[name])
    about = f"{where(path, report)}, {packages}; {sizes['batch']} × {sizes['length']} tokens.\n\n"
    about += command_of(report) + marked(report, operations_of(report))
    missing = "".join(f"\n- not run: {what}: {why}" for what, why in report["not_run"].items())
    return about + grid(head, rows) + missing


def shard_table(path: Path, report: Report) -> str:
    """Losses of a sharded vocabulary, beside their lower bound: what every implementation computes."""
    of_all, of_each = marks_of(report)
    processes = "1 process" if report["processes"] == 1 else f"{report['processes']} processes"
    text = [f"{where(path, report)}, {processes}.\n\n{command_of(report)}{of_all}".removesuffix("\n")]
    for (operation, shape), group in groupby(report["results"], key=lambda r: (r["operation"], size(r))):
        rows, busy = [], ("busy_ms", "busy_ratio")
        for r in sorted(group, key=lambda r: r["ms"]):
            spread = f"{min(r['runs']):.2f} to {max(r['runs']):.2f}"
            rows.append([named(r) if r["extra_bytes"] is not None else r["implementation"], f"{r['ms']:.2f}", spread,
                         f"{r['ratio']:.3f}", *[f"{r[k]:.3f}" if k in r else "" for k in busy], gib(r)])  # fmt: skip
        needed = "× lower bound"
        head = ["", "ms", "least to most", needed, "behind other work, ms", needed, "extra GiB"]
        text.append(f"`{operation}`, {shape}:\n\n{of_each[operation]}{grid(head, rows)}")
    return "\n".join(text)


def parity_table(path: Path, report: Report) -> str:
    """Each option of parity beside what it replaces, with the largest error against float64."""
    of_all, of_each = marks_of(report)
    text = [f"{where(path, report)}.\n\n{command_of(report)}{of_all}".removesuffix("\n")]
    for (operation, shape), group in groupby(report["results"], key=lambda r: (r["operation"], size(r))):
        rows = []
        for r in sorted(group, key=lambda r: (r.get("pass", ""), r["ms"])):
            error = "" if r["error"] is None else f"{r['error']:.1e}"
            rows.append([r["implementation"], r.get("pass", ""), f"{r['ms']:.3f}", gib(r), error])
        table = grid(["", "pass", "ms", "extra GiB", "largest error"], rows)
        text.append(f"`{operation}`, {shape}:\n\n{of_each[operation]}{table}")
    return "\n".join(text)


def cpu_table(path: Path, report: Report) -> str:
    """Losses on a CPU, torch's and those of onepass in turns: medians, quartiles and the ratio to torch's median."""
    here, rows, of_torch = report["environment"], [], 1.0
    for r in report["results"]:
        of_torch = r["ms"] if r["implementation"] == "torch" else of_torch  # the first of a case
        row = [f"`{r['operation']}`", size(r), r["dtype"], r["pass"], r["implementation"], f"{r['ms']:.2f}"]
        spread = " to ".join(f"{q:.2f}" for q in r["quartiles"])
        rows.append([*row, spread, f"{r['ms'] / of_torch:.2f}", f"{r['peak_bytes'] / 2**20:.1f}"])
    about = f"`{path.name}`: a CPU ({here['machine']}), threads: {report['threads']}, torch {here['torch']}, "
    about += f"commit {commit_of(report)}\n\n{command_of(report)}{ON_CPU}\n{marked(report, operations_of(report))}"
    head = ["", "rows × hidden × vocabulary", "dtype", "pass", "", "ms", "quartiles", "× torch", "MiB at once"]
    return f"## {path.stem}\n\n{about}" + grid(head, rows)


def autotune_table(path: Path, report: Report) -> str:
    processes = report["results"]
    libraries = list(processes["tunes"]["seconds"])
    head = ["process", "candidates benchmarked", *[f"first step of {name}, s" for name in libraries]]
    versions = ", ".join(f"{name} {report['environment'][name]}" for name in libraries if name != "onepass")
    names = {"tunes": "first, which tunes", "knows": "second, which reuses its choices"}
    rows = [
        [names[process], str(of["benchmarked"]), *[f"{of['seconds'][library]:.2f}" for library in libraries]]
        for process, of in processes.items()
    ]
    return f"{where(path, report)}, {versions}.\n\n{marked(report, operations_of(report))}" + grid(head, rows)


def version_table(path: Path, report: Report) -> str:
    """Two versions in turns: times, and the ratio of the times.

    The ratio is the median over rounds, for few rows over processes, with its least and most.
    """
    times_of = [f"{report[version]}, ms" for version in ("old", "new")]
    head = ["operation", "shape", "pass", *times_of, "ratio", "least to most"]
    rows = []
    for r in report["results"]:
        times = [median(r[key]) for key in ("old_ms", "new_ms")]
        row = [f"`{r['operation']}`", " × ".join(map(str, r["shape"])), r["pass"], *[f"{t:.3f}" for t in times]]
        rows.append([*row, f"{r['ratio']:.3f}", f"{r['least']:.3f} to {r['most']:.3f}"])
    about = f"{where(path, report)}, {report['rounds']} rounds"
    if "timeline" in report:
        about += f"; of few rows (wall) the least times in each of {report['processes']} processes"
    return f"## {path.stem}\n\n{about}\n\n{marked(report, operations_of(report))}" + grid(head, rows)
