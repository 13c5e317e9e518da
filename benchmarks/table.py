"""Write docs/measured.md and the README's summary from what `onepass bench` wrote: `python benchmarks/table.py`."""

import json
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- summary: benchmarks/table.py -->\n", "<!-- end of summary -->\n"
INTRODUCTION = """# Measured

Every implementation of an operation in one run, beside a copy of the same card, medians; written by
`benchmarks/table.py` from the files in `benchmarks/results/`, which `onepass bench` wrote.

- "Of copy" is the bytes that cannot be avoided over the time, against the copy's bandwidth. `kl_div` reads two tensors,
  `jsd` each of them twice; `topk_kl_div` has 64 tokens a row; blank where no tensor need be read.
- "Extra MB" is the peak that forward + backward allocate; the gradient itself is most of it.
- Up to 1024 rows the host is the limit: "wall" is one call until the device is idle, timed in turns with all others.
- Cross-entropy is the mean with `ignore_index`. Liger's cross-entropy and fla's kernel overwrite their logits; fla's
  forward has its gradient in it. Liger's divergences take log-probs: the softmax before them is counted. axolotl's
  entropy has no gradient: its backward is that of the log-probs alone.
"""


def size(r: dict) -> str:
    masked = f", {r['masked']:.0%} masked" if r["masked"] else ""
    return f"{r['rows']} × {r['vocab']}{masked}"


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


def where(path: Path, report: dict) -> str:
    here = report["environment"]
    return (
        f"`{path.name}`: {here['gpu']}, driver {here['driver']}, torch {here['torch']}, triton {here['triton']}, "
        f"commit {here['commit']}, copy {report['copy_gb_per_s']:.0f} GB/s"
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


if __name__ == "__main__":
    reports = {path: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    text = [INTRODUCTION]
    for path, report in reports.items():
        text.append(f"## {path.stem}\n\n{where(path, report)}\n\n`{report['command']}`\n")
        for operation, results in groupby(report["results"], key=lambda r: r["operation"]):
            text += [f"`{operation}`:\n", table(list(results))]
    (HERE.parent / "docs" / "measured.md").write_text("\n".join(text))
    readme = HERE.parent / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(before + BEGIN + "\n" + summary(reports) + "\n" + END + rest.split(END)[1])
