"""A loss of every row of a linear head, known while the row's tile is there: three products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.dispatch import refuse_second_derivatives
from onepass.head.gather import gathered
from onepass.head.row_loss import RowLoss
from onepass.head.tiles import Gradients, Head, defers, plan, tiles

Parts = tuple[Any, Any, Any]  # rows of hidden states, weight, bias or None


def row_losses(
    parts: Parts,
    row_mask: Tensor | None,
    row_loss: RowLoss,
    divisor: Tensor | None,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    max_memory: int | None,
) -> Tensor:
    """``Σ row_loss / divisor`` over the rows that are not masked, or without a divisor every row's; differentiable."""
    settings = row_mask, row_loss, dtype, max_memory
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*parts, *inputs)):
        loss: Tensor = _RowLosses.apply(*parts, *settings, divisor, *inputs)
        return loss
    losses = walk(parts, *settings)[0]
    return losses if divisor is None else losses.sum() / divisor


def walk(
    parts: Parts,
    row_mask: Tensor | None,
    row_loss: RowLoss,
    dtype: torch.dtype,
    max_memory: int | None,
    needed: Sequence[bool] = (False, False, False),
    scale: Tensor | None = None,
    of_inputs: Sequence[Tensor | None] = (),
) -> tuple[Tensor, Gradients | None]:
    """The loss of every row and, with ``scale`` (of all rows or of each), the gradients of ``Σ scale·loss``.

    Those of the inputs of ``row_loss`` are written into ``of_inputs``.
    """
    hidden = parts[0]
    parameters = [p for of_head, _ in row_loss.heads for p in of_head[1:]]
    with gathered(*parts[1:], *parameters), torch.autocast(hidden.device.type, enabled=False):
        heads = [Head(*parts, dtype), *[Head(*of_head, kind) for of_head, kind in row_loss.heads]]
        losses = hidden.new_zeros(hidden.shape[0], dtype=row_loss.dtype)
        cut = plan(heads, row_mask, needed[1], max_memory, row_loss.row_bytes)
        row_mask = row_mask if defers(row_mask) else None
        gradients = None if scale is None else Gradients(heads[0], cut, needed)
        for rows, columns, states, logits in tiles(heads, cut):
            mask = None if row_mask is None else rows.take(row_mask)
            of_rows = scale if scale is None or scale.dim() == 0 else rows.take(scale)
            part, found = row_loss(logits, rows, mask, of_rows)
            rows.put(losses, part)
            for out, value in zip(of_inputs, found):
                if out is not None and value is not None:
                    rows.put(out, value)
            if gradients is not None:
                gradients.add(rows, columns, states, logits[0])
    return losses, gradients


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_mask: Tensor | None,
        row_loss: RowLoss,
        dtype: torch.dtype,
        max_memory: int | None,
        divisor: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        parts = hidden, weight, bias
        walked: dict[str, Any] = {"dtype": dtype, "max_memory": max_memory, "needed": ctx.needs_input_grad[:3]}
        ctx.divisor = divisor
        ctx.of_inputs = [torch.zeros_like(i) if n else None for i, n in zip(inputs, ctx.needs_input_grad[8:])]
        if divisor is None:  # every row has an upstream gradient of its own: the tiles come back for it
            ctx.save_for_backward(*parts, row_mask)
            ctx.row_loss, ctx.walked = row_loss, walked
            return walk(parts, row_mask, row_loss, dtype, max_memory)[0]
        # A tile takes its part of the mean at once, unless it is float16: that could not hold it before it is scaled.
        ctx.late = dtype == torch.float16
        scale = torch.ones_like(divisor) if ctx.late else 1 / divisor
        losses, ctx.gradients = walk(parts, row_mask, row_loss, **walked, scale=scale, of_inputs=ctx.of_inputs)
        return losses.sum() / divisor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        if ctx.divisor is None:
            of_inputs = [None if g is None else torch.zeros_like(g) for g in ctx.of_inputs]
            hidden, weight, bias, row_mask = ctx.saved_tensors
            gradients = walk(
                (hidden, weight, bias), row_mask, ctx.row_loss, **ctx.walked, scale=grad, of_inputs=of_inputs
            )[1]
            found = gradients.scaled(None)  # type: ignore[union-attr]
        elif ctx.gradients is None:
            raise RuntimeError(
                "onepass: a second backward through a reduced loss of a linear head, whose gradient is given away; "
                "compute it again, or take reduction='none'"
            )
        else:
            scale = grad / ctx.divisor if ctx.late else grad
            gradients, ctx.gradients = ctx.gradients, None
            found = gradients.scaled(scale)
            of_inputs = [None if g is None else g * scale for g in ctx.of_inputs]
        return (*found, *[None] * 5, *of_inputs)
