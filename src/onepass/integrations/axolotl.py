"""The axolotl plugin: ``plugins: [onepass.integrations.axolotl.OnepassPlugin]`` in the configuration."""

import logging
from contextlib import ExitStack
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from onepass.integrations.patching import Patch, patch

LOG = logging.getLogger(__name__)


class OnepassArgs(BaseModel):
    """What the plugin adds to the configuration.

    Attributes:
        onepass_autotune_store: the path of a store: training runs in an `onepass.autotune.session`.
        onepass_autotune_report: true to log what Triton's autotuner chose in the first steps, or the path of a file
            that gets it as lines of JSON.
    """

    onepass_autotune_store: str | None = None
    onepass_autotune_report: bool | str | None = None


class OnepassPlugin(BasePlugin):
    """`onepass.patch()` from before the model is loaded until its training is over.

    Attributes:
        patch: what is replaced, or None outside of that time.
        callbacks: of `transformers.TrainerCallback`, added to the trainer.
    """

    patch: Patch | None = None

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Any] = []
        self.until_unloaded = ExitStack()

    def get_input_args(self) -> str:
        return "onepass.integrations.axolotl.OnepassArgs"

    def pre_model_load(self, cfg: Any) -> None:
        if self.patch is not None:
            return
        self.patch = self.until_unloaded.enter_context(patch())
        LOG.info("onepass:\n%s", self.patch)
        if cfg.get("onepass_autotune_store"):
            from onepass.autotune import session

            self.until_unloaded.enter_context(session(cfg["onepass_autotune_store"]))

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        report = cfg.get("onepass_autotune_report")
        if not report:
            return list(self.callbacks)
        from onepass.autotune import AutotuneReportCallback, JSONLSink, LogSink

        return [*self.callbacks, AutotuneReportCallback([LogSink(LOG) if report is True else JSONLSink(report)])]

    def post_train_unload(self, cfg: Any) -> None:
        self.until_unloaded.close()
        self.patch = None
