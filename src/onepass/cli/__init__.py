"""The command line: thin commands over the library. Needs the extra ``cli``, except for ``run``."""

import sys


def main() -> None:
    """The commands of `app.py`. A script of ``run`` is not run by Typer, which would catch its exceptions."""
    from onepass.cli.script import is_script, patch_and_run

    if sys.argv[1:2] == ["run"] and is_script(sys.argv[2:]):
        patch_and_run(sys.argv[2:])
        return
    try:
        from onepass.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"onepass: the command line needs the package {error.name!r}: pip install 'onepass[cli]'")
    app()
