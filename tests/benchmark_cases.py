"""A command of the benchmarks, in this process."""

from typer.testing import CliRunner

from benchmarks.__main__ import app


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])
