"""What the commands check of a file that they will write, before they begin."""

import tempfile
from pathlib import Path

import typer


def check_writable(path: Path, hint: str = "--out") -> None:
    """Raise unless a file can be written there. The folder is created.

    Raises:
        typer.BadParameter: the path is a folder, or no file can be created in its folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=hint) from None
    if path.is_dir():
        raise typer.BadParameter(f"expected a file, got the folder {path}", param_hint=hint)
