"""`linear_loss`: any loss of the statistics of a row, or of a group of rows, from hidden states."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import FLOATS, Adapter, check_device, check_index, described
from onepass.core.dispatch import without_autocast
from onepass.core.options import Inputs, Metric, Options, Reduction
from onepass.core.shard import Group
from onepass.core.support import Support
from onepass.logits.linear import LinearLogits
from onepass.logits.row_groups import RowGroups, check_groups, ids_of
from onepass.logits.source import Divisor, inputs_for, options_for
from onepass.logits.valid_rows import defers
from onepass.losses.reduction import divisor_of
from onepass.losses.statistics import requested_fields
from onepass.softmax.statistics import SoftmaxStatistics


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    index: Tensor | None,
    loss_fn: Callable[..., Tensor],
    *row_inputs: Tensor,
    bias: Tensor | None = None,
    lora: Adapter | None = None,
    class_weights: Tensor | float | None = None,
    row_mask: Tensor | None = None,
    groups: Tensor | Sequence[int] | None = None,
    metrics: Sequence[Metric] = (),
    expected_logit: bool = True,
    support: Support | None = None,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    mean_group: Group | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    max_memory: int | None = None,
    vocab_group: Group | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    r"""Compute any loss that is a function of the statistics of a row, or of a group of rows, in three GEMMs.

    The logits ``hidden @ weight.T + bias`` are computed in tiles, each with the logits of some rows. For each tile,
    ``loss_fn(statistics, *row_inputs)`` is called with the `SoftmaxStatistics` of its ``n`` rows, whose fields have
    shape ``(n,)`` or ``(n, K)``, and with the same rows of ``row_inputs``. It returns the loss of these rows, ``(n,)``,
    which autograd differentiates while the tile is in memory. The loss of a row must not depend on other rows, since
    any rows may share a tile.

    For a loss that first sums over a sequence, such as DPO, pass ``groups``. Then ``loss_fn(statistics, *row_inputs,
    groups)`` also gets `RowGroups`, with ``groups.sum(per_row)`` and ``groups.mean(per_row)``, ``(G,)``, and returns
    the loss of every group, ``(G,)``. No group is split over two tiles. If a tile cannot hold the longest group,
    forward and backward take four GEMMs. ``examples/preference_losses.py`` has DPO, SimPO, ORPO and GSPO.

    Args:
        hidden, weight, bias: ``(..., H)``, ``(V, H)`` and ``(V,)``, see `LinearLogits`.
        lora: ``(A, B, scaling)`` of a low-rank adapter of the head, see `LinearLogits`.
        logits_dtype, max_memory: how the logits are computed, see `LinearLogits`.
        vocab_size: the number of classes, if the weight has more rows, see `LinearLogits`.
        vocab_group, sequence_parallel: of a vocabulary that is sharded over processes, see `LinearLogits`.
        index: ``(...)`` or ``(..., K)``, int32 or int64, or None.
        loss_fn: called once per tile, without autocast, and once more in the backward with ``reduction="none"``. What
            it closes over must not change until then, which is not checked.
        row_inputs: ``(..., *)``, for instance advantages and old log-probs; differentiable.
        class_weights, metrics, expected_logit, support, temperature, softcap, logit_scale: see `softmax_statistics`.
        row_mask: ``(...)``, bool or 0/1; rows where it is False are left out of all GEMMs. Their loss is 0.
        groups: the lengths of groups of consecutive rows, int32 or int64 ``(G,)`` or a sequence of ints, which add up
            to the number of rows. Rows on which one loss depends must be in one group, for example a chosen and a
            rejected sequence. The CPU waits for the GPU if this is a tensor on the GPU, or if there is also a
            ``row_mask``. The loss of a group whose rows are all masked is 0.
        reduction: ``"mean"`` (over the rows that are not masked, or the groups that have such rows; 0 if there are
            none), ``"sum"`` or ``"none"``, which takes four GEMMs in all.
        num_items, mean_group: divide the sum by another number than that of the rows, see `cross_entropy`.

    Returns:
        float32 (float64 for float64 inputs). The gradient of a sum or mean is computed in the forward pass: a second
        backward through it is an error. Under `torch.compile`, ``loss_fn`` is applied to the result of
        `linear_softmax_statistics`, which takes four GEMMs.

    Raises:
        TypeError, ValueError, IndexError: as `softmax_statistics`; also if ``loss_fn`` returns another shape, is
            differentiable with respect to a tensor that is not among ``row_inputs``, or if the loss of a row depends on
            other rows (checked on a CPU and with ``ONEPASS_DEBUG=1``, for the gradient of the first row). The last two
            are not raised where ``groups`` take four GEMMs: autograd then computes these gradients.

    Example::

        def policy_loss(s, advantages, old_log_probs):
            ratio = (s.log_probs - old_log_probs).exp()
            clipped = ratio.clamp(0.8, 1.2)
            return -torch.minimum(ratio * advantages, clipped * advantages) - 0.01 * s.entropy

        loss = onepass.linear_loss(hidden, lm_head.weight, tokens, policy_loss, advantages, old_log_probs)
    """
    logits = LinearLogits(
        hidden, weight, bias, lora=lora, logits_dtype=logits_dtype, max_memory=max_memory, vocab_group=vocab_group,
        vocab_size=vocab_size, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    fields = requested_fields(index, class_weights, metrics, expected_logit)
    options = options_for(fields, temperature, softcap, logit_scale)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a function of the statistics and the row_inputs, got {described(loss_fn)}")
    if index is not None:
        check_index(index, logits)
    inputs, options = inputs_for(
        logits, options, index, row_mask, class_weights, temperature=temperature, support=support
    )
    shape = logits.shape[:-1]
    for value in row_inputs:
        if not isinstance(value, Tensor):
            raise TypeError(f"row_inputs: expected tensors, got {described(value)}")
        if value.shape[: len(shape)] != shape:
            raise ValueError(f"row_inputs: expected shapes {(*shape, '...')}, got {tuple(value.shape)}")
        check_device(value, logits, "row_inputs", "hidden")

    if row_mask is not None:  # autograd would multiply what a masked row holds, which may be NaN, by 0
        masked = row_mask == 0
        row_inputs = tuple(
            [t.masked_fill(masked.reshape((*shape, *[1] * (t.dim() - len(shape)))), 0) for t in row_inputs]
        )
    if groups is not None:
        lengths = check_groups(groups, shape.numel())
        divide = partial(divisor_of, logits, reduction=reduction, num_items=num_items, mean_group=mean_group)
        return loss_of_groups(logits, loss_fn, inputs, options, row_inputs, lengths, divide)
    rows = None if row_mask is None else row_mask != 0
    # The caller's function may return any value where all fields are 0, so the mask is passed as a row input.
    count = len(row_inputs)
    masked_inputs = row_inputs if rows is None else (*row_inputs, rows)

    def loss_of_rows(fields: dict[str, Tensor], *parts: Tensor) -> Tensor:
        loss = call_loss(loss_fn, fields, parts[:count])
        check_loss(loss, fields["shift"], "row")
        return loss if rows is None else loss.where(parts[count], 0.0)

    divisor = divisor_of(logits, rows, reduction, num_items, mean_group)
    return logits.loss(loss_of_rows, inputs, options, masked_inputs, divisor)


def loss_of_groups(
    logits: LinearLogits,
    loss_fn: Callable[..., Tensor],
    inputs: Inputs,
    options: Options,
    row_inputs: Sequence[Tensor],
    lengths: Sequence[int],
    divisor_for: Callable[[Tensor], Divisor],
) -> Tensor:
    """`linear_loss` of groups of these lengths. ``divisor_for`` gets which groups have a row that is not masked."""
    rows, dims, count = sum(lengths), logits.dim() - 1, len(row_inputs)

    def flat(t: Tensor) -> Tensor:
        return t.reshape(rows, *t.shape[dims:])

    inputs = inputs.rows(flat)
    mask = () if inputs.row_mask is None else (inputs.row_mask != 0,)
    ids = ids_of(lengths, logits.device)
    of_all = RowGroups(ids, len(lengths), *mask)
    if mask and logits.is_eager and not defers(mask[0]):
        lengths = of_all.lengths.tolist()

    every = slice(0, len(lengths))

    def loss_of(fields: dict[str, Tensor], *parts: Tensor, groups: slice = every) -> Tensor:
        mine = RowGroups(parts[count] - groups.start, groups.stop - groups.start, *parts[count + 1 :])
        loss = call_loss(loss_fn, fields, parts[:count], mine)
        check_loss(loss, mine.lengths, "group")
        return loss.where(mine.lengths > 0, 0.0)

    parts = *map(flat, row_inputs), ids, *mask
    divisor = divisor_for(of_all.lengths > 0)
    flat_logits: LinearLogits = logits.reshape(rows, logits.shape[-1])
    return flat_logits.loss(loss_of, inputs, options, parts, divisor, groups=lengths)


def call_loss(
    loss_fn: Callable[..., Tensor], fields: dict[str, Tensor], row_inputs: Sequence[Tensor], *groups: RowGroups
) -> Tensor:
    """The result of a caller's loss function, for the rows of a tile or for all rows: without autocast in both cases.

    Raises:
        ValueError: the function writes to a tensor that it is given. Those of ``row_inputs`` may be the caller's.
    """
    statistics = SoftmaxStatistics(**fields)
    given = () if torch.compiler.is_compiling() else [*fields.values(), *row_inputs]
    watched = [t for t in given if not t.is_inference()]
    versions = [t._version for t in watched]
    with without_autocast(fields["shift"]):
        loss = loss_fn(statistics, *row_inputs, *groups)
    if versions != [t._version for t in watched]:
        raise ValueError("loss_fn: expected a function that writes to none of its arguments, got one that does")
    return loss


def check_loss(loss: Any, like: Tensor, unit: str) -> None:
    """Raise unless a loss function has returned the loss of every row or group, of the shape and device of ``like``."""
    valid = isinstance(loss, Tensor) and loss.dtype in FLOATS and loss.layout is torch.strided
    if not valid or loss.shape != like.shape or loss.device != like.device:
        where = f" on {loss.device}" if isinstance(loss, Tensor) else ""
        raise ValueError(f"loss_fn: expected a loss of every {unit}, floating-point of shape {tuple(like.shape)} on "
                         f"{like.device}, got {described(loss)}{where}")  # fmt: skip
