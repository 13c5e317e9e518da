"""Benchmarks of onepass. Run from a checkout: ``python -m benchmarks COMMAND``."""

import typer

from benchmarks.autotune import autotune
from benchmarks.cpu import cpu
from benchmarks.decoder import decoder
from benchmarks.expert_parallel import expert_parallel
from benchmarks.experts import experts
from benchmarks.heads import heads
from benchmarks.lm_steps import lm
from benchmarks.logits import logits
from benchmarks.plots import plots
from benchmarks.shards import shards
from benchmarks.table import table
from benchmarks.trainers import trainers
from benchmarks.versions import versions

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_show_locals=False)
COMMANDS = (
    logits, heads, shards, experts, expert_parallel, trainers, lm, cpu, decoder, autotune, versions, table, plots,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)

if __name__ == "__main__":
    app()
