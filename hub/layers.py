"""Layers by which `kernels.kernelize` replaces those of a model; the `layers` of the kernel that `hub.build` writes."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.losses.cross_entropy import cross_entropy


class ForCausalLMLoss(nn.Module):
    """The layer of this name in transformers' mapping of kernels: `cross_entropy` of the next token.

    It reads the logits in their own dtype. Arguments are those of transformers' function of the same name.
    """

    can_torch_compile = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = F.pad(labels, (-1, 1), value=ignore_index)
        logits = logits.reshape(-1, vocab_size)
        target = shift_labels.reshape(-1).to(logits.device)
        return cross_entropy(logits, target, ignore_index=ignore_index, num_items=num_items_in_batch)
