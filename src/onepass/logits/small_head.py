"""The logits of a head with few rows, which are computed at once: launching the kernels of tiles would take longer."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from onepass import reference
from onepass.backend import backend_of
from onepass.core.checks import INDEX_DTYPES
from onepass.core.dispatch import apply_to_ordinary, are_ordinary, check_upstream, without_autocast
from onepass.core.invariance import is_batch_invariant
from onepass.core.options import IDENTITY
from onepass.logits.partitioned import are_partitioned
from onepass.logits.tile_plan import GIB

# Bytes of logits and multiplications of their GEMM at most, for which a fast GPU needs half a millisecond.
SMALL_LOGITS, SMALL_PRODUCT, SMALL_ON = int(0.3 * GIB), 1 << 38, ("cuda",)


def small_logits(head: Any, row_mask: Tensor | None, masked: int, *others: Tensor | None) -> Tensor | None:
    """The logits of a `LinearLogits` as a tensor that autograd records; None if they should be computed in tiles.

    They are kept until the backward, with their gradient, where tiles would have left the gradient of the weight,
    so that this is for a weight that is trained. Rows that are masked are computed, too: the host does not wait for
    their number. Whatever reads the logits does not read these rows, and their gradient is 0.

    Args:
        row_mask: ``(...)``, which is ``masked`` in masked rows.
        others: all other tensors that the loss is computed from.
    """
    if head.device.type not in SMALL_ON:
        return None
    hidden, vocab = head.hidden, head.shape[-1]
    rows, width = math.prod(hidden.shape[:-1]), hidden.shape[-1]
    if rows * vocab * head.dtype.itemsize > SMALL_LOGITS or rows * width * vocab > SMALL_PRODUCT:
        return None
    plain = head.observer is head.lora is head.max_memory is None and not head.shard.sizes
    if not plain or head.round_before_bias or is_batch_invariant() or head.dtype == torch.float16:
        return None
    if not torch.is_grad_enabled() or hidden.dtype != head.dtype:
        return None
    head.check_unchanged()  # before the parameters are read: a sharded weight is gathered, without gradients each time
    weight, bias = head.weight, head.bias
    if not weight.requires_grad or weight.dtype != head.dtype or are_partitioned(weight, bias):
        return None
    tensors = [t for t in (hidden, weight, bias, row_mask, *others) if t is not None]
    if (bias is not None and bias.dtype != head.dtype) or not are_ordinary(*tensors):
        return None
    if any([t.is_inference() for t in tensors]):
        return None
    return _apply(hidden, weight, bias, row_mask, masked)


def small_logits_of(head: Any, index: Any, masked: int) -> Tensor | None:
    """`small_logits` without a transform, for an index that is also the row mask; None if it is not valid."""
    if head.transform != IDENTITY or head.tensor is not None or type(index) is not Tensor:
        return None
    if index.dtype not in INDEX_DTYPES or index.device != head.device or index.shape != head.shape[:-1]:
        return None
    return small_logits(head, index, masked)


class _SmallLinear(torch.autograd.Function):
    """A linear layer. What masked rows of the hidden states hold reaches no gradient, even if it is infinite or NaN."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, row_mask: Tensor | None, masked: int
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight, row_mask)
        ctx.masked = masked
        with without_autocast(hidden):
            return linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_upstream(grad)
        hidden, weight, row_mask = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows = grad.reshape(-1, len(weight))
        # Reshaped by the number of rows: an error if the data of a tensor were replaced by fewer or more rows since.
        valid = None if row_mask is None else (row_mask != ctx.masked).reshape(len(rows))
        # A mode that is entered for the backward, such as a counter of operations, sees operations of torch.
        backend = backend_of(rows) if are_ordinary(rows, hidden) else reference
        results: list[Tensor | None] = [None, None, None]
        with without_autocast(hidden):
            if of_hidden:
                product = torch.mm(rows, weight)
                results[0] = keep_valid(backend, product, valid, product).view(hidden.shape)
            if of_weight:
                states = hidden.reshape(len(rows), weight.shape[1])
                results[1] = backend.few_rows_mm(rows, keep_valid(backend, states, valid))
        if of_bias:
            results[2] = rows.sum(0)
        return *results, None, None


def keep_valid(backend: Any, rows: Tensor, valid: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The rows ``(N, H)``, with zeros in those that are not valid, written to ``out`` if it is given."""
    if valid is None or not rows.numel():
        return rows
    rows = rows.contiguous()
    out = torch.empty_like(rows) if out is None else out
    backend.scale(rows, valid, out)
    return out


_apply = apply_to_ordinary(_SmallLinear)
