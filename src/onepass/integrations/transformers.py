"""Replacements for the causal-LM loss and the MoE routers of transformers; see `onepass.patch`."""

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onepass.core.checks import described
from onepass.integrations.lazy_logits import asked_for, expecting_count, run
from onepass.integrations.patching import Target, extend, original
from onepass.integrations.routers import router_targets
from onepass.integrations.transformers_experts import (
    COMBINE,
    EXCHANGES,
    INTERFACE,
    PEFT,
    PEFT_MERGE,
    PEFT_PLAN,
    PEFT_UNMERGE,
    SINCE,
    activate_lora,
    combine_tokens,
    experts_forward,
    merge_lora,
    register,
    tp_plan_and_mesh,
    unmerge_lora,
)
from onepass.losses.next_token import mean_loss, next_tokens

__all__ = ["TARGETS", "ForCausalLMLoss", "register"]


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """`onepass.cross_entropy` of the next token, on the logits in their own dtype: no float32 copy.

    A model with a soft-cap has already applied it to the logits.

    Args:
        logits: ``(..., vocab_size)``.
        labels: ``(...)``, shifted here; not used with ``shift_labels``, which are shifted already.
        num_items_in_batch: divides the sum; without it the loss is the mean over the labels that are not ignored.
        kwargs: arguments of trainers that the loss does not depend on.

    Raises:
        TypeError, ValueError: the labels are no tensor, or not as many as the rows of the logits.
    """
    count: AbstractContextManager[None] = nullcontext()
    given, name = (labels, "labels") if shift_labels is None else (shift_labels, "shift_labels")
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {described(given)}")
    if shift_labels is None:
        shift_labels = next_tokens(labels, ignore_index)
        count = expecting_count(labels, ignore_index)
    logits = logits if logits.shape[-1] == vocab_size else logits.reshape(-1, vocab_size)
    rows = logits.shape[:-1]
    if given.numel() != prod(rows):  # `rows.numel()` would make dynamic sizes constants
        raise ValueError(f"{name}: expected {prod(rows)} labels for logits of {tuple(logits.shape)}, "
                         f"got shape {tuple(given.shape)}")  # fmt: skip
    target = shift_labels.reshape(rows).to(logits.device)
    with count:
        return mean_loss(logits, target, num_items_in_batch, ignore_index)


def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.Module.__call__`, whose heads return `onepass.LinearLogits` if the call trains; see `attach`."""
    return run(self, partial(nn.Module.__call__, self), args, kwargs)


def tuner_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`BaseTuner.forward` of PEFT, which calls ``forward`` of its model instead of the model."""
    return run(self.model, partial(original(*TUNER), self), args, kwargs)


def label_smoother(
    self: Any, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
) -> Tensor:
    """`LabelSmoother.__call__`: `onepass.cross_entropy` with label smoothing, which reads the logits once."""
    logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
    if shift_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    if labels.dim() == logits.dim():
        labels = labels.squeeze(-1)
    return mean_loss(logits, labels.to(logits.device), num_items_in_batch, self.ignore_index, self.epsilon)


def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.compute_loss`. With label smoothing it removes the labels from the model's inputs."""
    smooths = getattr(self, "label_smoother", None) is not None and getattr(self, "compute_loss_func", None) is None
    model = kwargs.get("model", args[0] if args else None)
    # The model returns no loss here, so that these wrappers look for tensors in its other outputs.
    looks = isinstance(model, DistributedDataParallel) and model.find_unused_parameters
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    looks = looks or isinstance(model, fsdp1)
    with asked_for() if smooths and not looks else nullcontext():
        return original(*TRAINER)(self, *args, **kwargs)


def post_init(self: Any) -> None:
    """`PreTrainedModel.post_init`. Afterwards the routers of a model are replaced whose code has just been imported."""
    original(*BUILT)(self)
    extend(BUILT, router_targets({type(module).__module__ for module in self.modules()}))


BUILT = "transformers.modeling_utils", "PreTrainedModel.post_init"
TRAINER = "transformers.trainer", "Trainer.compute_loss"
TUNER = "peft.tuners.tuners_utils", "BaseTuner.forward"


OF_PEFT = [
    Target(*TUNER, tuner_forward, ("self, args, kwargs",), since="0.17"),
    Target(*PEFT, activate_lora, ("self, active_adapters",), since="0.21"),
    Target(*PEFT_MERGE, merge_lora, ("self, safe_merge, adapter_names",), since="0.21"),
    Target(*PEFT_UNMERGE, unmerge_lora, ("self",), since="0.21"),
    Target(*PEFT_PLAN, tp_plan_and_mesh, ("model, current_key",), since="0.21.1"),
]
TARGETS = [
    Target(
        "transformers.loss.loss_utils", "ForCausalLMLoss", ForCausalLMLoss,
        ("logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, kwargs",), since="4.56",
    ),
    Target(*BUILT, post_init, ("self",), since="4.56"),
    Target(
        "transformers.modeling_utils", "PreTrainedModel.__call__", call, ("self, args, kwargs",), since="4.56",
        inherited=True,
    ),
    Target(
        *TRAINER, compute_loss,
        ("self, model, inputs, return_outputs, num_items_in_batch", "self, model, inputs, return_outputs"),
        since="4.56",
    ),
    Target(
        "transformers.trainer_pt_utils", "LabelSmoother.__call__", label_smoother,
        ("self, model_output, labels, shift_labels", "self, model_output, labels, shift_labels, num_items_in_batch"),
        since="4.56",
    ),
    Target(*COMBINE, combine_tokens, ("self, expert_output, state",), since=EXCHANGES[2]),
    Target(*INTERFACE, experts_forward, ("key, value",), since=SINCE, method="register", registered=True),
    *(OF_PEFT if find_spec("peft") else []),
]  # fmt: skip


def targets() -> list[Target]:
    """`TARGETS`, and the routers of all models whose code has been imported."""
    return TARGETS + router_targets(sys.modules)
