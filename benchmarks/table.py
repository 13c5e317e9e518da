"""Write the README's tables from the JSON files that `onepass bench` wrote: `python benchmarks/table.py`."""

import json
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: benchmarks/table.py -->\n", "<!-- end of tables -->\n"


def size(r: dict) -> str:
    masked = f", {r['masked']:.0%} masked" if r["masked"] else ""
    return f"{r['rows']} × {r['vocab']}{masked}"


def cells(r: dict | None, few_rows: bool) -> list[str]:
    """Of one pass: time and share of the copy's bandwidth; for few rows, where the host is the limit, two times."""
    if r is None:
        return ["", ""]
    return (
        [f"{r['wall_ms']:.3f}", f"{r['kernel_us']:.1f}"]
        if few_rows
        else [f"{r['ms']:.3f}", f"{r['share_of_copy']:.1%}" if r["share_of_copy"] else ""]
    )


def rank(runs: dict[str, dict], few_rows: bool) -> float:
    time = "wall_ms" if few_rows else "ms"
    return runs["forward+backward"][time] if "forward+backward" in runs else float("inf")


def table(results: list[dict]) -> str:
    few_rows = results[0]["kernel_us"] is not None
    columns = ("{}: wall, ms", "kernels, µs") if few_rows else ("{}, ms", "of copy")
    head = [c.format(name) for name in ("forward", "forward + backward") for c in columns]
    lines = ["| | rows × vocabulary | " + " | ".join(head) + " | extra MB |", "|---|---|---|---|---|---|---|"]
    for _, group in groupby(results, key=size):
        passes: dict[tuple[str, str], dict[str, dict]] = {}
        for r in group:
            passes.setdefault((r["implementation"], r["version"]), {})[r["pass"]] = r
        for (name, version), runs in sorted(passes.items(), key=lambda item: rank(item[1], few_rows)):
            last = runs.get("forward+backward", runs["forward"])
            row = [name if name == "onepass" else f"{name} {version}", size(last)]
            row += cells(runs.get("forward"), few_rows) + cells(runs.get("forward+backward"), few_rows)
            row.append(f"{last['extra_bytes'] / 1e6:.1f}")
            mark = "**" if name == "onepass" else ""
            lines.append("| " + " | ".join(f"{mark}{c}{mark}" if c else "" for c in row) + " |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    text = []
    for path in sorted((HERE / "results").glob("*.json")):
        report = json.loads(path.read_text())
        here = report["environment"]
        text.append(
            f"`{path.name}`: {here['gpu']}, driver {here['driver']}, torch {here['torch']}, triton {here['triton']}, "
            f"commit {here['commit']}, copy {report['copy_gb_per_s']:.0f} GB/s\n"
        )
        for operation, results in groupby(report["results"], key=lambda r: r["operation"]):
            text += [f"`{operation}`:\n", table(list(results))]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    readme = HERE.parent / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(before + BEGIN + "\n" + tables() + END + rest.split(END)[1])
