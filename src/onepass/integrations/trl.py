"""Replacements for TRL's log-probs, entropy and losses of linear heads; see `onepass.patch`.

Its fused heads are replaced in `trl_heads`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from onepass.core.checks import check_number
from onepass.integrations.patching import Target, parameters
from onepass.integrations.trl_heads import (
    FUSED,
    FUSED_HEAD,
    SFT_LOSS,
    ChunkedLogProbFunction,
    RefusedAdapter,
    add_fused_lm_head,
    linear_head,
    sft_loss,
)
from onepass.logits.linear import LinearLogits
from onepass.losses import log_probs
from onepass.losses.kl_div import kl_div
from onepass.losses.reduction import reduce_loss
from onepass.losses.statistics import softmax_statistics


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
    logits = linear_head(hidden_states, lm_head_weight, lm_head_bias)
    s = softmax_statistics(
        logits, target.where(valid, 0), row_mask=valid, metrics=["is_top1"],
        softcap=final_logit_softcapping, logit_scale=float(logit_scale),
    )  # fmt: skip
    loss = reduce_loss(logits, -s.log_probs, valid, "mean", num_items_in_batch)
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


def _scaled(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> LinearLogits:
    if scale == 1.0:
        return linear_head(hidden, weight, bias)
    return linear_head(hidden * scale, weight, None if bias is None else bias * scale)


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
