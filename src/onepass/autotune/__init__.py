"""Collect, report, store and reuse the configurations that Triton's autotuner selects. See docs/autotune.md.

Nothing here runs unless it is called, and launching a kernel takes no longer.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("triton") is None:
    raise ModuleNotFoundError("onepass.autotune: triton is not installed; it is available on Linux only", name="triton")

from onepass.autotune.collection import collect
from onepass.autotune.record import AutotuneRecord
from onepass.autotune.session import session
from onepass.autotune.sinks import JSONLSink, LogSink, OpenTelemetrySink
from onepass.autotune.store import ConfigStore
from onepass.core.extras import needed_by

__all__ = [
    "AutotuneRecord",
    "AutotuneReportCallback",
    "ConfigStore",
    "JSONLSink",
    "LogSink",
    "OpenTelemetrySink",
    "collect",
    "session",
]

if TYPE_CHECKING:
    from onepass.autotune.callback import AutotuneReportCallback
else:
    if find_spec("transformers") is None:
        __all__.remove("AutotuneReportCallback")

    def __getattr__(name: str) -> Any:
        if name == "AutotuneReportCallback":  # its base class is in transformers
            with needed_by(name, "transformers"):
                from onepass.autotune.callback import AutotuneReportCallback
            return AutotuneReportCallback
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
