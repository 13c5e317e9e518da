"""`QuantizedWeight`: a frozen weight of experts in one of several formats, beside a tensor in `moe.expert_mlp`."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, check_choice, check_integer, described
from onepass.core.dispatch import is_untraced
from onepass.core.quantized import FORMATS, NESTED_BLOCK, Encoded, Weight, WeightFormat, WeightParts

MAX_MEMORY = 3 * 2**27  # bytes of decoded experts at a time; two chunks for Qwen3-30B-A3B's gate and up
FLAT_BLOCKS = tuple(2**n for n in range(5, 13))  # 32 to 4096
BYTES = {name: "codes of 4 bits, two in a byte" if f.codes else "codes of a byte" for name, f in FORMATS.items()}
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


class QuantizedWeight(Encoded):
    """The weight ``(E, outputs, inputs)`` of a layer of experts, quantized and frozen.

    `expert_mlp` and `scattered_linear` take it in place of a tensor, and decode the experts that have tokens, once in the
    forward and once in the backward. A value is its code times the scale of its block, computed in float32 and rounded
    to ``dtype`` once.

    Args:
        data: the codes. Of "nf4" and "fp4" as bitsandbytes packs them; of "mxfp4" and "nvfp4" two in a byte, the first in
            the low bits, and rows padded to complete blocks (the layout of gpt-oss); else one in a byte (int8 or
            float8_e4m3fn). The shape is not read, its size is.
        scales: one for each block. "nf4", "fp4": ``(blocks,)`` of consecutive elements; else ``(E, rows, columns)`` of
            blocks. Floating-point; for "mxfp4" exponents (uint8 or float8_e8m0fnu), for "nvfp4" float8_e4m3fn.
        format: "nf4" or "fp4" (bitsandbytes), "int8" (a scale for each row; codes times scales / 127), "mxfp4" (blocks of
            32), "nvfp4" (blocks of 16), "fp8_block" (128 × 128) or "fp8_row" (a scale for each row).
        shape: ``(E, outputs, inputs)``.
        dtype: of the decoded values; `to` changes it.
        block_size: of "nf4" and "fp4" 32 to 4096, of "fp8_block" ``(rows, columns)``.
        nested: ``(outer_scales, table, offset)``, where ``scales`` are 8-bit codes of bitsandbytes' double quantization:
            the scale of block b is ``table[scales[b]] · outer_scales[b // 256] + offset``.
        global_scale: of "nvfp4", a number or one for each expert, float32: a factor of all scales.
        name: how errors name the weight.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; a scale is not finite, or a
            code of float8_e4m3fn is NaN.
    """

    def __init__(
        self,
        data: Tensor,
        scales: Tensor,
        format: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.bfloat16,
        block_size: int | tuple[int, int] | None = None,
        nested: tuple[Tensor, Tensor, Tensor] | None = None,
        global_scale: Tensor | float | None = None,
        name: str = "weight",
    ) -> None:
        check_choice(format, f"{name}: format", tuple(FORMATS))
        self.name, self.source = name, data
        if dtype not in FLOATS:
            raise TypeError(f"{name}: dtype: expected one of {FLOATS}, got {dtype}")
        for t, what in ((data, "data"), (scales, "scales")):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: {what}: expected a tensor, got {described(t)}")
            if t.device != data.device:
                raise ValueError(f"{name}: {what}: expected device {data.device}, that of the data, got {t.device}")
        if not isinstance(shape, tuple | list) or len(shape) != 3:
            raise ValueError(f"{name}: shape: expected (E, outputs, inputs), got {described(shape)}")
        E, rows, columns = (check_integer(n, f"{name}: shape", 0) for n in shape)
        of = WeightFormat(format, E, rows, columns, *_block(format, block_size, columns, name))
        parts = _parts(scales.detach(), of, nested, global_scale, data.device, name)
        codes = _bytes(data.detach(), of, name)
        super().__init__(codes, parts, of, dtype)
        if is_untraced(data, *parts) and not data.is_meta:
            _check_values(self)

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any = None, *, name: str = "weight") -> "QuantizedWeight":
        """The weight that bitsandbytes has quantized, without a copy.

        Args:
            data: its codes, from ``quantize_4bit`` (the state says "nf4" or "fp4") or ``int8_vectorwise_quant``.
            state: its ``QuantState``; for int8 the statistics of the rows. By default those that ``data`` carries.
            name: how errors name the weight.

        Raises:
            TypeError, ValueError: as the class; the weight does not have three dimensions; another table of codes.
        """
        if state is None:
            state = getattr(data, "quant_state", getattr(data, "SCB", None))
        if isinstance(state, Tensor):
            return cls(data, state, "int8", tuple(data.shape), dtype=torch.float16, name=name)
        missing = [n for n in ("absmax", "shape", "code", "blocksize", "quant_type", "dtype") if not hasattr(state, n)]
        if missing:
            raise TypeError(f"{name}: state: expected a QuantState or the statistics of rows, got {described(state)}")
        check_choice(state.quant_type, f"{name}: format", ("nf4", "fp4"))
        table = torch.tensor(FORMATS[state.quant_type].codes, device=data.device)
        if state.code is not None and not torch.equal(state.code.to(table), table):
            raise ValueError(f"{name}: format: expected the table of codes of {state.quant_type!r}, got another one")
        nested = None
        if getattr(state, "state2", None) is not None:
            if state.state2.blocksize != NESTED_BLOCK:
                raise ValueError(f"{name}: nested: expected blocks of {NESTED_BLOCK}, got {state.state2.blocksize}")
            nested = state.state2.absmax, state.state2.code, state.offset
        return cls(
            data, state.absmax, state.quant_type, tuple(state.shape), dtype=state.dtype, block_size=state.blocksize,
            nested=nested, name=name,
        )  # fmt: skip

    @property
    def requires_grad(self) -> bool:
        """False: a quantized weight is frozen."""
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.data.nbytes + sum(t.nbytes for t in self.parts if t is not None)

    def dequantize(self) -> Tensor:
        """The whole weight as a tensor ``(E, outputs, inputs)`` of ``dtype``."""
        out = torch.empty((self.format.experts, self.format.rows, self.format.columns), dtype=self.dtype, device=self.device)
        values: Tensor = backend_of(out).decode(self, out)
        return values

    def to(self, *args: Any) -> "QuantizedWeight":
        """The weight on another device or with another ``dtype`` of the decoded values, as `torch.Tensor.to`."""
        found: QuantizedWeight = object.__new__(type(self))
        device, dtype, *_ = torch._C._nn._parse_to(*args)
        move = lambda t: t if t is None or device is None else t.to(device)  # noqa: E731
        found.name, found.source = self.name, self.source
        parts = WeightParts(*map(move, self.parts))
        Encoded.__init__(found, move(self.data), parts, self.format, dtype or self.dtype, self.flipped)
        return found

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.format.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, {self.nbytes} bytes)"


def apart(
    weight: Weight, name: str, max_memory: int | None
) -> tuple[Tensor, WeightParts, WeightFormat]:
    """The tensor of a weight, its other tensors, and its format, as operations registered with torch take them.

    Raises:
        ValueError: a gradient of the codes is asked for.
    """
    limit = MAX_MEMORY if max_memory is None else check_integer(max_memory, "max_memory", 1)
    if isinstance(weight, Tensor):
        return weight, WeightParts(), WeightFormat()
    source = getattr(weight, "source", weight.data)
    if torch.is_grad_enabled() and source.requires_grad:
        raise ValueError(
            f"{name}: a quantized weight has no gradient, and that of its data is asked for; "
            "call requires_grad_(False) on it, and train an adapter"
        )
    return weight.data, weight.parts, weight.format._replace(max_memory=limit)


def _block(format: str, size: Any, columns: int, name: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    height, width = FORMATS[format].block
    width = width or max(columns, 1)
    if size is None:
        return height, width
    if FORMATS[format].flat:
        if size not in FLAT_BLOCKS:
            raise ValueError(f"{name}: block_size: expected a power of two from 32 to 4096, got {described(size)}")
        return 1, int(size)
    if format == "fp8_block":
        if not isinstance(size, tuple | list) or len(size) != 2:
            raise TypeError(f"{name}: block_size: expected (rows, columns), got {described(size)}")
        return tuple(check_integer(n, f"{name}: block_size", 1) for n in size)  # type: ignore[return-value]
    if size not in (width, (height, width)):
        raise ValueError(f"{name}: block_size: expected {width} for {format!r}, got {described(size)}")
    return height, width


def _bytes(data: Tensor, of: WeightFormat, name: str) -> Tensor:
    """The codes as uint8, or int8."""
    codes = of.experts * of.rows * of.pitch
    size = -(-codes // 2) if FORMATS[of.name].codes else codes
    wanted = torch.int8 if of.name == "int8" else torch.uint8
    if of.name == "int8" and data.dtype != torch.int8:
        raise TypeError(f"{name}: data: expected torch.int8, got {data.dtype}")
    if of.name.startswith("fp8") and data.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"{name}: data: expected torch.float8_e4m3fn, got {data.dtype}")
    data = data.contiguous().view(-1).view(wanted)
    if data.numel() != size:
        shape = (of.experts, of.rows, of.columns)
        raise ValueError(
            f"{name}: data: expected {size} bytes for shape {shape} in {of.name!r} ({BYTES[of.name]}), got {data.numel()}"
        )
    return data


def _parts(
    scales: Tensor, of: WeightFormat, nested: Any, global_scale: Any, device: torch.device, name: str
) -> WeightParts:
    """The scales and what else decodes them, checked."""
    format = FORMATS[of.name]
    height, width = of.grid
    shapes = [(of.experts, height, width)]
    if format.flat:
        shapes = [(-(-of.experts * of.rows * of.columns // of.block_columns),)]
    elif width == 1:
        shapes += [(of.experts, height), (of.experts * height,)]
    if tuple(scales.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name}: scales: expected shape {wanted} for {of.name!r}, got {tuple(scales.shape)}")
    outer, table, offset = (None, None, None)
    if nested is not None:
        if not format.flat:
            raise ValueError(f"{name}: nested: expected None for {of.name!r}, got nested scales")
        outer, table, offset = (torch.as_tensor(t, dtype=torch.float32, device=device).detach() for t in nested)
        blocks = -(-scales.numel() // NESTED_BLOCK)
        for t, what, size in ((outer, "outer_scales", blocks), (table, "table", 256), (offset, "offset", 1)):
            if t.numel() != size:
                raise ValueError(f"{name}: nested: expected {size} elements of {what}, got {tuple(t.shape)}")
        kinds: tuple[torch.dtype, ...] = (torch.uint8,)
    elif format.scales == "float":
        kinds = (*FLOATS, E8M0)
    else:
        kinds = (torch.uint8, E8M0) if format.scales == "e8m0" else (torch.float8_e4m3fn, torch.uint8)
    if scales.dtype not in kinds:
        raise TypeError(f"{name}: scales: expected {' or '.join(map(str, dict.fromkeys(kinds)))}, got {scales.dtype}")
    if (global_scale is not None) != (format.scales == "e4m3"):
        raise ValueError(f"{name}: global_scale: expected {'one' if global_scale is None else 'None'} for {of.name!r}")
    if global_scale is not None:
        outer = torch.as_tensor(global_scale, dtype=torch.float32, device=device).detach().flatten()
        if outer.numel() not in (1, of.experts):
            raise ValueError(f"{name}: global_scale: expected 1 or {of.experts} elements, got {outer.numel()}")
        outer = outer.expand(of.experts).contiguous()
    if format.scales == "float" and nested is None:
        scales = scales.float() if scales.dtype in (torch.float64, E8M0) else scales
    else:
        scales = scales.contiguous().view(torch.uint8)
    return WeightParts(scales.contiguous(), outer, table, offset)


def _check_values(weight: QuantizedWeight) -> None:
    """Raise for scales that are not finite, and for codes that are NaN: what damaged files have."""
    f, parts, name = weight.format, weight.parts, weight.name
    format = FORMATS[f.name]
    if format.scales == "e8m0":
        bad = parts.scales == 255  # type: ignore[operator]
    elif format.scales == "e4m3":
        bad = (parts.scales & 127) == 127  # type: ignore[operator]
    elif parts.table is None:
        bad = ~parts.scales.isfinite()  # type: ignore[union-attr]
    else:
        bad = ~parts.outer_scales.isfinite()  # type: ignore[union-attr]
    if bad.any():
        block = int(bad.flatten().nonzero()[0])
        what = "blocks of scales" if parts.table is not None else "blocks"
        raise ValueError(f"{name}: scales: expected finite numbers, got NaN or infinity in {int(bad.sum())} of "
                         f"{bad.numel()} {what}, first in block {block}")  # fmt: skip
    for t, what in ((parts.outer_scales, "global_scale"), (parts.table, "table"), (parts.offset, "offset")):
        if t is not None and not t.isfinite().all():
            raise ValueError(f"{name}: {what}: expected finite numbers, got NaN or infinity")
    if f.name.startswith("fp8"):
        of_expert = max(1, f.rows * f.columns)
        for e, part in enumerate(weight.data.split(of_expert)):
            if ((part & 127) == 127).any():
                raise ValueError(f"{name}: data: expected codes of numbers, got NaN in expert {e}")


def quantize(
    tensor: Tensor,
    format: str,
    *,
    block_size: int | tuple[int, int] | None = None,
    nested: bool = False,
    name: str = "weight",
) -> QuantizedWeight:
    """Quantize a weight ``(E, outputs, inputs)``: every value to the nearest code times the scale of its block.

    The scale makes the largest magnitude of a block the largest code: rounded up to a power of two in "mxfp4", and to
    float8_e4m3fn in "nvfp4".

    Args:
        tensor: floating-point, finite.
        format, block_size, name: as in `QuantizedWeight`.
        nested: whether to quantize the scales of "nf4" and "fp4" to 8 bits, as bitsandbytes' double quantization.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or value.
    """
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS or tensor.dim() != 3:
        raise TypeError(f"{name}: expected a floating-point tensor (E, outputs, inputs), got {described(tensor)}")
    check_choice(format, f"{name}: format", tuple(FORMATS))
    spec = FORMATS[format]
    if nested and not spec.flat:
        raise ValueError(f"{name}: nested: expected False for {format!r}, got True")
    E, rows, columns = tensor.shape
    f = WeightFormat(format, E, rows, columns, *_block(format, block_size, columns, name))
    x = tensor.detach().float()
    if not x.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")
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
        options["global_scale"] = (largest.max() / (448 * top) if largest.numel() else x.new_zeros(())).clamp(min=1e-30)
        scales = (largest / top / options["global_scale"]).clamp(max=448).to(torch.float8_e4m3fn)
        decoded = scales.float() * options["global_scale"]
    elif format.startswith("fp8"):
        scales = decoded = largest / top
    elif format == "int8":
        decoded = largest * spec.factor
    decoded = decoded.where(decoded != 0, 1.0)
    if spec.flat:
        values = (padded / decoded[:, None]).flatten()[: x.numel()]
        values = torch.nn.functional.pad(values, (0, x.numel() % 2))
    else:
        values = (padded / decoded[:, :, None, :, None]).view(E, height * f.block_rows, -1)[:, :rows, : f.pitch]
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
