"""`QuantizedWeight`: a frozen weight of experts in one of several formats, an argument of `moe.expert_mlp`."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.checks import FLOATS, check_choice, check_dense, check_device, check_integer, described
from onepass.core.dispatch import is_untraced
from onepass.core.quantized import FORMATS, NESTED_BLOCK, Encoded, Weight, WeightFormat, WeightParts

MAX_MEMORY = 3 * 2**27  # bytes of decoded experts at a time; two chunks for Qwen3-30B-A3B's gate and up
FLAT_BLOCKS = tuple(2**n for n in range(5, 13))  # 32 to 4096
BYTES = {name: "codes of 4 bits, two in a byte" if f.codes else "codes of a byte" for name, f in FORMATS.items()}
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)


class QuantizedWeight(Encoded):
    """The weight ``(E, outputs, inputs)`` of a layer of experts, quantized and frozen.

    `expert_mlp` and `scattered_linear` take it in place of a tensor, and decode the experts that have tokens. A value
    is its code times the scale of its block, computed in float32 and rounded to ``dtype`` once.

    Args:
        data: the codes. For "nf4" and "fp4", as bitsandbytes packs them; for "mxfp4" and "nvfp4", two in a byte, the
            first in the low bits, and rows padded to complete blocks (the layout of gpt-oss); otherwise, one in a byte
            (int8 or float8_e4m3fn). It may have any shape of the right size.
        scales: one for each block. For "nf4" and "fp4", ``(blocks,)``, where blocks are consecutive elements; otherwise
            ``(E, rows, columns)`` of blocks. Floating-point; for "mxfp4" exponents (uint8 or float8_e8m0fnu), for
            "nvfp4" float8_e4m3fn.
        format: "nf4" or "fp4" (bitsandbytes), "int8" (a scale for each row; codes times scales / 127), "mxfp4" (blocks
            of 32), "nvfp4" (blocks of 16), "fp8_block" (128 × 128) or "fp8_row" (a scale for each row).
        shape: ``(E, outputs, inputs)``.
        dtype: the dtype of the decoded values; `to` changes it.
        block_size: for "nf4" and "fp4" 32 to 4096, for "fp8_block" ``(rows, columns)``.
        nested: ``(outer_scales, table, offset)``, if ``scales`` are 8-bit codes of bitsandbytes' double quantization:
            the scale of block b is ``table[scales[b]] · outer_scales[b // 256] + offset``.
        global_scale: for "nvfp4", a factor of all scales: a number, or a tensor of one or of one for each expert.
        name: the name of the weight in errors.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value; a scale is not finite, or
            a code of float8_e4m3fn is NaN.
    """

    sources: tuple[Tensor, ...]  # what a gradient may be asked of

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
        self.name, self.sources = name, (data, scales)
        if dtype not in FLOATS:
            raise TypeError(f"{name}: dtype: expected one of {FLOATS}, got {dtype}")
        for t, what in ((data, "data"), (scales, "scales")):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name}: {what}: expected a tensor, got {described(t)}")
            check_device(t, data, f"{name}: {what}", "the data")
        if not isinstance(shape, tuple | list) or len(shape) != 3:
            raise ValueError(f"{name}: shape: expected (E, outputs, inputs), got {described(shape)}")
        E, rows, columns = (check_integer(n, f"{name}: shape", 0) for n in shape)
        of = WeightFormat(format, E, rows, columns, *block_of(format, block_size, columns, name))
        parts = _parts(scales.detach(), of, nested, global_scale, data.device, name)
        codes = _bytes(data.detach(), of, name)
        super().__init__(codes, parts, of, dtype)
        if is_untraced(data, *parts) and not data.is_meta:
            _check_values(self)

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any = None, *, name: str = "weight") -> "QuantizedWeight":
        """The weight that bitsandbytes has quantized, without a copy.

        Args:
            data: the codes, from ``quantize_4bit`` or ``int8_vectorwise_quant``.
            state: the ``QuantState``, which contains the format ("nf4" or "fp4"); for int8, the statistics of the rows.
                By default, the state that is an attribute of ``data``.
            name: the name of the weight in errors.

        Raises:
            TypeError, ValueError: as in the class, or the weight does not have three dimensions, or has another table
                of codes.
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

    @classmethod
    def from_transformers(cls, experts: Any, name: str) -> "QuantizedWeight | None":
        """The weight ``name`` of a module of experts, without a copy; None if it is an ordinary tensor.

        Supported are transformers' experts of float8_e4m3fn (``FP8Experts``, also with codes of MXFP4) and of gpt-oss
        in MXFP4, parameters that bitsandbytes (``replace_parameter_4bit``) or axolotl (8 bits) has quantized, and the
        results of `quantize_experts`.

        Raises:
            TypeError, ValueError: as the class, or the module has a quantized weight of another kind.
        """
        if name in getattr(experts, "parametrizations", {}):
            stored = experts.parametrizations[name]
            kind = stored[0]
            if hasattr(kind, "quantized_weight"):
                return kind.quantized_weight(stored.original, name)
            state = getattr(kind, "quant_state", getattr(kind, "row_stats", None))
            if state is not None:
                return cls.from_bitsandbytes(stored.original, state, name=name)
            data: Any = stored.original
        else:
            data = getattr(experts, name)
        if isinstance(data, Tensor) and data.is_floating_point() and data.element_size() > 1:
            return None
        scales = getattr(experts, f"{name}_scale_inv", getattr(experts, f"{name}_scales", None))
        config = getattr(experts, f"{name}_precision_config", None)
        if scales is None and config is not None:  # gpt-oss, in the layout of a card
            scales, data = (t.storage.layout.unswizzle_data(t.storage.data).mT for t in (config.weight_scale, data))
        if not isinstance(data, Tensor) or not isinstance(scales, Tensor) or data.dim() < 3:
            raise TypeError(f"{name}: expected a weight in a known format, got {described(data)}")
        E, rows = data.shape[:2]
        if data.dtype != torch.float8_e4m3fn:  # two codes of MXFP4 in a byte
            columns = 2 * data[0, 0].numel()
            return cls(data, scales, "mxfp4", (E, rows, columns), name=name)
        columns = data.shape[2]
        height, width = getattr(experts, "block_size", None) or (rows, columns)
        if scales.shape[1:2] == (2,) and rows <= height:  # gate and up have scales of their own, however few rows
            height = -(-rows // 2)
        return cls(data, scales, "fp8_block", (E, rows, columns), block_size=(height, width), name=name)

    def to(self, target: torch.dtype | torch.device | str) -> "QuantizedWeight":
        """The weight on another device, or with another ``dtype`` of the decoded values."""
        if isinstance(target, torch.dtype) and target not in FLOATS:
            raise TypeError(f"target: expected a floating-point dtype, got {target}")
        found = super().to(target)
        if found.device != self.device and not any(t.requires_grad for t in self.sources):
            found.sources = ()  # so that nothing keeps the memory of the other device
        return found

    @property
    def requires_grad(self) -> bool:
        """False: a quantized weight is frozen."""
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return self.data.nbytes + sum(t.nbytes for t in self.parts if t is not None)

    def dequantize(self) -> Tensor:
        """The whole weight as a tensor of ``dtype``."""
        f = self.format
        out = torch.empty((f.experts, f.rows, f.columns), dtype=self.dtype, device=self.device)
        values: Tensor = backend_of(out).decode(self, out)
        return values.mT if f.flipped else values

    def __repr__(self) -> str:
        shape = tuple(self.shape)
        return f"QuantizedWeight({self.format.name!r}, shape={shape}, dtype={self.dtype}, {self.nbytes} bytes)"


def split_weight(weight: Weight, name: str, max_memory: int | None) -> tuple[Tensor, WeightParts, WeightFormat]:
    """The tensor of a weight, its other tensors, and its format, as operations registered with torch take them.

    Raises:
        ValueError: a gradient of the codes or scales is asked for.
    """
    limit = MAX_MEMORY if max_memory is None else check_integer(max_memory, "max_memory", 1)
    if isinstance(weight, Tensor):
        return weight, WeightParts(), WeightFormat()
    sources = getattr(weight, "sources", (weight.data,))
    if torch.is_grad_enabled() and any(t.requires_grad for t in sources):
        what = "data" if sources[0].requires_grad else "scales"
        raise ValueError(
            f"{name}: a quantized weight has no gradient, and that of its {what} is asked for; "
            "call requires_grad_(False) on it, and train an adapter"
        )
    return weight.data, weight.parts, weight.format._replace(max_memory=limit)


def block_of(format: str, size: Any, columns: int, name: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    height, width = FORMATS[format].block
    width = width or max(columns, 1)
    if size is None:
        return height, width
    if FORMATS[format].flat:
        number = check_integer(size, f"{name}: block_size")
        if number not in FLAT_BLOCKS:
            raise ValueError(f"{name}: block_size: expected a power of two from 32 to 4096, got {number}")
        return 1, number
    if format == "fp8_block":
        if not isinstance(size, tuple | list) or len(size) != 2:
            raise TypeError(f"{name}: block_size: expected (rows, columns), got {described(size)}")
        return tuple(check_integer(n, f"{name}: block_size", 1) for n in size)  # type: ignore[return-value]
    if isinstance(size, Tensor) or size not in (width, (height, width)):
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
    if data.dtype.is_complex or data.dtype == torch.bool:
        raise TypeError(f"{name}: data: expected {BYTES[of.name]}, got {data.dtype}")
    data = data.contiguous().view(-1).view(wanted)
    if data.numel() != size:
        shape = (of.experts, of.rows, of.columns)
        raise ValueError(
            f"{name}: data: expected {size} bytes for shape {shape} in {of.name!r} ({BYTES[of.name]}), "
            f"got {data.numel()}"
        )
    return data


def _parts(
    scales: Tensor, of: WeightFormat, nested: Any, global_scale: Any, device: torch.device, name: str
) -> WeightParts:
    """The scales and what else decodes them, checked."""
    format = FORMATS[of.name]
    height, width = of.grid
    shapes: list[tuple[int, ...]] = [(of.experts, height, width)]
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
        if not isinstance(nested, tuple | list) or len(nested) != 3:
            raise TypeError(f"{name}: nested: expected (outer_scales, table, offset), got {described(nested)}")
        for t, what in zip(nested, ("outer_scales", "table", "offset")):
            check_factors(t, f"{name}: nested: {what}")
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
        raise ValueError(f"{name}: global_scale: expected {'one' if global_scale is None else 'None'} for {of.name!r}, "
                         f"got {described(global_scale)}")  # fmt: skip
    if global_scale is not None:
        check_factors(global_scale, f"{name}: global_scale")
        outer = torch.as_tensor(global_scale, dtype=torch.float32, device=device).detach().flatten()
        if outer.numel() not in (1, of.experts):
            raise ValueError(f"{name}: global_scale: expected 1 or {of.experts} elements, got {outer.numel()}")
        outer = outer.expand(of.experts).contiguous()
    if format.scales == "float" and nested is None:
        scales = scales.float() if scales.dtype in (torch.float64, E8M0) else scales
    else:
        scales = scales.contiguous().view(torch.uint8)
    return WeightParts(scales.contiguous(), outer, table, offset)


def check_factors(value: Any, name: str) -> None:
    """Raise unless ``value`` is a number or a dense tensor of floating-point numbers."""
    is_tensor = isinstance(value, Tensor)
    if not (value.dtype in FLOATS if is_tensor else isinstance(value, Real) and not isinstance(value, bool)):
        raise TypeError(f"{name}: expected a number or a floating-point tensor, got {described(value)}")
    check_dense(value, name)


def _check_values(weight: QuantizedWeight) -> None:
    """Raise for scales that are not finite, and for codes that are NaN: what damaged files have."""
    f, parts, name = weight.format, weight.parts, weight.name
    scales: Any = parts.scales
    bad: Any
    format = FORMATS[f.name]
    if format.scales == "e8m0":
        bad = scales == 255
    elif format.scales == "e4m3":
        bad = (scales & 127) == 127
    elif parts.table is None:
        bad = ~scales.isfinite()
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
