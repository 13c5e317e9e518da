"""A teacher's tokens, prepared for a divergence: the operation that `losses.topk_distillation` calls."""

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.dispatch import operation


def _like_tokens(
    log_probs: Tensor, ids: Tensor, row_mask: Tensor | None, teacher_mask: Tensor | None, with_probs: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    same = row_mask is None and teacher_mask is None and log_probs.dtype == dtype
    masked = None if same else ids.new_empty(ids.shape, dtype=dtype)
    probs = ids.new_empty(ids.shape, dtype=dtype) if with_probs else None
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape, dtype=torch.bool), masked, probs


@operation("onepass::teacher_tokens", _like_tokens)
def teacher_tokens(
    log_probs: Tensor, ids: Tensor, row_mask: Tensor | None, teacher_mask: Tensor | None, with_probs: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Apply the masks to a teacher's tokens; not differentiable.

    A token has a term in a divergence if its log-prob is not -inf or, with ``with_probs``, if its probability does not
    underflow.

    Args:
        log_probs: ``(..., K)``, of any floating-point dtype.
        ids: ``(..., K)``, int32 or int64.
        row_mask: ``(...)``, 0 masks all tokens of a row; or None.
        teacher_mask: ``(..., K)``, 0 masks a token; or None.

    Returns:
        ``(..., K)`` each: the ids, 0 for tokens without a term; whether a token has a term; the log-probs, -inf for
        masked tokens, in float32 (float64 for float64), or None if that is what was passed; the probabilities, or None.
    """
    return backend_of(log_probs).teacher_tokens(log_probs, ids, row_mask, teacher_mask, with_probs)
