"""Packages that only an extra of onepass installs."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_by(what: str, extra: str) -> Iterator[None]:
    """Imports that ``what`` needs.

    Raises:
        ModuleNotFoundError: a package is missing. The message names the ``extra`` that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{what}: {error.name} is not installed; pip install 'onepass[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from None
