"""Write docs/measured.md, the README's summaries and tables of other documents from what the benchmarks wrote.

Run as `python benchmarks/table.py`.
"""

import json
from itertools import groupby
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
SUMMARY = "<!-- summary: benchmarks/table.py -->\n", "<!-- end of summary -->\n"
AUTOTUNE = "<!-- autotune: benchmarks/table.py -->\n", "<!-- end of autotune -->\n"
EXPERTS = "<!-- experts: benchmarks/table.py -->\n", "<!-- end of experts -->\n"
TRAINERS = "<!-- trainers: benchmarks/table.py -->\n", "<!-- end of trainers -->\n"
LINEAR_HEAD = "<!-- linear head: benchmarks/table.py -->\n", "<!-- end of linear head -->\n"
INTRODUCTION = """# Measured

Every implementation of an operation in one run, beside a copy of the same card, medians; written by
`benchmarks/table.py` from the files in `benchmarks/results/`, which `onepass bench` and `onepass bench-head` wrote.

- "Of copy" is the bytes that cannot be avoided over the time, against the copy's bandwidth. `kl_div` reads two tensors,
  `jsd` each of them twice; `topk_kl_div` has 64 tokens a row; blank where no tensor need be read.
- "Extra MB" is the peak that forward + backward allocate; the gradient itself is most of it.
- Up to 1024 rows the host is the limit: "wall" is one call until the device is idle, timed in turns with all others.
- Cross-entropy is the mean with `ignore_index`. Liger's cross-entropy and fla's kernel overwrite their logits; fla's
  forward has its gradient in it. Liger's divergences take log-probs: the softmax before them is counted. axolotl's
  entropy has no gradient.
- Linear heads take hidden states: all implementations of a case, and its bare GEMMs on whole tensors and all rows, are
  timed in turns. "Extra GiB" is the peak that forward + backward allocate beyond the gradients that come out.
"""


HEADS = """\
From hidden states (`linear_*`), forward and backward (`_forward`: alone) against the matrix products that each cannot
do without, of all rows, each one cuBLAS call on whole tensors; "extra GiB" is the peak beyond inputs and gradients.

"""


def size(r: dict) -> str:
    masked = f", {r['masked']:.0%} masked" if r["masked"] else ""
    return " × ".join(str(r[k]) for k in ("rows", "hidden", "vocab") if k in r) + masked


def share(r: dict) -> str:
    return f"{r['share_of_copy']:.1%}" if r["share_of_copy"] else ""


def cells(r: dict | None, few_rows: bool) -> list[str]:
    """Of one pass: time and share of the copy's bandwidth; for few rows, where the host is the limit, two times."""
    if r is None:
        return ["", ""]
    return [f"{r['wall_ms']:.3f}", f"{r['kernel_us']:.1f}"] if few_rows else [f"{r['ms']:.3f}", share(r)]


def rank(runs: dict[str, dict], few_rows: bool) -> float:
    time = "wall_ms" if few_rows else "ms"
    return runs["forward+backward"][time] if "forward+backward" in runs else float("inf")


def grid(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def by_implementation(results: list[dict]) -> dict[tuple[str, str], dict[str, dict]]:
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for r in results:
        found.setdefault((r["implementation"], r["version"]), {})[r["pass"]] = r
    return found


def table(results: list[dict]) -> str:
    few_rows = results[0]["kernel_us"] is not None
    columns = ("{}: wall, ms", "kernels, µs") if few_rows else ("{}, ms", "of copy")
    head = [c.format(name) for name in ("forward", "forward + backward") for c in columns]
    rows = []
    for _, group in groupby(results, key=size):
        passes = by_implementation(list(group))
        for (name, version), runs in sorted(passes.items(), key=lambda item: rank(item[1], few_rows)):
            last = runs.get("forward+backward", runs["forward"])
            row = [name if name == "onepass" else f"{name} {version}", size(last)]
            row += cells(runs.get("forward"), few_rows) + cells(runs.get("forward+backward"), few_rows)
            row.append(f"{last['extra_bytes'] / 1e6:.1f}")
            mark = "**" if name == "onepass" else ""
            rows.append([f"{mark}{cell}{mark}" if cell else "" for cell in row])
    return grid(["", "rows × vocabulary", *head, "extra MB"], rows)


def gib(r: dict) -> str:
    return "" if r["extra_bytes"] is None else f"{r['extra_bytes'] / 2**30:.2f}"


def named(r: dict) -> str:
    return r["implementation"] if r["implementation"] == "onepass" else f"{r['implementation']} {r['version']}"


def head_table(results: list[dict]) -> str:
    rows = []
    for _, group in groupby(results, key=size):
        for r in sorted(group, key=lambda r: r["ms"]):
            mark = "**" if r["implementation"] == "onepass" else ""
            row = [named(r), size(r), f"{r['ms']:.2f}", f"{r['ratio']:.3f}", gib(r)]
            rows.append([f"{mark}{cell}{mark}" if cell else "" for cell in row])
    return grid(["", "rows × hidden × vocabulary", "ms", "× bare GEMMs", "extra GiB"], rows)


def head_summary(reports: dict[Path, dict]) -> str:
    """Of every case: ours, the fastest peer, and torch."""
    rows = []
    for report in reports.values():
        for (operation, shape), group in groupby(report["results"], key=lambda r: (r["operation"], size(r))):
            found = {r["implementation"]: r for r in group if r["error"] is not None}  # the bare GEMMs have none
            ours, torch = found.pop("onepass"), [found.pop(n, None) for n in ("torch.compile", "torch eager")]
            best = min(found.values(), key=lambda r: r["ms"], default=None)
            peer = f"{best['ms']:.1f}, {gib(best)} GiB ({named(best)})" if best else ""
            times = [f"{r['ms']:.1f}" if r else "" for r in torch]
            rows.append(
                [f"`{operation}`", shape, f"**{ours['ms']:.1f}**", f"{ours['ratio']:.3f}", gib(ours), peer, *times]
            )
    columns = ["onepass", "× bare GEMMs", "extra GiB", "best peer", "torch.compile", "eager"]
    return HEADS + grid(["ms", "rows × hidden × vocabulary", *columns], rows) if rows else ""


def expert_table(path: Path, report: dict) -> str:
    rows = []
    sizes = "tokens", "hidden", "intermediate", "experts", "choices"
    for (operation, *shape, routing), group in groupby(
        report["results"], key=lambda r: (r["operation"], *[r[s] for s in sizes], r["routing"])
    ):
        for r in sorted(group, key=lambda r: r["ms"]):
            mark = "**" if r["implementation"] == "onepass" else ""
            row = [named(r), f"{r['ms']:.2f}", f"{r['ratio']:.2f}", gib(r)]
            case = [f"`{operation}`", " × ".join(map(str, shape)), routing]
            rows.append(case + [f"{mark}{cell}{mark}" if cell else "" for cell in row])
    return f"{where(path, report)}\n\n" + grid(
        ["", " × ".join(sizes), "routing", "", "ms", "× dense", "extra GiB"], rows
    )


def trainer_table(path: Path, report: dict) -> str:
    here, sizes = report["environment"], report["sizes"]
    about = (
        f"{where(path, report)}, TRL {here['trl']}, transformers {here['transformers']}; {sizes['batch']} completions "
        f"of {sizes['length']} tokens, {sizes['hidden']} hidden, vocabulary {sizes['vocab']}, bf16 autocast.\n\n"
    )
    columns = {"ms a step": "ms", "ms of kernels": "kernel_ms"}
    columns = {title: key for title, key in columns.items() if key in report["results"][0]}
    rows = []
    for r in report["results"]:
        peaks = [f"{r[k] / 2**30:.2f}" for k in ("peak_bytes", "step_peak_bytes")]
        rows.append([r["trainer"], r["kind"], *[f"{r[k]:.1f}" for k in columns.values()], *peaks])
    return about + grid(["trainer", "heads of", *columns, "peak GiB, forward + backward", "of the step"], rows)


def autotune_table(path: Path, report: dict) -> str:
    processes = report["results"]
    libraries = list(processes["tunes"]["seconds"])
    head = ["process", "candidates benchmarked", *[f"first step of {name}, s" for name in libraries]]
    versions = ", ".join(f"{name} {report['environment'][name]}" for name in libraries if name != "onepass")
    rows = [
        [name, str(of["benchmarked"]), *[f"{of['seconds'][library]:.2f}" for library in libraries]]
        for name, of in processes.items()
    ]
    return f"{where(path, report)}, {versions}.\n\n" + grid(head, rows)


def version_table(path: Path, report: dict) -> str:
    """Two versions in turns: times, and the ratio of each round, its median and spread."""
    head = ["operation", "shape", "pass", "before, ms", "after, ms", "ratio", "least to most"]
    rows = [
        [
            f"`{r['operation']}`", " × ".join(map(str, r["shape"])), r["pass"], f"{median(r['old_ms']):.3f}",
            f"{median(r['new_ms']):.3f}", f"{r['ratio']:.3f}", f"{r['least']:.3f} to {r['most']:.3f}",
        ]
        for r in report["results"]
    ]  # fmt: skip
    return f"## {path.stem}\n\n{where(path, report)}, {report['rounds']} rounds\n\n" + grid(head, rows)


def where(path: Path, report: dict) -> str:
    here = report["environment"]
    copy = f", copy {report['copy_gb_per_s']:.0f} GB/s" if "copy_gb_per_s" in report else ""
    return (
        f"`{path.name}`: {here['gpu']}, driver {here['driver']}, torch {here['torch']}, triton {here['triton']}, "
        f"commit {here['commit']}{copy}"
    )


def summary(reports: dict[Path, dict]) -> str:
    """Forward + backward of the large cases: ours, the fastest peer, and torch."""
    rows = []
    for report in reports.values():
        large = [r for r in report["results"] if r["pass"] == "forward+backward" and r["kernel_us"] is None]
        for (operation, shape), group in groupby(large, key=lambda r: (r["operation"], size(r))):
            found = {r["implementation"]: r for r in group}
            ours, torch = found.pop("onepass"), {n: found.pop(n, None) for n in ("torch.compile", "torch eager")}
            if not found:
                continue
            best = min(found.values(), key=lambda r: r["ms"])
            times = [f"{r['ms']:.2f}" if r else "" for r in torch.values()]
            peer = f"{best['ms']:.3f} ({best['implementation']} {best['version']})"
            rows.append([f"`{operation}`", shape, f"**{ours['ms']:.3f}**", share(ours), peer, *times])
    head = ["forward + backward, ms", "rows × vocabulary", "onepass", "of copy", "best peer", "torch.compile", "eager"]
    return grid(head, rows)


def between(text: str, marks: tuple[str, str], inside: str) -> str:
    begin, end = marks
    before, rest = text.split(begin)
    return before + begin + "\n" + inside + "\n" * bool(inside) + end + rest.split(end)[1]


if __name__ == "__main__":
    reports = {path: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    tuned = {path: reports.pop(path) for path in list(reports) if "tunes" in reports[path]["results"]}
    trainers = {path: reports.pop(path) for path in list(reports) if "trainer" in reports[path]["results"][0]}
    experts = {path: reports.pop(path) for path in list(reports) if "routing" in reports[path]["results"][0]}
    versions = {path: reports.pop(path) for path in list(reports) if "old_ms" in reports[path]["results"][0]}
    heads = {path: report for path, report in reports.items() if "hidden" in report["results"][0]}
    text = [INTRODUCTION]
    for path, report in reports.items():
        text.append(f"## {path.stem}\n\n{where(path, report)}\n\n`{report['command']}`\n")
        for operation, results in groupby(report["results"], key=lambda r: r["operation"]):
            text += [f"`{operation}`:\n", (head_table if path in heads else table)(list(results))]
    text += [version_table(*of) for of in versions.items()]
    (HERE.parent / "docs" / "measured.md").write_text("\n".join(text))
    readme = HERE.parent / "README.md"
    logits = {path: report for path, report in reports.items() if path not in heads}
    written = between(readme.read_text(), SUMMARY, summary(logits))
    readme.write_text(between(written, LINEAR_HEAD, head_summary(heads)))
    for name, marks, tables in (
        ("moe.md", EXPERTS, [expert_table(*of) for of in experts.items()]),
        ("integrations.md", TRAINERS, [trainer_table(*of) for of in trainers.items()]),
        ("autotune.md", AUTOTUNE, [autotune_table(*of) for of in tuned.items()]),
    ):
        document = HERE.parent / "docs" / name
        document.write_text(between(document.read_text(), marks, "\n".join(tables)))
