"""The values of quantized weights, in plain PyTorch: the definition of every format."""

import torch
from torch import Tensor

from onepass.core.quantized import FORMATS, Encoded, block_scales


def decode(weight: Encoded, out: Tensor, first: int = 0, offsets: Tensor | None = None) -> Tensor:
    """Write the values of experts from ``first`` on into ``out`` ``(experts, rows, columns)``, and return it.

    ``offsets`` of `Groups`, if given, tell which experts have no rows. These need not be written.
    """
    f, format = weight.format, FORMATS[weight.format.name]
    count, rows, columns = out.shape
    if not out.numel():
        return out
    of_expert = rows * f.pitch
    begin, end = first * of_expert, (first + count) * of_expert
    data = weight.data.flatten()
    if format.codes:
        packed = data[begin // 2 : -(-end // 2)]
        high, low = packed >> 4, packed & 15
        pairs = torch.stack((high, low) if format.flat else (low, high), -1).flatten()[begin % 2 :][: end - begin]
        values = torch.tensor(format.codes, device=out.device)[pairs.long()]
    elif f.name == "int8":
        values = data[begin:end].float()
    else:
        values = data[begin:end].view(torch.float8_e4m3fn).float()
    if format.flat:
        size = f.block_columns
        one = begin // size
        scales = block_scales(weight, one, -(-end // size)).repeat_interleave(size)[begin - one * size :]
        values = (values * scales[: end - begin]).view(count, rows, columns)
    else:
        height, width = f.grid
        scales = block_scales(weight, first * height * width, (first + count) * height * width)
        scales = scales.view(count, height, width).repeat_interleave(f.block_rows, 1)[:, :rows]
        values = values.view(count, rows, f.pitch)[..., :columns]
        values = values * scales.repeat_interleave(f.block_columns, 2)[..., :columns] * format.factor
    return out.copy_(values)
