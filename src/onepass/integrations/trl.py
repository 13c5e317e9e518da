"""Replacements for TRL's log-probs, entropy, linear heads and distillation; see `onepass.patch`."""

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from onepass.backend import is_debugging
from onepass.core.checks import Adapter, check_number
from onepass.core.dispatch import check_upstream
from onepass.integrations.adapters import adapter_factors, adapter_reason, is_adapted
from onepass.integrations.patching import Target, original, parameters
from onepass.logits.linear import LinearLogits
from onepass.logits.source import inputs_for, options_for
from onepass.losses import log_probs
from onepass.losses.kl_div import kl_div
from onepass.losses.reduction import reduced
from onepass.losses.statistics import softmax_statistics

FUSED = "trl.kernels.chunked_logprob"
FUSED_HEAD = "trl.trainer.utils", "add_fused_lm_head"
TOKENS = 4096  # of a tile of TRL's own
METRICS = {"log_sum_sq_probs": "log_sum_sq_probs", "mean_logits": "mean_logit", "is_top1": "is_top1"}
FIELDS = {"log_probs": "log_probs", "entropy": "entropy"} | METRICS  # TRL's outputs, in its order, and our fields


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """`onepass.selective_log_softmax`; a ``row_mask`` of the shape ``(..., K)`` masks single results."""
    if _in_torch(logits):
        return _masked(_selected(_log_softmax(logits, temperature), index), row_mask)
    if row_mask is None or row_mask.dim() < logits.dim():
        return log_probs.selective_log_softmax(logits, index, temperature=temperature, row_mask=_bool(row_mask))
    return _masked(log_probs.selective_log_softmax(logits, index, temperature=temperature), row_mask)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """`onepass.entropy_from_logits`. It allocates no chunks, so ``chunk_size`` has no effect."""
    return _entropy(_log_softmax(logits)) if _in_torch(logits) else log_probs.entropy_from_logits(logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`onepass.selective_log_softmax_and_entropy`."""
    if _in_torch(logits):
        log_p = _log_softmax(logits, temperature)
        selected, entropy = _masked(_selected(log_p, index), row_mask), _masked(_entropy(log_p), row_mask)
    else:
        selected, entropy = log_probs.selective_log_softmax_and_entropy(
            logits, index, temperature=temperature, row_mask=_bool(row_mask)
        )
    return selected, entropy if entropy_requires_grad else entropy.detach()


def fused_log_probs_and_entropy(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`onepass.selective_log_softmax_and_entropy`, with the signature of TRL's own kernel."""
    return log_probs.selective_log_softmax_and_entropy(logits, index, temperature=temperature, row_mask=_bool(row_mask))


def _in_torch(logits: Tensor) -> bool:
    """Whether to use torch: for half precision on a CPU, TRL's tests require the rounding of torch's arithmetic."""
    return logits.is_cpu and logits.dtype in (torch.float16, torch.bfloat16)


def _log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    check_number(temperature, "temperature", 0)
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)


def _selected(log_p: Tensor, index: Tensor) -> Tensor:
    return log_p.gather(-1, index.view(*log_p.shape[:-1], -1)).view(index.shape)


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def _masked(result: Tensor, row_mask: Tensor | None) -> Tensor:
    return result if row_mask is None else result.masked_fill(row_mask == 0, 0.0)


class TwiceRounded(LinearLogits):
    """Adds the bias to the rounded product, as TRL's fused head does; a linear layer rounds only their sum."""

    round_before_bias = True


class Outputs(tuple[str, ...]):
    """The ``outputs`` of a fused head, which TRL passes on as they are, with what it does not pass on.

    Attributes:
        float32: whether the logits are float32.
        model: a model whose head has an adapter, or None.
    """

    float32 = False
    model: Any = None

    def adapter(self, weight: Tensor) -> Adapter | None:
        """``(A, B, scaling)`` of the adapter of the head, which has this weight."""
        head = None if self.model is None else self.model.get_output_embeddings()
        if head is None:
            return None
        if type(head.weight) is type(weight) and head.weight is not weight:  # it is gathered if it was a DTensor
            raise RuntimeError("model: expected the model that add_fused_lm_head was called with, got a copy of it")
        reason = adapter_reason(head)
        if reason:
            raise ValueError(f"model: expected plain LoRA on the output embedding, but {reason}")
        return adapter_factors(head)


def add_fused_lm_head(
    model: Any, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: tuple[str, ...] = ("log_probs",)
) -> None:
    """TRL's own but for ``cast_lm_head_to_fp32``.

    Where the hidden states are bfloat16 or float16, so are the factors of the GEMMs, which accumulate in float32 and do
    not round the logits. A float32 weight is two such factors. TRL multiplies float32 copies of the hidden states.

    A LoRA adapter on the head, which TRL refuses, is used as its factors.
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
        return is_layer and not (is_adapted(layer) and not adapter_reason(layer))


class RefusedAdapter(metaclass=_Refused):
    """In place of PEFT's `BaseTunerLayer` where a trainer refuses it as a head: all but a plain LoRA are instances."""


class ChunkedLogProbFunction:
    """The statistics of TRL's fused heads, from one read of the logits of a linear head."""

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
            head = _float32_head(rows, weight, bias) if wide else _head(rows, weight, bias, TwiceRounded, lora)
            transform = float(temperature), final_logit_softcapping, float(logit_scale)
            wanted = [ours for theirs, ours in FIELDS.items() if theirs in outputs or theirs == "log_probs"]
            if of_sum is not None and len(rows) == len(hidden) and head.is_eager and head.requires_grad:
                found = fields_and_sum(" ".join(wanted), head, target, of_sum, transform)
            else:
                found = log_probs.fields_of_rows(" ".join(wanted), head, target, transform=transform)
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

    TRL leaves the other rows out on a GPU, and gives them a target elsewhere.
    """
    valid = None if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _valid.get()
    if valid is None or valid.numel() == len(targets):
        return None if valid is None else valid.reshape(-1).to(targets.device)
    return targets.new_ones(targets.shape, dtype=torch.bool) if targets.is_cuda else None


def fields_and_sum(
    names: str, head: LinearLogits, target: Tensor, valid: Tensor, transform: tuple[Any, ...]
) -> dict[str, Tensor]:
    """`log_probs.fields_of_rows`, of which only the sum of the log-probs has a gradient, which takes three GEMMs."""
    options = options_for(names, *transform)
    inputs, options = inputs_for(head, options, target, valid)
    found: dict[str, Tensor] = {}

    def log_probs_of(fields: dict[str, Tensor], rows: Tensor) -> Tensor:
        for name, field in fields.items():
            found.setdefault(name, field.new_zeros(len(target))).index_copy_(0, rows, field.detach())
        return fields["log_probs"]

    rows = torch.arange(len(target), device=target.device)
    total = head.loss(log_probs_of, inputs, options, (rows,), 1.0, linear=True)
    found = {name: found.get(name, total.new_zeros(len(target))) for name in names.split()}
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


def _parts(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All tokens at once, unless the user has lowered TRL's ``TOKEN_CHUNK_SIZE``: then that many at a time."""
    tokens = getattr(sys.modules.get(FUSED), "TOKEN_CHUNK_SIZE", TOKENS)
    if tokens >= TOKENS:
        return iter([(hidden, targets)])
    return zip(hidden.split(tokens), targets.split(tokens))


def chunked_cross_entropy_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    chunk_size: int,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    final_logit_softcapping: float | None = None,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next token's cross-entropy of a linear head, the number of tokens that are its argmax, the sum of the
    entropies, and the number of valid tokens. ``labels`` are shifted here, ``shift_labels`` are shifted already."""
    target = shift_labels
    if target is None:
        if labels is None:
            raise ValueError("At least one of labels and shift_labels is expected, got neither")
        hidden_states, target = hidden_states[..., :-1, :], labels[..., 1:]
    valid = target != -100
    logits = _head(hidden_states, lm_head_weight, lm_head_bias)
    s = softmax_statistics(
        logits, target.where(valid, 0), row_mask=valid, metrics=["is_top1"],
        softcap=final_logit_softcapping, logit_scale=float(logit_scale),
    )  # fmt: skip
    loss = reduced(logits, -s.log_probs, valid, "mean", num_items_in_batch)
    return loss, s.is_top1.sum().float(), s.entropy.detach().sum(), valid.sum()  # type: ignore[union-attr]


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`onepass.kl_div` of linear heads over the rows of ``completion_mask``, the sum of the student's entropies, and
    the number of rows.

    ``beta`` is that of ``direction="jsd"``. A logit scale multiplies the hidden states and the bias.
    """
    student = _scaled(student_hidden_states, student_lm_head_weight, student_lm_head_bias, student_logit_scale)
    teacher_bias = None if teacher_lm_head_bias is None else teacher_lm_head_bias.detach()
    teacher = _scaled(
        teacher_hidden_states.detach(), teacher_lm_head_weight.detach(), teacher_bias, teacher_logit_scale
    )
    mask = completion_mask != 0
    loss = kl_div(
        student, teacher, row_mask=mask, direction="jsd", beta=float(beta), temperature=float(temperature),
        softcap=student_final_logit_softcapping, teacher_softcap=teacher_final_logit_softcapping,
        vocab_size=None if teacher.shape[-1] == student.shape[-1] else student.shape[-1],
        reduction="mean", num_items=num_items_in_batch,
    )  # fmt: skip
    with torch.no_grad():
        entropy = log_probs.entropy_from_logits(
            student, temperature=float(temperature), softcap=student_final_logit_softcapping, row_mask=mask
        )
    return loss, entropy.sum(), mask.sum()


def _bool(row_mask: Tensor | None) -> Tensor | None:
    return None if row_mask is None else row_mask != 0


def _head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: type[LinearLogits] = LinearLogits,
    lora: Adapter | None = None,
) -> LinearLogits:  # fmt: skip
    """A head in the dtype of the hidden states or of autocast, as a linear layer in mixed-precision training."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return kind(hidden, weight, bias, lora=lora)


def _float32_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LinearLogits:
    """A head whose logits are float32.

    Its GEMMs have the dtype of the hidden states. What rounding takes from a float32 weight is multiplied too, but for
    that of a frozen head, which TRL has cast from this dtype.
    """
    half = hidden.dtype.itemsize == 2
    with torch.autocast(hidden.device.type, hidden.dtype if half else None, enabled=half):
        head = LinearLogits(hidden, weight, bias, logits_dtype=torch.float32 if half else None)
    head.exact_weight = weight.requires_grad
    return head


def _scaled(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> LinearLogits:
    if scale == 1.0:
        return _head(hidden, weight, bias)
    return _head(hidden * scale, weight, None if bias is None else bias * scale)


SFT_LOSS = "trl.trainer.sft_trainer", "SFTTrainer.compute_loss"
UTILS, SFT, DISTILLATION = "trl.trainer.utils", "trl.trainer.sft_trainer", "trl.trainer.distillation_trainer"
TARGETS = [
    Target(
        UTILS, "selective_log_softmax", selective_log_softmax,
        ("logits, index", "logits, index, temperature, row_mask"), since="0.29",
    ),
    Target(UTILS, "entropy_from_logits", entropy_from_logits, ("logits, chunk_size",), since="0.29"),
    Target(
        UTILS, "selective_log_softmax_and_entropy", selective_log_softmax_and_entropy,
        ("logits, index, entropy_requires_grad, temperature, row_mask",), since="1.14",
    ),
    Target(
        "trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy", fused_log_probs_and_entropy,
        ("logits, index, temperature, row_mask",), since="1.16",
    ),
    Target(
        FUSED, "ChunkedLogProbFunction", ChunkedLogProbFunction,
        ("ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs",),
        since="1.15", method="forward",
    ),
    Target(*FUSED_HEAD, add_fused_lm_head, ("model, temperature, cast_lm_head_to_fp32, outputs",), since="1.15"),
    Target(
        *SFT_LOSS, sft_loss, ("self, model, inputs, return_outputs, num_items_in_batch",), since="1.16",
    ),
    *(
        Target(f"trl.trainer.{name}_trainer", "BaseTunerLayer", RefusedAdapter, ("",), since="1.16", alone=True)
        for name in (("sft", "dpo", "kto", "grpo", "rloo") if find_spec("peft") else ())
    ),
    Target(
        SFT, "_chunked_cross_entropy_loss", chunked_cross_entropy_loss, (parameters(chunked_cross_entropy_loss),),
        since="1.10", until="1.15",
    ),
    Target(
        DISTILLATION, "_chunked_divergence_loss", chunked_divergence_loss, (parameters(chunked_divergence_loss),),
        since="1.15",
    ),
]  # fmt: skip
