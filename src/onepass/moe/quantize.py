"""`quantize`: a weight of experts in one of the formats of `QuantizedWeight`."""

from typing import Any

import torch
from torch import Tensor

from onepass.core.checks import FLOATS, check_bool, check_choice, described
from onepass.core.quantized import FORMATS, NESTED_BLOCK, WeightFormat
from onepass.moe.quantized import QuantizedWeight, block_of


def quantize(
    tensor: Tensor,
    format: str,
    *,
    block_size: int | tuple[int, int] | None = None,
    nested: bool = False,
    name: str = "weight",
) -> QuantizedWeight:
    """Quantize a weight ``(E, outputs, inputs)``: every value to the nearest code times the scale of its block.

    The scale of a block maps its largest magnitude to the largest code. It is rounded up to a power of two in "mxfp4",
    and in "nvfp4" to float8_e4m3fn, times a factor for each expert. Codes that the dtype of the tensor cannot represent
    are not used.

    Args:
        tensor: floating-point, finite.
        format, block_size, name: as in `QuantizedWeight`.
        nested: whether to quantize the scales of "nf4" and "fp4" to 8 bits, as bitsandbytes' double quantization.

    Returns:
        `QuantizedWeight` of the shape of ``tensor``; its decoded values have the dtype of ``tensor``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or value.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS or tensor.dim() != 3:
        raise TypeError(f"{name}: expected a floating-point tensor (E, outputs, inputs), got {described(tensor)}")
    if tensor.is_meta:
        raise TypeError(f"{name}: expected a tensor with values, got one on the meta device")
    if hasattr(tensor, "device_mesh"):
        raise TypeError(f"{name}: expected a weight that is not sharded over processes, got a DTensor")
    check_choice(format, f"{name}: format", tuple(FORMATS))
    spec = FORMATS[format]
    nested = check_bool(nested, "nested")
    if nested and not spec.flat:
        raise ValueError(f"{name}: nested: expected False for {format!r}, got True")
    E, rows, columns = tensor.shape
    f = WeightFormat(format, E, rows, columns, *block_of(format, block_size, columns, name))
    x = tensor.detach().float()
    if not x.isfinite().all():
        raise ValueError(f"{name}: expected numbers that are finite in float32, got NaN, infinity or larger ones")
    if format == "int8" and x.numel() and x.abs().max() > torch.finfo(x.dtype).max / 127:
        raise ValueError(f"{name}: expected magnitudes whose product with a code of 'int8' is finite in float32, "
                         f"got {x.abs().max().item():g}")  # fmt: skip
    if spec.flat:
        padded = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % f.block_columns)).view(-1, f.block_columns)
        largest = padded.abs().amax(1)
    else:
        height, width = f.grid
        wide = (0, width * f.block_columns - columns, 0, height * f.block_rows - rows)
        padded = torch.nn.functional.pad(x, wide).view(E, height, f.block_rows, width, f.block_columns)
        largest = padded.abs().amax((2, 4)) if padded.numel() else x.new_zeros(E, height, width)
    options: dict[str, Any] = {}
    scales, decoded = largest, largest
    top = max(spec.codes, default=448.0)
    if nested:
        scales, decoded, options["nested"] = _quantize_scales(largest)
    elif spec.scales == "e8m0":
        exponent = torch.frexp(largest / top)  # largest / top = mantissa · 2 ** exponent, mantissa from 1 / 2 to 1
        power = torch.where(exponent.mantissa == 0.5, exponent.exponent - 1, exponent.exponent).clamp(-127, 127)
        scales = torch.where(largest > 0, power + 127, 127).to(torch.uint8)
        decoded = torch.ldexp(torch.ones_like(largest), scales.int() - 127)
    elif spec.scales == "e4m3":
        of_expert = largest.flatten(1).amax(1) if largest.numel() else x.new_zeros(E)
        factor = (of_expert / (448 * top)).clamp(min=1e-30)[:, None, None]
        scales = (largest / top / factor).clamp(max=448).to(torch.float8_e4m3fn)
        decoded, options["global_scale"] = scales.float() * factor, factor
    elif format.startswith("fp8"):
        scales = decoded = largest / top
    elif format == "int8":
        decoded = largest * spec.factor
    decoded = decoded.where(decoded != 0, 1.0)
    decoded = decoded[:, None] if spec.flat else decoded[:, :, None, :, None]
    values = padded / decoded
    if spec.codes:  # the next larger code times the scale may be beyond the dtype
        positive = torch.tensor(sorted(code for code in spec.codes if code >= 0), device=x.device)
        bound = positive[torch.bucketize(torch.finfo(tensor.dtype).max / decoded, positive, right=True) - 1]
        values = values.clamp(-bound, bound)
    if spec.flat:
        values = torch.nn.functional.pad(values.flatten()[: x.numel()], (0, x.numel() % 2))
    else:
        values = values.flatten(3).flatten(1, 2)[:, :rows, : f.pitch]
    if format == "int8":
        data = values.round().clamp(-127, 127).to(torch.int8)
    elif not spec.codes:
        data = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        codes = _nearest(values, spec.codes).view(-1, 2)
        first, second = codes.unbind(1)
        data = first << 4 | second if spec.flat else second << 4 | first
    return QuantizedWeight(
        data, scales, format, (E, rows, columns), dtype=tensor.dtype, block_size=block_size, name=name, **options
    )


def _nearest(values: Tensor, table: tuple[float, ...]) -> Tensor:
    """The ids of the nearest codes, uint8."""
    codes, order = torch.tensor(table, device=values.device).sort()
    return order.to(torch.uint8)[torch.bucketize(values.contiguous(), (codes[1:] + codes[:-1]) / 2)]


def _quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """8-bit codes of scales, these decoded, and their own scales, table and offset.

    The table has codes in seven decades, twice as many in each as in the one below (dynamic quantization: Dettmers et
    al., arXiv:2110.02861).
    """
    positive = [
        10.0 ** (decade - 6) * (0.1 + 0.9 * (n + 0.5) / 2**decade) for decade in range(7) for n in range(2**decade)
    ]
    table = torch.tensor(sorted([*positive, *(-p for p in positive), 0.0, 1.0]), device=scales.device)
    offset = scales.mean() if scales.numel() else scales.new_zeros(())
    padded = torch.nn.functional.pad(scales - offset, (0, -scales.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    outer = padded.abs().amax(1)
    codes = _nearest(padded / outer.where(outer > 0, 1.0)[:, None], tuple(table.tolist()))
    decoded = (table[codes.long()] * outer[:, None] + offset).flatten()[: scales.numel()]
    return codes.flatten()[: scales.numel()], decoded, (outer, table, offset)
