"""The README's table, from the JSON files that `onepass bench` wrote: `python benchmarks/table.py`."""

import json
from itertools import groupby
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

for path in sorted(RESULTS.glob("*.json")):
    report = json.loads(path.read_text())
    here = report["environment"]
    print(
        f"`{path.name}`: {here['gpu']}, driver {here['driver']}, torch {here['torch']}, triton {here['triton']}, ",
        end="",
    )
    print(f"commit {here['commit']}, copy {report['copy_gb_per_s']:.0f} GB/s\n")
    print("| | rows × vocabulary | forward, ms | of copy | forward + backward, ms | of copy | extra MB |")
    print("|---|---|---|---|---|---|---|")
    case = lambda r: (r["operation"], r["rows"], r["vocab"], r["dtype"], r["masked"])  # noqa: E731
    for (_, rows, vocab, _, _), group in groupby(report["results"], key=case):
        table = {}
        for r in group:
            table.setdefault((r["implementation"], r["version"]), {})[r["pass"]] = r
        best = lambda item: item[1].get("forward+backward", {"ms": 1e9})["ms"]  # noqa: E731
        for (name, version), passes in sorted(table.items(), key=best):
            cells = [name if name == "onepass" else f"{name} {version}", f"{rows} × {vocab}"]
            for key in ("forward", "forward+backward"):
                r = passes.get(key)
                cells += [f"{r['ms']:.3f}", f"{r['share_of_copy']:.1%}"] if r else ["", ""]
            last = passes.get("forward+backward", passes["forward"])
            cells.append(f"{last['extra_bytes'] / 1e6:.1f}")
            mark = "**" if name == "onepass" else ""
            print("| " + " | ".join(f"{mark}{c}{mark}" if c else "" for c in cells) + " |")
    print()
