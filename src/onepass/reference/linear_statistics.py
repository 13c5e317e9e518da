"""The softmax statistics of a linear head from its factors, in plain PyTorch: the definition, which no path calls."""

import torch
from torch import Tensor

from onepass.core.options import Inputs, Options, Results
from onepass.reference.shards import shard_statistics
from onepass.reference.softmax import softmax_statistics


def supports_linear_statistics(dtype: torch.dtype, b: Tensor, inputs: Inputs, options: Options) -> bool:
    """False: plain PyTorch cannot compute the statistics without the logits."""
    return False


def state_bytes(vocab: int, options: Options) -> int:
    """Bytes of workspace per row: the logits in float32."""
    return 4 * vocab


def linear_statistics(
    a: Tensor, b: Tensor, bias: Tensor | None, inputs: Inputs, options: Options, rounds: bool, twice: bool,
    results: Results, shard: bool = False,
) -> None:  # fmt: skip
    """Write the `softmax_statistics` of the logits ``a @ b + bias`` to ``results``, or the states of the rows."""
    logits = a.to(torch.promote_types(a.dtype, torch.float32)) @ b.to(torch.promote_types(b.dtype, torch.float32))
    if bias is not None:
        logits = (logits.to(a.dtype) if twice else logits) + bias.to(logits.dtype)
    logits = logits.to(a.dtype) if rounds else logits
    found = (shard_statistics(logits, inputs, options),) if shard else softmax_statistics(logits, inputs, options)
    for to, value in zip(results, found):
        if to is not None and value is not None:
            to.copy_(value)
