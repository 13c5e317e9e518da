"""Losses of a linear head from its hidden states: the logits ``hidden @ weight.T + bias`` are never materialized."""

from collections.abc import Sequence

import torch
from torch import Tensor

from onepass.core.checks import Adapter
from onepass.core.deprecated import renamed
from onepass.core.options import Direction, Metric, Reduction
from onepass.core.shard import Group
from onepass.core.support import Support
from onepass.logits.linear import LinearLogits
from onepass.losses.cross_entropy import cross_entropy
from onepass.losses.directions import BETA
from onepass.losses.kl_div import kl_div
from onepass.losses.log_probs import selective_log_softmax_and_entropy
from onepass.losses.module import LossModule
from onepass.losses.statistics import softmax_statistics
from onepass.losses.topk_distillation import mask_of_rows_or_tokens, topk_kl_div
from onepass.softmax.statistics import SoftmaxStatistics


def linear_softmax_statistics(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    class_weights: Tensor | float | None = None,
    row_mask: Tensor | None = None,
    metrics: Sequence[Metric] = (),
    expected_logit: bool = True,
    support: Support | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> SoftmaxStatistics:
    """`softmax_statistics` of a linear head, for any loss, including one that depends on several rows at once.

    Forward and backward take four GEMMs, since the backward recomputes the logits. `linear_loss` takes three.

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)`` and ``(V,)``, see `LinearLogits`.
        lora: ``(A, B, scaling)`` of a low-rank adapter of the head, see `LinearLogits`.
        logits_dtype, max_memory: how the logits are computed, see `LinearLogits`.
        vocab_size: the number of classes, if the weight has more rows, see `LinearLogits`.
        vocab_group, sequence_parallel: of a vocabulary that is sharded over processes, see `LinearLogits`.
        index: ``(...)`` or ``(..., K)``, int32 or int64.

    The other arguments, and what is returned and raised, are those of `softmax_statistics`.
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        vocab_size=vocab_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return softmax_statistics(
        logits, index, class_weights=class_weights,
        row_mask=row_mask, metrics=metrics, expected_logit=expected_logit, support=support, temperature=temperature,
        softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip


def linear_selective_log_softmax_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor,
    *,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    row_mask: Tensor | None = None,
    support: Support | None = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax_and_entropy` of a linear head, for any upstream gradient (four GEMMs).

    With a frozen head, if only the log-probs are differentiated, forward and backward take two GEMMs; see
    `LinearLogits`.

    The arguments, and what is raised, are those of `linear_softmax_statistics`.

    Returns:
        ``(log_probs, entropy)``, float32 (float64 for a float64 head), of the shape of ``index`` and of the rows
        ``(...)``.
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        vocab_size=vocab_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return selective_log_softmax_and_entropy(
        logits, index, row_mask=row_mask, support=support, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale,
    )  # fmt: skip


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    class_weights: Tensor | None = None,
    ignore_index: int = -100,
    row_mask: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`cross_entropy` of a linear head: forward and backward take three GEMMs.

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)`` and ``(V,)``, see `LinearLogits`.
        lora: ``(A, B, scaling)`` of a low-rank adapter of the head, see `LinearLogits`.
        logits_dtype, max_memory: how the logits are computed, see `LinearLogits`.
        vocab_size: the number of classes, if the weight has more rows, see `LinearLogits`.
        vocab_group, sequence_parallel: of a vocabulary that is sharded over processes, see `LinearLogits`.
        target: ``(...)``, int32 or int64; rows that are ``ignore_index`` are left out of all GEMMs, except
            in the case of few rows, see `LinearLogits`.

    The other arguments, and what is returned and raised, are those of `cross_entropy`. The gradient is computed in the
    forward pass: a second backward through the result is an error, except with ``reduction="none"``, whose backward
    recomputes the logits (four GEMMs), and for few rows, see `LinearLogits`.
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        vocab_size=vocab_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return cross_entropy(
        logits, target, class_weights=class_weights,
        ignore_index=ignore_index, row_mask=row_mask, label_smoothing=label_smoothing, z_loss_weight=z_loss_weight,
        reduction=reduction, num_items=num_items, mean_group=mean_group, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale,
    )  # fmt: skip


@renamed(positional=("mask",), mask=mask_of_rows_or_tokens)
def linear_topk_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    *,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    row_mask: Tensor | None = None,
    teacher_mask: Tensor | None = None,
    direction: Direction = "forward",
    beta: float = BETA,
    renormalize: bool = False,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`topk_kl_div` of a student given by its linear head: three GEMMs.

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)`` and ``(V,)``, see `LinearLogits`.
        lora: ``(A, B, scaling)`` of a low-rank adapter of the head, see `LinearLogits`.
        logits_dtype, max_memory: how the logits are computed, see `LinearLogits`.
        vocab_size: the number of classes, if the weight has more rows, see `LinearLogits`.
        vocab_group, sequence_parallel: of a vocabulary that is sharded over processes, see `LinearLogits`.

    The other arguments, and what is returned and raised, are those of `topk_kl_div`.
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        vocab_size=vocab_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return topk_kl_div(
        logits, teacher_ids, teacher_log_probs, row_mask=row_mask,
        teacher_mask=teacher_mask, direction=direction, beta=beta, renormalize=renormalize, reduction=reduction,
        num_items=num_items, mean_group=mean_group, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
    )  # fmt: skip


@renamed(positional=("mask",), mask="row_mask", teacher="teacher_logits")
def linear_kl_div(
    hidden: Tensor,
    weight: Tensor,
    teacher_logits: Tensor | LinearLogits,
    *,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    row_mask: Tensor | None = None,
    direction: Direction = "forward",
    beta: float = BETA,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_temperature: float | Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """`kl_div` of a student given by its linear head: three GEMMs.

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)`` and ``(V,)``, see `LinearLogits`.
        lora: ``(A, B, scaling)`` of a low-rank adapter of the head, see `LinearLogits`.
        logits_dtype, max_memory: how the logits are computed, see `LinearLogits`.
        vocab_group, sequence_parallel: of a vocabulary that is sharded over processes, see `LinearLogits`.
        teacher_logits: logits ``(..., V)``, or ``LinearLogits(teacher_hidden, teacher_weight)``, which takes another
            GEMM, and another tile of workspace. It must not require a gradient. Student and teacher may have different
            widths ``H``.

    The other arguments, and what is returned and raised, are those of `kl_div`.
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return kl_div(
        logits, teacher_logits, row_mask=row_mask,
        direction=direction, beta=beta, vocab_size=vocab_size, reduction=reduction, num_items=num_items,
        mean_group=mean_group, temperature=temperature, softcap=softcap, logit_scale=logit_scale,
        teacher_temperature=teacher_temperature, teacher_softcap=teacher_softcap,
        teacher_logit_scale=teacher_logit_scale,
    )  # fmt: skip


class LinearCrossEntropyLoss(LossModule):
    """`linear_cross_entropy` as a module with the same options, all keyword-only. ``class_weights`` is a buffer."""

    class_weights: Tensor | None

    @renamed(positional=("class_weights", "ignore_index", "reduction", "label_smoothing"))
    def __init__(
        self,
        *,
        class_weights: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss_weight: float = 0.0,
        vocab_size: int | None = None,
        reduction: Reduction = "mean",
        mean_group: Group | None = None,
        temperature: float | Tensor = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        logits_dtype: torch.dtype | None = None,
        max_memory: int | None = None,
        vocab_group: Group | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("class_weights", class_weights)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss_weight = z_loss_weight
        self.reduction: Reduction = reduction
        self.mean_group = mean_group
        self.temperature, self.softcap, self.logit_scale = temperature, softcap, logit_scale
        self.logits_dtype, self.max_memory = logits_dtype, max_memory
        self.vocab_group, self.vocab_size = vocab_group, vocab_size
        self.sequence_parallel = sequence_parallel

    @renamed(positional=("bias",))
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        *,
        bias: Tensor | None = None,
        lora: Adapter | None = None,
        row_mask: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Tensor:
        return linear_cross_entropy(
            hidden, weight, target, bias=bias, lora=lora, row_mask=row_mask, num_items=num_items, **self.options()
        )
