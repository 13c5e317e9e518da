"""The loss of the next token, with the arguments and the mean of transformers' losses."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from onepass.losses.cross_entropy import cross_entropy


def next_tokens(labels: Tensor, ignore_index: int) -> Tensor:
    """``labels`` ``(..., tokens)``, each in the place of the token before it; the last place is ignored."""
    return F.pad(labels, (-1, 1), value=ignore_index) if labels.shape[-1] else labels


def mean_loss(logits: Any, target: Tensor, num_items: Any, ignore_index: int, label_smoothing: float = 0.0) -> Tensor:
    """`onepass.cross_entropy`, in the shape that transformers' own loss has."""
    divisor = None
    num_items = int(num_items) if isinstance(num_items, bool) else num_items
    if isinstance(num_items, int | float) and not 0 < num_items < math.inf:
        divisor, num_items = num_items, 1  # transformers divides by whatever it is given
    loss = cross_entropy(
        logits, target, ignore_index=ignore_index, num_items=num_items, label_smoothing=label_smoothing
    )
    if divisor is not None:
        return loss / divisor
    return loss.reshape(num_items.shape) if isinstance(num_items, Tensor) else loss
