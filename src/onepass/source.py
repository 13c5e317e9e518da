"""What can stand for a tensor of logits, for any function that takes logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onepass.options import Options


class LogitsSource:
    """What can stand for a tensor of logits: they are computed where they are read. `head.LinearLogits` is one.

    Has of a tensor what checks look at.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    max_memory: int | None

    def dim(self) -> int:
        return len(self.shape)

    @property
    def requires_grad(self) -> bool:
        raise NotImplementedError

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def statistics(
        self,
        index: torch.Tensor | None,
        row_mask: torch.Tensor | None,
        class_weights: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, ...]:
        """The fields of ``options``, differentiable."""
        raise NotImplementedError

    @property
    def takes_row_losses(self) -> bool:
        """Whether `loss` can be used here (it is Python, which cannot be traced)."""
        raise NotImplementedError

    @property
    def settings(self) -> Any:
        """How the logits are made, beside their `parts`; see `head.tiles.Settings`."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Hidden states ``(N, H)``, weight ``(V, H)`` and bias ``(V,)``."""
        raise NotImplementedError

    def loss(
        self,
        loss_fn: Callable[..., torch.Tensor],
        options: Options,
        index: torch.Tensor | None,
        row_mask: torch.Tensor | None,
        class_weights: torch.Tensor | None,
        inputs: Sequence[torch.Tensor],
        divisor: torch.Tensor | float | None,
        linear: bool = False,
    ) -> torch.Tensor:
        """``Σ loss_fn(fields, *inputs) / divisor`` over the rows that are not masked, or the loss of every row.

        ``fields`` is a dict of those of ``options`` of some rows, ``inputs`` are the same rows of these. ``linear``
        says that the loss is that in the fields.
        """
        raise NotImplementedError

    def loss_of_rows(
        self,
        row_loss: Any,
        row_mask: torch.Tensor | None,
        divisor: torch.Tensor | float | None,
        inputs: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The same of a `head.row_loss.RowLoss`, which reads the logits itself; ``inputs`` are its, ``(N, ...)``."""
        raise NotImplementedError


Logits = torch.Tensor | LogitsSource
