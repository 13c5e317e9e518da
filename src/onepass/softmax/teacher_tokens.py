"""A teacher's tokens, prepared for a divergence: the operation that `losses.topk_distillation` calls."""

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.dispatch import operation


def _like_tokens(
    log_probs: Tensor, ids: Tensor, row_mask: Tensor | None, teacher_mask: Tensor | None, with_probs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    masked = ids.new_empty(ids.shape, dtype=torch.promote_types(log_probs.dtype, torch.float32))
    probs = torch.empty_like(masked) if with_probs else None
    return ids.new_empty(ids.shape), masked, torch.empty_like(masked, dtype=torch.bool), probs


@operation("onepass::teacher_tokens", _like_tokens)
def teacher_tokens(
    log_probs: Tensor, ids: Tensor, row_mask: Tensor | None, teacher_mask: Tensor | None, with_probs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Apply the masks to a teacher's tokens; not differentiable.

    A token has a term in a divergence if its log-prob is not -inf or, with ``with_probs``, if its probability does not
    underflow.

    Args:
        log_probs: ``(..., K)``, of any floating-point dtype.
        ids: ``(..., K)``, int32 or int64.
        row_mask: ``(...)``, 0 masks all tokens of a row; or None.
        teacher_mask: ``(..., K)``, 0 masks a token; or None.

    Returns:
        ``(..., K)`` each: the ids, 0 for tokens without a term; the log-probs, -inf for masked tokens, in float32
        (float64 for float64); whether a token has a term; and the probabilities, or None.
    """
    found: tuple[Tensor, Tensor, Tensor, Tensor | None] = backend_of(log_probs).teacher_tokens(
        log_probs, ids, row_mask, teacher_mask, with_probs
    )
    return found
