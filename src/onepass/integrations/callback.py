"""Callbacks of a `transformers.Trainer`: a patch for the duration of its run, and balanced experts."""

import logging
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from onepass.core.checks import check_bool, check_number
from onepass.core.extras import needed_by
from onepass.integrations.patching import Patch, Restorable, check_libraries, patch
from onepass.moe.selection_bias import ExpertCounts, count_experts

with needed_by("callbacks of a Trainer", "transformers"):
    from transformers import TrainerCallback

LOG = logging.getLogger(__name__)


class OnepassCallback(TrainerCallback, Restorable):
    """Call `onepass.patch` when training begins, log what is replaced, and restore it when training ends.

    If training raises an error, the patch stays in place until `restore` or the end of a ``with`` block.

    Args:
        libraries, strict: as in `onepass.patch`.

    Raises:
        TypeError, ValueError, ModuleNotFoundError: as `onepass.patch`.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[OnepassCallback()])
        trainer.train()
    """

    def __init__(self, *libraries: str, strict: bool = True) -> None:
        check_libraries(libraries)
        self.libraries, self.strict = libraries, check_bool(strict, "strict")
        self.patched: Patch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.restore()
        self.patched = patch(*self.libraries, strict=self.strict)
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


class SelectionBiasCallback(TrainerCallback, Restorable):
    """Balance the experts of a mixture of experts without an auxiliary loss, by `onepass.moe.update_selection_bias`.

    The selection bias of every router is updated after each optimizer step. Tokens are counted by
    `onepass.moe.count_experts`, in all forward passes of the step, and summed over all processes. Passes without
    gradients count too if the model is in training mode, as in TRL's GRPO: completions that the trainer generates
    itself, and the log-probs of the old policy. If training raises an error, tokens are counted until `restore` or the
    end of a ``with`` block.

    Args:
        rate: by how much a bias changes in a step; 0.001 in DeepSeek-V3.
        replayed: see `onepass.moe.count_experts`.

    Raises:
        TypeError, ValueError: the rate is not a number of at least 0. When training begins: as `count_experts`, or the
            trainer has two such callbacks, which would both change the biases.

    Example::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[SelectionBiasCallback(0.001)])
        trainer.train()
    """

    def __init__(self, rate: float, *, replayed: bool = True) -> None:
        self.rate, self.replayed = check_number(rate, "rate", 0, open_low=False), check_bool(replayed, "replayed")
        self.counts: ExpertCounts | None = None
        self.state: Any = None  # of the run that counts tokens
        self.stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.restore()
        other = _last.get(model) if isinstance(model, nn.Module) else None
        if other is not None and other.state is state:
            raise ValueError("callbacks: expected one SelectionBiasCallback, got two, which would change biases twice")
        if other is not None:  # of a run that has ended in an error
            other.restore()
        self.counts = self.stack.enter_context(count_experts(model, replayed=self.replayed))
        self.state, _last[model] = state, self

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.counts is not None:
            self.counts.update(self.rate, dist.group.WORLD if dist.is_initialized() else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """End the counting, if it has begun."""
        self.counts = self.state = None
        self.stack.close()


_last: WeakKeyDictionary[Any, SelectionBiasCallback] = WeakKeyDictionary()  # by model, the callback of its last run
