"""The help text of `onepass run`. `onepass.cli.main` passes a script to `script.py` without parsing its options."""

from typing import Annotated

import typer

from onepass.cli.script import USAGE, patch_and_run


def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A script and its arguments.", show_default=False),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="Instead of a script, a module; then its arguments.")
    ] = None,
) -> None:
    """Run a Python script or module whose transformers and TRL use onepass; the script does not change.

    onepass.patch() is called first, and one line on standard error says what was patched. ONEPASS_PATCH=transformers
    patches that library only, and ONEPASS_PATCH=0 none. All that follows the script or module are its own arguments.

    With several processes: torchrun -m onepass run train.py, or accelerate launch -m onepass run train.py.
    """
    if module is None and not script:
        raise typer.BadParameter(USAGE)
    patch_and_run([*([] if module is None else ["-m", module]), *(script or [])])
