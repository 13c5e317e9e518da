"""`LinearLogits`: what stands for logits in any loss, and is a linear head."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onepass.checks import FLOATS, check_integer, described
from onepass.dispatch import autocast_dtype, is_autocast_enabled, is_untraced
from onepass.head.gather import whole
from onepass.head.loss import row_losses
from onepass.head.row_loss import RowLoss, StatisticsLoss
from onepass.head.statistics import statistics
from onepass.head.tiles import Settings
from onepass.options import Options
from onepass.source import LogitsSource


class LinearLogits(LogitsSource):
    """The logits ``hidden @ weight.T + bias``, for any function of onepass that takes logits; they are never all there.

    Args:
        hidden: ``(..., H)``, float16, bfloat16, float32 or float64. Hidden states whose rows are not evenly spaced
            (``hidden[:, :-1]``) are copied.
        weight: ``(V, H)``, any strides; the dtype of ``hidden``, or any under autocast, whose dtype the products have
            then. A DTensor is gathered once.
        bias: ``(V,)`` or None, likewise.
        max_memory: bytes of workspace, beyond inputs, results and gradients. None: on a GPU 0.6 GiB; 2.5 GiB where
            these hold all logits and no gradient is to come; for a loss of rows with a gradient of the weight 2.5 GiB
            too (or 1.25 and that gradient in float32). It follows from shapes alone, so that results do not depend on
            what else is in memory.

    All three are differentiable; what needs no gradient costs neither time nor memory for one. Gradients of the weight
    are summed over tiles in float32 and rounded once. The logits have the dtype of the products, as a linear layer's.

    Rows that are masked or ignored take part in no product. (How many are left is read from the device, once a call,
    unless a CUDA graph is being captured: then they do take part.)

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device.

    Example::

        logits = onepass.LinearLogits(hidden, lm_head.weight)
        log_probs, entropy = onepass.selective_log_softmax_and_entropy(logits, labels)
    """

    bias_apart = False  # whether the bias is added to the rounded product, which rounds twice

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, max_memory: int | None = None
    ) -> None:
        for value, name in ((hidden, "hidden"), (weight, "weight"), (bias, "bias")):
            if (value is not None or name != "bias") and (not isinstance(value, Tensor) or value.dtype not in FLOATS):
                raise TypeError(f"{name}: expected a floating-point tensor, got {described(value)}")
        weight, bias = whole(weight), None if bias is None else whole(bias)
        shape = tuple(getattr(weight, "ds_shape", weight.shape))  # ZeRO-3's are empty where they are not gathered
        if hidden.dim() < 1 or len(shape) != 2 or 0 in shape or hidden.shape[-1] != shape[1]:
            raise ValueError(
                "weight: expected shape (V, H) for hidden states (..., H), "
                f"got {shape} for hidden states of shape {tuple(hidden.shape)}"
            )
        if bias is not None and tuple(getattr(bias, "ds_shape", bias.shape)) != shape[:1]:
            raise ValueError(f"bias: expected shape {shape[:1]}, got {tuple(bias.shape)}")
        self.dtype = autocast_dtype(hidden) or hidden.dtype
        for value, name in ((weight, "weight"), (bias, "bias")):
            if value is None:
                continue
            if value.device != hidden.device:
                raise ValueError(f"{name}: expected device {hidden.device}, that of hidden, got {value.device}")
            if value.dtype != hidden.dtype and not is_autocast_enabled(hidden):
                raise TypeError(f"{name}: expected {hidden.dtype}, the dtype of hidden, got {value.dtype}")
        self.max_memory = None if max_memory is None else check_integer(max_memory, "max_memory")
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.shape = torch.Size((*hidden.shape[:-1], shape[0]))
        self.device = hidden.device

    @property
    def requires_grad(self) -> bool:
        return any(t is not None and t.requires_grad for t in (self.hidden, self.weight, self.bias))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of hidden states, weight and bias."""
        return self.hidden.reshape(-1, self.hidden.shape[-1]), self.weight, self.bias

    @property
    def takes_row_losses(self) -> bool:
        return is_untraced(self.hidden, self.weight, self.bias)

    @property
    def settings(self) -> Settings:
        """How the logits are made, beside what they are made of."""
        return Settings(self.dtype, self.max_memory, self.bias_apart)

    def statistics(
        self, index: Tensor | None, row_mask: Tensor | None, class_weights: Tensor | None, options: Options
    ) -> tuple[Tensor, ...]:
        """The fields of ``options`` of every row, differentiable. Arguments are checked already."""
        rows = self.shape[:-1]
        index = None if index is None else index.reshape(rows.numel(), *index.shape[len(rows) :])
        row_mask = None if row_mask is None else row_mask.reshape(-1)
        fields = statistics(*self.parts, index, row_mask, class_weights, options, self.settings)
        return tuple([f.reshape((*rows, *f.shape[1:])) for f in fields])

    def loss(
        self,
        loss_fn: Callable[..., Tensor],
        options: Options,
        index: Tensor | None,
        row_mask: Tensor | None,
        class_weights: Tensor | None,
        inputs: Sequence[Tensor],
        divisor: Tensor | float | None,
        linear: bool = False,
    ) -> Tensor:
        """See `LogitsSource.loss`; differentiable with respect to ``inputs`` too."""
        rows = self.shape[:-1]
        index = None if index is None else index.reshape(rows.numel(), *index.shape[len(rows) :])
        inputs = [i.reshape(rows.numel(), *i.shape[len(rows) :]) for i in inputs]
        row_loss = StatisticsLoss(loss_fn, options, self.dtype, index, class_weights, inputs, linear)
        return self.loss_of_rows(row_loss, row_mask, divisor, inputs)

    def loss_of_rows(
        self, row_loss: RowLoss, row_mask: Tensor | None, divisor: Tensor | float | None, inputs: Sequence[Tensor] = ()
    ) -> Tensor:
        """See `LogitsSource.loss_of_rows`."""
        row_mask = None if row_mask is None else row_mask.reshape(-1) != 0
        if isinstance(divisor, Tensor):
            divisor = divisor.detach().reshape(()).to(self.device, row_loss.dtype)
        elif divisor is not None:  # filled on the device: a copy to it would wait
            divisor = torch.full((), divisor, dtype=row_loss.dtype, device=self.device)
        loss = row_losses(self.parts, row_mask, row_loss, divisor, inputs, self.settings)
        return loss.reshape(self.shape[:-1]) if divisor is None else loss
