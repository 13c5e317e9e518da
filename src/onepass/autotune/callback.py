"""`AutotuneReportCallback`: report what Triton's autotuner selects in the first steps of a `transformers.Trainer`."""

import logging
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from onepass.autotune.collection import collect
from onepass.autotune.sinks import LogSink, Sink

LOG = logging.getLogger(__name__)
STEPS = 5


class AutotuneReportCallback(TrainerCallback):
    """Report the configurations that Triton's autotuner has selected, once in the first 5 training steps.

    The report is made after the first step in which there is something to report; each later step costs one test of a
    flag. Only the first of all processes reports. Nothing is reported unless this callback is added, and nothing leaves
    the machine unless a sink sends it.

    Args:
        sinks: callables that take a list of `AutotuneRecord`: ``LogSink()``, ``JSONLSink(path)``,
            ``OpenTelemetrySink()``, or any function. The default is ``LogSink()``: one log line per record, at level
            INFO of the logger ``onepass.autotune``.

    Example::

        trainer.add_callback(AutotuneReportCallback([JSONLSink("autotuned.jsonl")]))
    """

    def __init__(self, sinks: Sequence[Sink] | None = None) -> None:
        if sinks is not None and not (isinstance(sinks, list | tuple) and all(map(callable, sinks))):
            raise TypeError(f"sinks: expected a list of callables that take records, got {sinks!r}")
        self.sinks = [LogSink()] if sinks is None else list(sinks)
        self.looks = STEPS

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.looks:
            self._look(state)

    def _look(self, state: Any) -> None:
        self.looks = self.looks - 1 if state.is_world_process_zero else 0
        records = collect() if state.is_world_process_zero else []
        if records:
            self.looks = 0
        for sink in self.sinks if records else ():
            try:
                sink(records)
            except Exception:  # a report is no reason to lose a training run
                LOG.warning("autotune report: %r failed", sink, exc_info=True)
