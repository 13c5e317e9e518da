"""Another library's autotuned kernels, as fresh as in another process, and a record of one."""

import importlib.util
import uuid
from pathlib import Path

from onepass.autotune import AutotuneRecord
from onepass.autotune.record import here

SOURCE = Path(__file__).with_name("autotuned.py")


def load(source=SOURCE, name=None):
    """The file as a fresh module, as in another process."""
    spec = importlib.util.spec_from_file_location(name or f"library_{uuid.uuid4().hex}", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_record(**fields):
    some = dict(kernel="k", module="local", source_hash="0" * 64, key={"n": 64}, dtypes=[], config={"BLOCK": 8},
                milliseconds=1.0)  # fmt: skip
    return AutotuneRecord(**(some | here() | fields))
