"""`onepass.patch` without a change to user code: the environment variable ``ONEPASS_PATCH``."""

import os
from collections.abc import Sequence

from onepass.integrations.patching import LIBRARIES, NAMES, Patch, check_installed, is_installed, patch

VARIABLE = "ONEPASS_PATCH"


def libraries_asked_for() -> Sequence[str] | None:
    """The libraries that ``ONEPASS_PATCH`` names: all that are installed for ``1``, none for ``0``; None if not set.

    Raises:
        ValueError: another value.
        ModuleNotFoundError: a named library is not installed.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return None
    if value == "0":
        return ()
    if value == "1":
        return [name for name in LIBRARIES if is_installed(name)]
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in NAMES:
            known = ", ".join(map(repr, NAMES))
            raise ValueError(f"{VARIABLE}: expected 0, 1, or any of {known} separated by commas, got {value!r}")
        check_installed(name, VARIABLE)
    return names


def patch_process() -> Patch | None:
    """Apply `onepass.patch` to the libraries that ``ONEPASS_PATCH`` names, until the process ends; None if to none.

    A library of a version that is not supported is left alone with a warning, since importing onepass must not fail.
    """
    names = libraries_asked_for()
    return patch(*names, strict=False) if names else None
