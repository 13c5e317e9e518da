"""Replacements for TRL's fused heads, which compute log-probs from hidden states, and for the loss of SFT."""

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import Adapter, is_debugging
from onepass.core.dispatch import check_upstream
from onepass.integrations.adapters import adapter_factors, adapter_reason, is_adapted
from onepass.integrations.patching import is_replaced, original
from onepass.logits.linear import LinearLogits
from onepass.logits.source import inputs_for, options_for
from onepass.losses import log_probs

FUSED = "trl.kernels.chunked_logprob"
FUSED_HEAD = "trl.trainer.utils", "add_fused_lm_head"
SFT_LOSS = "trl.trainer.sft_trainer", "SFTTrainer.compute_loss"
TOKENS = 4096  # of a tile of TRL's own
METRICS = {"log_sum_sq_probs": "log_sum_sq_probs", "mean_logits": "mean_logit", "is_top1": "is_top1"}
FIELDS = {"log_probs": "log_probs", "entropy": "entropy"} | METRICS  # TRL's outputs, in its order, and our fields


class TwiceRounded(LinearLogits):
    """Adds the bias to the rounded product, as TRL's fused head does; a linear layer rounds only their sum."""

    round_before_bias = True


class Outputs(tuple[str, ...]):
    """The ``outputs`` of a fused head, which TRL passes on as they are, with what it does not pass on.

    It is an error if TRL's own kernel looks its names up, which would ignore the adapter, or that logits are float32.

    Attributes:
        float32: whether the logits are float32.
        model: a model whose head has an adapter, or None.
    """

    float32 = False
    model: Any = None

    def __contains__(self, name: object) -> bool:
        if is_replaced(FUSED, "ChunkedLogProbFunction") or not (self.float32 or self.adapted_head()):
            return super().__contains__(name)
        what = "cast_lm_head_to_fp32" if self.float32 else "an adapter on the output embedding"
        raise RuntimeError(
            f"model: expected onepass.patch('trl') to be in effect, as it was when its trainer was created with {what},"
            " which TRL's own kernel would ignore; train and evaluate under the patch"
        )

    def adapted_head(self) -> Any:
        """The head, if an adapter of PEFT is on it now."""
        head = None if self.model is None else self.model.get_output_embeddings()
        is_layer = head is not None and isinstance(head, sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer)
        return head if is_layer else None

    def adapter(self, weight: Tensor) -> Adapter | None:
        """``(A, B, scaling)`` of the adapter of the head, which has this weight; None if it has been merged."""
        head = self.adapted_head()
        if head is None:
            return None
        if not is_adapted(head):
            raise ValueError(f"model: expected plain LoRA on the output embedding, got {type(head).__name__}")
        if type(head.weight) is type(weight) and head.weight is not weight:  # it is gathered if it was a DTensor
            raise RuntimeError("model: expected the model that add_fused_lm_head was called with, got a copy of it")
        reason = adapter_reason(head)
        if reason:
            raise ValueError(f"model: expected plain LoRA on the output embedding, but {reason}")
        return adapter_factors(head)


def add_fused_lm_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: tuple[str, ...] = ("log_probs",)
) -> None:
    """TRL's own function, except for ``cast_lm_head_to_fp32`` and for a LoRA adapter on the head.

    If the hidden states are bfloat16 or float16, so are the operands of the GEMMs, which accumulate in float32 and do
    not round the logits. A float32 weight is split into a sum of two such weights. TRL multiplies float32 copies of the
    hidden states. A LoRA adapter on the head, which TRL rejects, is used as its two factors.
    """
    adapted = is_adapted(model.get_output_embeddings())
    if adapted and cast_lm_head_to_fp32:
        raise ValueError("cast_lm_head_to_fp32: expected False with a PEFT adapter on the output embedding, got True")
    if adapted or cast_lm_head_to_fp32:
        outputs = Outputs(outputs)
        outputs.float32, outputs.model = cast_lm_head_to_fp32, model if adapted else None
    original(*FUSED_HEAD)(model, temperature, False, outputs)


class _Refused(type):
    def __instancecheck__(cls, layer: Any) -> bool:
        is_layer = isinstance(layer, sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer)
        return is_layer and not (is_adapted(layer) and not adapter_reason(layer, trained=True))


class RefusedAdapter(metaclass=_Refused):
    """In place of PEFT's `BaseTunerLayer` where a trainer refuses it as a head: all but a plain LoRA are instances."""


class ChunkedLogProbFunction:
    """The statistics of TRL's fused heads, computed by a linear head that reads each logit once."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *METRICS),
    ) -> tuple[Tensor | None, ...]:
        """``(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1)`` of hidden states ``(N, H)``; None for those
        not in ``outputs``. The size of tiles follows from memory, not from ``chunk_size``."""
        parts, wide, lora = [], False, None
        if isinstance(outputs, Outputs):
            wide, lora = outputs.float32, outputs.adapter(weight)
        outputs = tuple(outputs)
        of_sum = _valid_rows(targets)
        for rows, target in _parts(hidden, targets):
            if wide:
                head = _float32_head(rows, weight, bias)
            else:
                head = linear_head(rows, weight, bias, TwiceRounded, lora)
            transform = float(temperature), final_logit_softcapping, float(logit_scale)
            wanted = [ours for theirs, ours in FIELDS.items() if theirs in outputs or theirs == "log_probs"]
            if of_sum is not None and len(rows) == len(hidden) and head.is_eager and head.requires_grad:
                found = fields_and_sum(" ".join(wanted), head, target, of_sum, transform)
            else:
                found = log_probs.compute_fields(" ".join(wanted), head, target, transform=transform)
            parts.append(tuple([found.get(name) for name in FIELDS.values()]))
        return parts[0] if len(parts) == 1 else tuple([p[0] if p[0] is None else torch.cat(p) for p in zip(*parts)])


_valid: ContextVar[Tensor | None] = ContextVar("_valid", default=None)  # see `sft_loss`


def sft_loss(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
    """`SFTTrainer.compute_loss`. It only sums the log-probs, so that the fused head computes its gradient at once."""
    labels = inputs.get("shift_labels")
    if labels is None and inputs.get("labels") is not None:
        labels = inputs["labels"][..., 1:]
    plain = labels is not None and self.args.loss_type == "nll"
    token = _valid.set(labels != -100 if plain else None)
    try:
        return original(*SFT_LOSS)(self, model, inputs, *args, **options)
    finally:
        _valid.reset(token)


def _valid_rows(targets: Tensor) -> Tensor | None:
    """Which rows the loss of `sft_loss` sums, if it is called from there; None if it is not known.

    TRL leaves the other rows out where it has Triton, and gives them a target elsewhere. With virtual tokens, as PEFT's
    prompt tuning has them, there are more rows than the trainer has labels.
    """
    valid = None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _valid.get()
    leaves_out = getattr(sys.modules.get(FUSED_HEAD[0]), "_use_triton", None)
    if valid is None or leaves_out is None:
        return None
    if leaves_out(targets.device):
        return targets.new_ones(targets.shape, dtype=torch.bool)
    return valid.reshape(-1).to(targets.device) if valid.numel() == len(targets) else None


def fields_and_sum(
    names: str, head: LinearLogits, target: Tensor, valid: Tensor, transform: tuple[Any, ...]
) -> dict[str, Tensor]:
    """`log_probs.compute_fields`, of which only the sum of the log-probs has a gradient, which takes three GEMMs.

    The gradient of the entropy is an error. The other fields have none in TRL either.
    """
    options = options_for(names, *transform)
    inputs, options = inputs_for(head, options, target, valid)
    found: dict[str, Tensor] = {}

    def log_probs_of(fields: dict[str, Tensor], rows: Tensor) -> Tensor:
        for name, field in fields.items():
            found.setdefault(name, field.new_zeros(len(target))).index_copy_(0, rows, field.detach())
        return fields["log_probs"]

    rows = torch.arange(len(target), device=target.device)
    shown = [name for name in names.split() if name != "log_probs"]
    total = head.loss(log_probs_of, inputs, options, (rows,), 1.0, linear=True, shown=shown)
    found = {name: found.get(name, total.new_zeros(len(target))) for name in names.split()}
    if "entropy" in found:
        found["entropy"] = _WithoutGradient.apply(total, found["entropy"])
    return found | {"log_probs": _OfSum.apply(total, found["log_probs"], valid)}


class _OfSum(torch.autograd.Function):
    """The log-probs of all rows, with the gradient of the total of the ``valid`` ones.

    All of these must have the same upstream gradient. If they have not, it is an error on a CPU and in debug mode; else
    the gradient is NaN, since a check would synchronize.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, values: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(valid)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        (valid,) = ctx.saved_tensors
        if not len(grad):
            return grad.sum(), None, None
        low, high = grad.where(valid, torch.inf).amin(), grad.where(valid, -torch.inf).amax()
        if (grad.is_cpu or is_debugging()) and low < high:
            raise RuntimeError("log_probs: expected a loss that sums them, as that of SFT, got another gradient")
        return low.where(low == high, torch.nan).masked_fill(low > high, 0.0), None, None


class _WithoutGradient(torch.autograd.Function):
    """The entropies of all rows, which are not differentiated: an error in the backward, where it would be lost."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "entropy: expected a loss that does not depend on it, as that of SFTTrainer with loss_type='nll', "
            "got its gradient; do not patch 'trl' for another loss"
        )


def _parts(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All tokens at once, unless the user has lowered TRL's ``TOKEN_CHUNK_SIZE``: then that many at a time."""
    tokens = getattr(sys.modules.get(FUSED), "TOKEN_CHUNK_SIZE", TOKENS)
    if tokens >= TOKENS:
        return iter([(hidden, targets)])
    return zip(hidden.split(tokens), targets.split(tokens))


def linear_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: type[LinearLogits] = LinearLogits,
    lora: Adapter | None = None,
) -> LinearLogits:  # fmt: skip
    """A head in the dtype of the hidden states or of autocast, as a linear layer in mixed-precision training."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return kind(hidden, weight, bias, lora=lora)


def _float32_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LinearLogits:
    """A head whose logits are float32.

    Its GEMMs have the dtype of the hidden states. The remainder that is lost when a float32 weight is rounded to this
    dtype is multiplied too, except for a frozen head, whose weight TRL has cast from this dtype.
    """
    half = hidden.dtype.itemsize == 2
    with torch.autocast(hidden.device.type, hidden.dtype if half else None, enabled=half):
        head = LinearLogits(hidden, weight, bias, logits_dtype=torch.float32 if half else None)
    head.exact_weight = weight.requires_grad
    return head
