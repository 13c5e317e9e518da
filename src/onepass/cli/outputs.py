"""What the commands check of a file that they will write, before they begin."""

import tempfile
from pathlib import Path

import typer


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise unless a file can be written where an option says. The folder is created.

    Raises:
        typer.BadParameter: no file can be created in its folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from None
