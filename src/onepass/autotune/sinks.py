"""Sinks of an `AutotuneReportCallback`, which are callables that take a list of records: log, file, OpenTelemetry."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onepass.autotune.record import AutotuneRecord
from onepass.core.checks import check_integer, check_path, described
from onepass.core.extras import needed_by

Sink = Callable[[Sequence[AutotuneRecord]], Any]


def check_has(value: Any, name: str, method: str, wanted: str) -> None:
    """Raise unless ``value`` is None or has the method."""
    if value is not None and not hasattr(value, method):
        raise TypeError(f"{name}: expected {wanted} or None, got {described(value)}")


class LogSink:
    """Log one line per record.

    Args:
        logger: None for ``onepass.autotune``.
        level: a number, as `logging.INFO`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        check_has(logger, "logger", "log", "a logging.Logger")
        self.logger, self.level = logger or logging.getLogger("onepass.autotune"), check_integer(level, "level", 0)

    def __call__(self, records: Sequence[AutotuneRecord]) -> None:
        for r in records:
            time = "" if r.milliseconds is None else f", {r.milliseconds:.4f} ms"
            ahead = "" if r.margin is None else f", the next {r.margin:.1%} slower"
            self.logger.log(
                self.level, "autotuned %s.%s %s: %s%s%s", r.module, r.kernel, json.dumps(r.key), json.dumps(r.config),
                time, ahead,
            )  # fmt: skip


class JSONLSink:
    """Append one line of JSON per record to a file.

    Args:
        path: of the file, which is created at the first records.

    Raises:
        TypeError: it is not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(check_path(path)).absolute()  # whatever the current folder becomes

    def __call__(self, records: Sequence[AutotuneRecord]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.writelines(json.dumps(r.to_json()) + "\n" for r in records)


class OpenTelemetrySink:
    """Emit a span ``onepass.autotune`` with one event per record.

    Needs the extra ``opentelemetry``. OpenTelemetry drops the span unless an SDK is configured.

    Args:
        tracer: an OpenTelemetry tracer; None for that of the global provider.

    Raises:
        TypeError: it is not a tracer.
        ModuleNotFoundError: OpenTelemetry is not installed.
    """

    def __init__(self, tracer: Any = None) -> None:
        check_has(tracer, "tracer", "start_as_current_span", "an OpenTelemetry tracer")
        with needed_by("OpenTelemetrySink", "opentelemetry"):
            from opentelemetry import trace
        self.tracer = tracer or trace.get_tracer("onepass")

    def __call__(self, records: Sequence[AutotuneRecord]) -> None:
        with self.tracer.start_as_current_span("onepass.autotune") as span:
            for r in records:
                plain = {n: v for n, v in r.to_json().items() if isinstance(v, str | int | float)}
                given = {n: json.dumps(v) for n, v in (("key", r.key), ("dtypes", r.dtypes), ("config", r.config))}
                span.add_event("autotuned", plain | given)
