"""Fused losses for language models: a demo, a check of this installation, patched scripts, autotuning."""

import typer

from onepass.cli import autotune
from onepass.cli.demo import demo
from onepass.cli.doctor import doctor
from onepass.cli.run import run

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_show_locals=False)
app.command()(demo)
app.command()(doctor)
app.command()(run)
app.add_typer(autotune.app, name="autotune")
