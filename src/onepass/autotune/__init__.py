"""What Triton's autotuner chose: collect it, report it, keep it, use it again. See docs/autotune.md.

Nothing here runs unless it is asked for, and nothing of it is in the way of a kernel that is launched.
"""

from typing import TYPE_CHECKING, Any

from onepass.autotune.collection import collect
from onepass.autotune.record import AutotuneRecord
from onepass.autotune.session import session
from onepass.autotune.sinks import JSONLSink, LogSink, OpenTelemetrySink
from onepass.autotune.store import ConfigStore

if TYPE_CHECKING:
    from onepass.autotune.callback import AutotuneReportCallback

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


def __getattr__(name: str) -> Any:
    if name == "AutotuneReportCallback":  # its base class is transformers'
        from onepass.autotune.callback import AutotuneReportCallback

        return AutotuneReportCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
