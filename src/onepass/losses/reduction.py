"""From the loss of every row to what is returned."""

from torch import Tensor

from onepass.checks import check_choice


def divisor_of(rows: Tensor | int, reduction: str, num_items: float | Tensor | None) -> Tensor | float | None:
    """What the sum over rows is divided by: ``num_items``, or of a mean how many ``rows`` there are (a mask, or how
    many; at least 1). None for ``"none"``."""
    check_choice(reduction, "reduction", ("sum", "mean", "none"))
    if num_items is not None:
        if reduction == "none":
            raise ValueError(f"num_items: expected None with reduction='none', got {num_items!r}")
        return num_items
    if reduction == "mean":
        return rows.sum().clamp(min=1) if isinstance(rows, Tensor) else max(rows, 1)
    return 1 if reduction == "sum" else None


def reduced(loss: Tensor, rows: Tensor | int, reduction: str, num_items: float | Tensor | None) -> Tensor:
    """The sum over ``num_items``, the mean over ``rows`` (a mask, or how many; 0 if none), the sum, or the loss."""
    divisor = divisor_of(rows, reduction, num_items)
    if divisor is None:
        return loss
    if isinstance(divisor, Tensor):
        divisor = divisor.to(loss.device)  # trainers count items on a CPU, too
    return loss.sum() if isinstance(divisor, int) and divisor == 1 else loss.sum() / divisor
