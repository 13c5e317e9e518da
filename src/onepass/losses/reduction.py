"""The reduction of the losses of all rows to a mean or a sum, which all loss functions call."""

from torch import Tensor

from onepass.core.checks import check_choice, check_number, described, short
from onepass.core.dispatch import is_plain
from onepass.core.options import REDUCTIONS, Reduction
from onepass.logits.source import Divisor, divided


def divisor_of(rows: Tensor | int, reduction: Reduction, num_items: float | Tensor | None) -> Divisor:
    """The divisor of the sum over rows: ``num_items``, or for a mean the number of ``rows`` (given as a mask or a
    number; at least 1). None for ``"none"``. A number on the CPU becomes a float, so that no copy synchronizes."""
    check_choice(reduction, "reduction", REDUCTIONS)
    if num_items is not None:
        if reduction == "none":
            raise ValueError(f"num_items: expected None with reduction='none', got {short(num_items)}")
        if isinstance(num_items, Tensor):
            if num_items.numel() != 1 or num_items.requires_grad or num_items.is_complex():
                raise TypeError(f"num_items: expected a constant of one element, got {described(num_items)}")
            if num_items.is_cpu and is_plain(num_items):
                return check_number(num_items.item(), "num_items", 0, open_low=False)
            return num_items.reshape(())
        return check_number(num_items, "num_items", 0)
    if reduction == "mean":
        return rows.sum().clamp(min=1) if isinstance(rows, Tensor) else max(rows, 1)
    return 1 if reduction == "sum" else None


def reduced(loss: Tensor, rows: Tensor | int, reduction: Reduction, num_items: float | Tensor | None) -> Tensor:
    """The sum over ``num_items``, the mean over ``rows`` (a mask or a number; 0 if none), the sum, or the loss."""
    return divided(loss, divisor_of(rows, reduction, num_items), loss.dim())
