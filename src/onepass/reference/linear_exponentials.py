"""The exponentials of the logits of a linear head, in plain PyTorch: the definition, which no path calls."""

import torch
from torch import Tensor

from onepass.core.options import Inputs, Options, Results
from onepass.reference.softmax import softmax_statistics


def supports_linear_exponentials(dtype: torch.dtype, rows: int, b: Tensor, inputs: Inputs, options: Options) -> bool:
    """Return False: on a CPU, the normalizers of a tile take less time than another product."""
    return False


def exponentials_bytes(vocab: int, width: int, options: Options) -> int:
    """Bytes of workspace per row: the logits in float32."""
    return 4 * vocab


def linear_exponentials(
    a: Tensor, b: Tensor, inputs: Inputs, options: Options, results: Results, out: Tensor, rest: Tensor | None = None
) -> Tensor:
    """Write the `softmax_statistics` of the logits ``a @ b``, and their gradient but for a factor of each row.

    The last columns of the gradient are written to ``rest``, if it is given.
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    logits = (a.to(dtype) @ b.to(dtype)).to(a.dtype)
    found = softmax_statistics(logits, inputs, options)
    for to, value in zip(results, found):
        if to is not None and value is not None:
            to.copy_(value)
    index, row_mask = inputs[:2]
    assert index is not None, "an index of each row"
    factor = options.transform.factors()[0]
    z = logits.to(dtype) * factor
    e = (z - z.amax(1, keepdim=True)).exp()
    total = e.sum(1)
    inside = (index >= 0) & (index < len(b.t()))
    total = total.where(inside, torch.nan)
    e += (total - total)[:, None]  # NaN if the row is
    e.scatter_add_(1, index.where(inside, 0).long()[:, None], -total[:, None])
    active = torch.ones_like(inside) if row_mask is None else row_mask.ne(options.masked)
    e = e.where(active[:, None], 0.0)
    out.copy_(e[:, : out.shape[1]])
    if rest is not None:
        rest.copy_(e[:, out.shape[1] :])
    return (-factor / total).where(active, 0.0)


def scale_exponentials(factors: Tensor, upstream: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    """Multiply ``factors`` of `linear_exponentials` by the ``upstream`` gradients, in place; 0 where either is."""
    idle = (factors == 0) | (upstream == 0)
    factors.mul_(upstream).masked_fill_(idle, 0.0)
    for columns in (out, rest):
        if columns is not None:
            columns.masked_fill_(idle[:, None], 0.0)
