"""`OnepassCallback`: a patch for the duration of the training run of a `transformers.Trainer`."""

import logging
from typing import Any

from transformers import TrainerCallback

from onepass.integrations.patching import Patch, Restorable, check_libraries, patch

LOG = logging.getLogger(__name__)


class OnepassCallback(TrainerCallback, Restorable):
    """Call `onepass.patch` when training begins, log what is replaced, and restore it when training ends.

    If training raises an error, the patch stays in place until `restore` or the end of a ``with`` block.

    Args:
        libraries: those of `onepass.patch`.

    Raises:
        ValueError, ModuleNotFoundError: as `onepass.patch`.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[OnepassCallback()])
        trainer.train()
    """

    def __init__(self, *libraries: str) -> None:
        check_libraries(libraries)
        self.libraries = libraries
        self.patched: Patch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.restore()
        self.patched = patch(*self.libraries)
        if state.is_world_process_zero:
            for place in (*self.patched.replaced, *self.patched.kept):
                LOG.info("%s", place)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore what is replaced, if anything is."""
        if self.patched is not None:
            self.patched.restore()
            self.patched = None
