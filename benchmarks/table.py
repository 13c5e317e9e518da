"""`python -m benchmarks table`: writes docs/measured.md and the tables of other pages, from `benchmarks/results/`.

Results of an earlier version are marked: those that record no hashes of their sources (see `sources.py`), and those
whose sources have changed since.
"""

import json
from itertools import groupby
from pathlib import Path

from benchmarks.overlap import draw_overlap
from benchmarks.plots import lm_plot
from benchmarks.tables import (
    Report,
    Reports,
    autotune_table,
    changed_sources,
    command_of,
    cpu_table,
    decoder_table,
    expert_parallel_table,
    expert_table,
    head_summary,
    head_table,
    lm_table,
    logits_table,
    marks_of,
    parity_table,
    shard_table,
    summary,
    trainer_table,
    version_table,
    where,
)

HERE = Path(__file__).resolve().parent
AUTOTUNE = "<!-- autotune: benchmarks/table.py -->\n", "<!-- end of autotune -->\n"
EXPERTS = "<!-- experts: benchmarks/table.py -->\n", "<!-- end of experts -->\n"
DECODER = "<!-- decoder: benchmarks/table.py -->\n", "<!-- end of decoder -->\n"
TRAINERS = "<!-- trainers: benchmarks/table.py -->\n", "<!-- end of trainers -->\n"
LM = "<!-- lm: benchmarks/table.py -->\n", "<!-- end of lm -->\n"
SHARDS = "<!-- shards: benchmarks/table.py -->\n", "<!-- end of shards -->\n"
PARITY = "<!-- parity: benchmarks/table.py -->\n", "<!-- end of parity -->\n"
OF_PARITY = "_wide", "_invariant", "_support", "linear_kl_div"  # parts of the names of its operations
LINEAR_HEAD = "<!-- linear head: benchmarks/table.py -->\n", "<!-- end of linear head -->\n"
INTRODUCTION = """# Measured

Medians. All implementations of an operation and a copy run on the same GPU in one run. `python -m benchmarks table`
wrote this from the files in `benchmarks/results/`, with the command that wrote each file. The measurements of
[training steps](integrations.md#time-and-memory-of-training-without-logits), of
[TRL's trainers](integrations.md#what-it-gains), of [experts](moe.md#experts), of
[sharded vocabularies](tensor_parallel.md#measured), of [parity](parity.md#measured) and of
[autotuning](autotune.md#the-parts) are on their pages.

A result records which functions of `src/onepass` its operation ran through, and which constants and classes these name.
Where the code of one of them, which is all but comments and docstrings, has changed since, the result is marked as one
of an earlier version. Older results record whole files.

- "Of copy" is a number of bytes divided by the time, relative to the bandwidth of the copy. Of a loss, forward +
  backward count two reads of the logits and one write of their gradient. A gradient that is computed in the forward
  saves one of the reads, so that up to 150% is possible. `kl_div` reads two tensors, `jsd` each of them twice in the
  forward; `topk_kl_div` has 64 tokens per row. It is blank if no tensor must be read.
- "Extra MB" is the peak that forward + backward allocate; the gradient itself is most of it.
- Where there are few logits, the host is the bottleneck: "wall" is the time from a call until the device is idle; calls
  alternate. "Kernels" is the time of their kernels alone, and "cold" the same where other data fill the device's cache
  before each call. The summary leaves out up to 1024 rows for this reason.
- Cross-entropy is the mean with `ignore_index`. Liger's cross-entropy and fla's kernel overwrite their logits; fla's
  forward also computes the gradient. Liger's divergences take log-probs: the softmax before them is counted. axolotl's
  entropy has no gradient.
- Linear heads take hidden states: all implementations of a case, and its bare GEMMs on whole tensors and all rows, are
  timed in turns. "Extra GiB" is the peak that forward + backward allocate beyond the gradients that come out.
"""


def between(text: str, marks: tuple[str, str], inside: str) -> str:
    begin, end = marks
    before, rest = text.split(begin)
    return before + begin + "\n" + inside + "\n" * bool(inside) + end + rest.split(end)[1]


def measured_page(logits: Reports, heads: Reports, versions: Reports, cpu: Reports, expert_parallel: Reports) -> str:
    text = [INTRODUCTION, "## Losses of logits, in short\n", summary(logits) + "\n"]
    for path, report in sorted((logits | heads).items()):
        of_all, of_each = marks_of(report)
        about = f"## {path.stem}\n\n{where(path, report)}\n\n{command_of(report)}{of_all}"
        text.append(about.removesuffix("\n"))
        for operation, results in groupby(report["results"], key=lambda r: r["operation"]):
            text.append(f"`{operation}`:\n")
            text.append(of_each[operation] + (head_table if path in heads else logits_table)(list(results)))
    text += [cpu_table(*of) for of in cpu.items()] + [expert_parallel_table(*of) for of in expert_parallel.items()]
    text += [version_table(*of) for of in versions.items()]
    return "\n".join(text)


def kind_of(report: Report) -> str:
    results = report["results"]
    if "timeline" in report:
        return "shards"
    if "threads" in report:
        return "cpu"
    if "tunes" in results:
        return "autotune"
    if "way" in results[0]:
        return "decoder" if "whole" in results[0] else "lm"
    if "exchange" in results[0]:
        return "expert-parallel"
    if any(part in results[0].get("operation", "") for part in OF_PARITY):
        return "parity"
    kinds = {"trainer": "trainers", "routing": "experts", "old_ms": "versions", "hidden": "heads"}
    return next((kind for key, kind in kinds.items() if key in results[0]), "logits")


def table() -> None:
    """Write docs/measured.md and the tables of other documents from the files in benchmarks/results/.

    Print which sources have changed since a result was measured.
    """
    reports: dict[str, Reports] = {}
    for path in sorted((HERE / "results").glob("*.json")):
        report = json.loads(path.read_text())
        reports.setdefault(kind_of(report), {})[path] = report
        for line in changed_sources(path, report):
            print(line)
    of = lambda kind: reports.get(kind, {})  # noqa: E731
    logits, heads = of("logits"), of("heads")
    page = measured_page(logits, heads, of("versions"), of("cpu"), of("expert-parallel"))
    (HERE.parent / "docs" / "measured.md").write_text(page)
    for report in of("lm").values():
        lm_plot(report, HERE.parent / "docs" / "lm.png")
    for report in of("shards").values():
        if report["timeline"]:
            draw_overlap(report["timeline"], HERE.parent / "docs" / "shards.png")
    for name, marks, tables in (
        ("moe.md", EXPERTS, [expert_table(*each) for each in of("experts").items()]),
        ("moe.md", DECODER, [decoder_table(*each) for each in of("decoder").items()]),
        ("integrations.md", TRAINERS, [trainer_table(*each) for each in of("trainers").items()]),
        ("tensor_parallel.md", SHARDS, [shard_table(*each) for each in of("shards").items()]),
        ("parity.md", PARITY, [parity_table(*each) for each in of("parity").items()]),
        ("integrations.md", LM, [lm_table(*each) for each in of("lm").items()]),
        ("linear_head.md", LINEAR_HEAD, [head_summary(heads)]),
        ("autotune.md", AUTOTUNE, [autotune_table(*each) for each in of("autotune").items()]),
    ):
        document = HERE.parent / "docs" / name
        document.write_text(between(document.read_text(), marks, "\n".join(tables)))
