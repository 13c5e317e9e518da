"""The plugin for axolotl; configure it with ``plugins: [onepass.integrations.axolotl.OnepassPlugin]``."""

import logging
from contextlib import ExitStack
from typing import Any, ClassVar

from onepass.core.extras import needed_by
from onepass.integrations.patching import Patch, patch

with needed_by("axolotl's plugin", "axolotl"):
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel

LOG = logging.getLogger(__name__)


class OnepassArgs(BaseModel):
    """The options that the plugin adds to the configuration.

    Attributes:
        onepass_autotune_store: the path of a store; training runs in an `onepass.autotune.session` with it.
        onepass_autotune_report: true to log the configurations that Triton's autotuner selects in the first steps, or
            the path of a JSON Lines file to write them to.
    """

    onepass_autotune_store: str | None = None
    onepass_autotune_report: bool | str | None = None


class OnepassPlugin(BasePlugin):
    """Apply `onepass.patch()` from before the model is loaded until training is over.

    Attributes:
        patch: the active `Patch`, or None outside of that time.
        callbacks: instances of `transformers.TrainerCallback` to add to the trainer. An attribute of the class, since
            axolotl makes the instance.
    """

    patch: Patch | None = None
    callbacks: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.until_unloaded = ExitStack()

    def get_input_args(self) -> str:
        return "onepass.integrations.axolotl.OnepassArgs"

    def pre_model_load(self, cfg: Any) -> None:
        if self.patch is not None:
            return
        self.patch = self.until_unloaded.enter_context(patch(strict=False))
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
