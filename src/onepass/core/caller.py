"""Where a warning is shown: at the code of the user."""

import sys


def stacklevel_outside(*prefixes: str) -> int:
    """The ``stacklevel``, for a warning of the caller, of the first frame whose module has none of these prefixes."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__', '')}.".startswith(prefixes):
        level, frame = level + 1, frame.f_back
    return level
