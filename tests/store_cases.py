"""Files of the autotuner's store, exactly the warnings that they give, and a process that imports onepass anew."""

import contextlib
import os
import warnings

import forks


def written(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


VERSIONED = '{{"format": "onepass autotune store", "version": {}, "records": []}}'


@contextlib.contextmanager
def warned(*expected):
    """Exactly these, and each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [(w.category, str(w.message)) for w in caught]
    assert len(found) == len(expected), found
    assert all(c is RuntimeWarning and text in message for (c, message), text in zip(found, expected)), found


def nested(levels):
    return "[" * levels + "]" * levels


def imported(code, *arguments, folder, **environment):
    """What a process prints that imports onepass anew, and runs no kernel."""
    left = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forks.run(code, *arguments, folder=folder, environment=left | environment, timeout=120)
    return done.returncode, done.stdout, done.stderr
