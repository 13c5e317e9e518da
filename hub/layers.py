"""Layers by which `kernels.kernelize` replaces those of a model; the `layers` of the kernel that `hub.build` writes."""

from typing import Any

from torch import Tensor, nn

from onepass.losses.next_token import mean_loss, next_tokens


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
        shift_labels = next_tokens(labels, ignore_index) if shift_labels is None else shift_labels
        logits = logits.reshape(-1, vocab_size)
        target = shift_labels.reshape(-1).to(logits.device)
        return mean_loss(logits, target, num_items_in_batch, ignore_index)
