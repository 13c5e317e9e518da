"""The command line: thin commands over the library. Needs the extra ``cli``."""

import sys


def main() -> None:
    try:
        from onepass.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"onepass: the command line needs the package {error.name!r}: pip install 'onepass[cli]'")
    app()
