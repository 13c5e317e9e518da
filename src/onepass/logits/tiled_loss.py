"""Losses of a linear head, computed while a tile of logits is in memory: three GEMMs, forward and backward.

`LinearLogits` calls `tiled_loss` in eager mode.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from onepass.core.dispatch import check_upstream, refuse_forward_mode, without_autocast
from onepass.logits.gradients import Gradients
from onepass.logits.head import COUNT, Head, HeadTensors, Settings
from onepass.logits.partitioned import gathered
from onepass.logits.row_loss import RowLoss
from onepass.logits.tile_plan import Rows, plan
from onepass.logits.tiles import tiles
from onepass.logits.valid_rows import defers

NOTHING = (False,) * COUNT

Number = Callable[[], Tensor]  # computes a tensor when it is needed


def tiled_loss(
    tensors: HeadTensors, row_mask: Tensor | None, row_loss: RowLoss, divisor: Number | None, settings: Settings
) -> Tensor:
    """``Σ row_loss / divisor()`` over the valid rows or, without a divisor, the loss of every row; differentiable."""
    inputs = row_loss.row_inputs
    refuse_forward_mode(*tensors, *inputs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, *inputs)):
        return _TiledLoss.apply(*tensors, row_mask, row_loss, settings, divisor, *inputs)
    losses = walk(tensors, row_mask, row_loss, settings)[0]
    return losses if divisor is None else losses.sum() / divisor()


def walk(
    tensors: HeadTensors,
    row_mask: Tensor | None,
    row_loss: RowLoss,
    settings: Settings,
    needed: Sequence[bool] = NOTHING,
    scale_of: Number | None = None,
    of_inputs: Sequence[Tensor | None] = (),
    later: Sequence[bool] = NOTHING,
    again: bool = False,
) -> tuple[Tensor, Gradients | None]:
    """The loss of every row and, with ``scale_of``, the gradients of ``Σ scale·loss``.

    Args:
        needed: whether the gradient of each of the ``tensors`` is needed.
        scale_of: computes the scale, one number or one per row.
        of_inputs: receives the gradients of the row inputs; None for those that are not needed.
        later: whether the backward needs the gradient of each, for which it walks again.
        again: whether this is the walk of that backward.
    """
    hidden = tensors.hidden
    parameters = [p for of_head in (tensors, *(of for of, _ in row_loss.heads)) for p in of_head.parameters()]
    with gathered(*parameters), without_autocast(hidden):
        heads = [Head(tensors, settings), *(Head(*of_head) for of_head in row_loss.heads)]
        use = row_loss.use(heads[0], scale_of is not None)._replace(weight_gradient=needed[1])
        backward = row_loss.use(heads[0], True)._replace(weight_gradient=later[1]) if any(later) else None
        # A function that draws random numbers draws the same ones in both walks only if their tiles are the same.
        planned = use
        if row_loss.may_draw and (again or backward is not None):
            planned = (backward or use)._replace(splits=False)
        tile_plan = plan(heads, row_mask, planned, backward)._replace(lengths=row_loss.groups)
        # The first product is launched before all that it does not need: the device may be waiting for the host.
        following = tiles(heads, tile_plan, use.logits)
        first = [*islice(following, 1)]
        for tile in first:
            if not use.exponentials:
                tile.start()
        row_mask = row_mask if defers(row_mask) else None
        count = hidden.shape[0] if row_loss.groups is None else len(row_loss.groups)
        losses = hidden.new_zeros(count, dtype=row_loss.dtype)
        gradients = None if scale_of is None else Gradients(heads[0], tile_plan, needed, used=row_loss.used)
        of_rows = None if scale_of is None else of_some_rows(cache(scale_of))
        for tile in chain(first, following):
            mask = None if row_mask is None else tile.rows.take(row_mask)
            place = None if gradients is None else gradients.place(tile)
            tile.rest = None if gradients is None else gradients.rest(tile)
            parts = iter(()) if gradients is None or place is None else gradients.parts(tile, place)
            part, found = row_loss(tile, mask, of_rows, place, parts)
            tile.rows.of_losses.put(losses, part)
            for out, value in zip(of_inputs, found):
                if out is not None and value is not None:
                    tile.rows.put(out, value)
            if gradients is not None and place is not None:
                gradients.add(tile, place)
    return losses, gradients


def of_some_rows(number: Number) -> Callable[[Rows], Tensor]:
    """The number or, if there is one per row, those of the rows that the result is called with."""

    def of(rows: Rows) -> Tensor:
        found = number()
        return found if found.dim() == 0 else rows.of_losses.take(found)

    return of


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        row_mask: Tensor | None,
        row_loss: RowLoss,
        settings: Settings,
        divisor: Number | None,
        *inputs: Tensor,
    ) -> Tensor:
        tensors = HeadTensors(hidden, weight, bias, low, up)
        needed = ctx.needs_input_grad[:COUNT]
        ctx.reduced, ctx.needed_inputs = divisor is not None, ctx.needs_input_grad[COUNT + 4 :]
        if divisor is None:  # rows have different upstream gradients: the backward computes the tiles again
            ctx.save_for_backward(*tensors, row_mask, *row_loss.tensors)
            ctx.row_loss, ctx.settings = row_loss.holding([None] * len(row_loss.tensors)), settings
            ctx.generators = generator_states(hidden.device)
            return walk(tensors, row_mask, row_loss, settings, later=needed)[0]
        of_inputs = [torch.zeros_like(i) if n else None for i, n in zip(inputs, ctx.needed_inputs)]
        # Tiles are divided at once, unless they are float16: a mean's gradients might underflow before they are scaled.
        late = settings.dtype == torch.float16

        def scale_of() -> Tensor:
            # Infinite without a valid row in both ways: no scale reaches masked rows, whose gradient stays 0.
            return 1 / (divisor() != 0).to(divisor().dtype) if late else 1 / divisor()

        losses, ctx.gradients = walk(tensors, row_mask, row_loss, settings, needed, scale_of, of_inputs)
        kept = None  # rows, if not all were computed
        if row_mask is not None and (ctx.gradients.plan.row_ids is not None or defers(row_mask)):
            kept = row_mask.clone()  # the caller may change it before the backward
        ctx.save_for_backward(divisor() if late else None, kept, *of_inputs)
        return losses.sum() / divisor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        if not ctx.reduced:
            saved_tensors = ctx.saved_tensors  # which a checkpoint unpacks only once
            tensors, (row_mask, *saved) = HeadTensors(*saved_tensors[:COUNT]), saved_tensors[COUNT:]
            row_loss = ctx.row_loss.holding(saved)
            of_inputs = [torch.zeros_like(i) if n else None for i, n in zip(row_loss.row_inputs, ctx.needed_inputs)]
            needed = ctx.needs_input_grad[:COUNT]
            with generators_at(ctx.generators, tensors.hidden.device):
                _, gradients = walk(
                    tensors, row_mask, row_loss, ctx.settings, needed, lambda: grad, of_inputs, again=True
                )
            found = gradients.scaled(None)  # type: ignore[union-attr]
        elif ctx.gradients is None:
            raise RuntimeError(
                "onepass: a second backward through a reduced loss of a linear head, which keeps its gradient for one "
                "backward only; compute the loss again, or pass reduction='none'"
            )
        else:
            divisor, kept, *of_inputs = ctx.saved_tensors
            scale = grad if divisor is None else grad / divisor.where(divisor != 0, 1.0)
            gradients, ctx.gradients = ctx.gradients, None
            found = gradients.scaled(scale, kept)
            of_inputs = [None if g is None else g * scale for g in of_inputs]
        return (*found, *[None] * 4, *of_inputs)


def generator_states(device: torch.device) -> list[Tensor] | None:
    """The states of the generators that a loss may draw from; None if a CUDA graph is captured, which manages them."""
    if device.type != "cuda":
        return [torch.get_rng_state()]
    if torch.cuda.is_current_stream_capturing():
        return None
    return [torch.get_rng_state(), torch.cuda.get_rng_state(device)]


@contextmanager
def generators_at(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    """Restore the generators to ``states`` while a loss is computed again."""
    if states is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)
        yield
