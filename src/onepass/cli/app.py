"""Fused losses for language models: a demo, a check of this installation, patched scripts, autotuning."""

import sys
from typing import Annotated

import typer

from onepass import __version__
from onepass.cli.demo import demo
from onepass.cli.doctor import doctor
from onepass.cli.run import run


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onepass {__version__}")
        raise typer.Exit


def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_show_locals=False)
app.callback(help=__doc__)(main)
app.command()(demo)
app.command()(doctor)
app.command()(run)
try:
    from onepass.cli import autotune
except ImportError as error:  # everything else runs without Triton, or with one that cannot be imported, on a CPU
    if "triton" in sys.modules:
        raise
    cause = error

    @app.command("autotune", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def autotune_without_triton() -> None:
        """Tune the kernels: needs the package triton."""
        raise typer.BadParameter(f"expected the package triton, which compiles the kernels: {cause}")

else:
    app.add_typer(autotune.app, name="autotune")
