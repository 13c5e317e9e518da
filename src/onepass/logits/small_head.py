"""The logits of a head with few rows, which are computed at once: launching the kernels of tiles would take longer."""

from typing import Any

import torch

from onepass.core.invariance import is_batch_invariant
from onepass.core.options import Inputs
from onepass.logits.partitioned import are_partitioned
from onepass.logits.source import TensorLogits
from onepass.logits.tile_plan import GIB

# Bytes of logits and multiplications of their GEMM at most, for which a fast GPU needs half a millisecond.
SMALL_LOGITS, SMALL_PRODUCT, SMALL_ON = int(0.3 * GIB), 1 << 38, ("cuda",)


def small_logits(head: Any, inputs: Inputs) -> TensorLogits | None:
    """The logits of a `LinearLogits` as a tensor that autograd records; None if they should be computed in tiles.

    They are kept until the backward, with their gradient, where tiles would have left the gradient of the weight,
    so that this is for a weight that is trained. Rows that are masked are computed, too: the host does not wait for
    their number.
    """
    rows, width, vocab = head.shape[:-1].numel(), head.hidden.shape[-1], head.shape[-1]
    if head.device.type not in SMALL_ON or rows * vocab * head.dtype.itemsize > SMALL_LOGITS:
        return None
    if rows * width * vocab > SMALL_PRODUCT or not torch.is_grad_enabled() or not head.is_eager:
        return None
    # The weight is read last: a sharded one is gathered, without gradients at each reading.
    plain = head.observer is head.lora is head.max_memory is None and not head.shard.sizes
    if not plain or head.round_before_bias or is_batch_invariant() or head.dtype == torch.float16:
        return None
    hidden, weight, bias = head.hidden, head.weight, head.bias
    if not (weight.requires_grad and hidden.dtype == weight.dtype == head.dtype) or are_partitioned(weight, bias):
        return None
    if any(t is not None and t.is_inference() for t in (hidden, weight, bias, *inputs)):
        return None
    return TensorLogits(head.untransformed_columns(inputs.row_mask))
