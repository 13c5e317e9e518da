"""The axolotl plugin: ``plugins: [onepass.integrations.axolotl.OnepassPlugin]`` in the configuration."""

import logging
from typing import Any

from axolotl.integrations.base import BasePlugin

from onepass.integrations.patching import Patch, patch

LOG = logging.getLogger(__name__)


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

    def pre_model_load(self, cfg: Any) -> None:
        if self.patch is None:
            self.patch = patch()
            LOG.info("onepass:\n%s", self.patch)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return list(self.callbacks)

    def post_train_unload(self, cfg: Any) -> None:
        if self.patch is not None:
            self.patch.restore()
            self.patch = None
