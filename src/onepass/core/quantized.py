"""The formats of quantized weights, and the form of a weight that `kernels` and `reference` decode.

In every format a value is a code times the scale of its block, in float32. Codes of 4 bits are looked up in a table.
"""

from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onepass.core.checks import FLOATS

Self = TypeVar("Self", bound="Encoded")

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
HALF_OF_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
HALF_OF_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PER_127 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it
NESTED_BLOCK = 256  # scales that share a scale, where scales are quantized themselves


class Format(NamedTuple):
    """How the values of a weight ``(E, rows, columns)`` are stored."""

    codes: tuple[float, ...]  # the values of the codes of 4 bits; none for codes of a byte
    block: tuple[int, int]  # rows and columns that share a scale; 0 stands for all columns
    scales: str = "float"  # the dtype of the scales: "float" for any floating-point one, "e8m0", or "e4m3"
    flat: bool = False  # blocks are of consecutive elements of the whole weight, and the first code is in the high bits
    factor: float = 1.0


FORMATS = {
    "nf4": Format(NF4, (1, 64), flat=True),
    "fp4": Format(tuple(c / 12 for c in HALF_OF_FP4) + tuple(-c / 12 for c in HALF_OF_FP4), (1, 64), flat=True),
    "int8": Format((), (1, 0), factor=PER_127),
    "mxfp4": Format(HALF_OF_E2M1 + tuple(-c for c in HALF_OF_E2M1), (1, 32), "e8m0"),
    "nvfp4": Format(HALF_OF_E2M1 + tuple(-c for c in HALF_OF_E2M1), (1, 16), "e4m3"),
    "fp8_block": Format((), (128, 128)),
    "fp8_row": Format((), (1, 0)),
}


class WeightFormat(NamedTuple):
    """What is known of a quantized weight besides its tensors; without a name, the weight is not quantized."""

    name: str = ""
    experts: int = 0
    rows: int = 0
    columns: int = 0
    block_rows: int = 1
    block_columns: int = 1
    max_memory: int = 0  # bytes of decoded experts at a time
    flipped: bool = False  # whether the last two dimensions are transposed

    @property
    def pitch(self) -> int:
        """Codes per row: blocks of 4-bit formats are complete."""
        format = FORMATS[self.name]
        if not format.codes or format.flat:
            return self.columns
        return -(-self.columns // self.block_columns) * self.block_columns

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of an expert, along rows and columns, unless blocks are flat."""
        return -(-self.rows // self.block_rows), -(-self.columns // max(self.block_columns, 1))


class WeightParts(NamedTuple):
    """The tensors of a quantized weight besides its codes.

    The scale of block b is ``scales[b]``, times ``outer_scales[e]`` of the expert e in "nvfp4"; or, if scales are
    quantized themselves, ``table[scales[b]]·outer_scales[b // 256] + offset``.
    """

    scales: Tensor | None = None
    outer_scales: Tensor | None = None
    table: Tensor | None = None
    offset: Tensor | None = None


class Encoded:
    """A quantized weight ``(E, rows, columns)``, or its transpose: with as much of a tensor's interface as experts use.

    Args:
        data: the codes, uint8 or int8.
        parts, format: see there.
        dtype: of the decoded values.
    """

    decoded: Any = None  # the memory for decoded experts that the weights of a layer share; see `kernels`

    def __init__(self, data: Tensor, parts: WeightParts, format: WeightFormat, dtype: torch.dtype) -> None:
        self.data, self.parts, self.format, self.dtype = data, parts, format, dtype

    @property
    def shape(self) -> torch.Size:
        f = self.format
        return torch.Size((f.experts, f.columns, f.rows) if f.flipped else (f.experts, f.rows, f.columns))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def mT(self: Self) -> Self:
        """The weight with the last two dimensions transposed; nothing is moved."""
        found = copy(self)
        found.format = self.format._replace(flipped=not self.format.flipped)
        return found

    def to(self: Self, target: torch.dtype | torch.device | str) -> Self:
        """The weight on another device, or with another ``dtype`` of the decoded values."""
        found = copy(self)
        if isinstance(target, torch.dtype):
            found.dtype = target
        else:
            found.data = self.data.to(target)
            found.parts = WeightParts(*[t if t is None else t.to(target) for t in self.parts])
        return found

    def dim(self) -> int:
        return 3

    def is_floating_point(self) -> bool:
        """Whether its values are."""
        return True

    def __len__(self) -> int:
        return self.format.experts


Weight = Tensor | Encoded


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor or a quantized weight as autocast casts it. Other values are left to the checks."""
    is_castable = isinstance(value, Encoded) or (isinstance(value, Tensor) and value.dtype in FLOATS)
    return value.to(dtype) if is_castable else value


def as_weight(data: Any, parts: WeightParts, format: WeightFormat, like: Tensor) -> Any:
    """The weight as kernels take it: ``data`` itself if it is not quantized."""
    return Encoded(data, parts, format, like.dtype) if format.name else data


def block_scales(weight: Encoded, begin: int, end: int) -> Tensor:
    """The float32 scales of blocks ``begin`` to ``end``, counted over the whole weight."""
    scales, outer, table, offset = weight.parts
    part = scales.flatten()[begin:end]  # type: ignore[union-attr]
    if table is not None:
        block = torch.arange(begin, end, device=part.device) // NESTED_BLOCK
        return table[part.long()] * outer[block] + offset  # type: ignore[index, operator]
    kind = FORMATS[weight.format.name].scales
    if kind == "e8m0":
        bits = part.to(torch.int32)
        return (bits << 23).where(bits > 0, 0x400000).view(torch.float32)  # exact, and 2 ** -127 is subnormal
    if kind == "e4m3":
        height, width = weight.format.grid
        expert = torch.arange(begin, end, device=part.device) // max(height * width, 1)
        return part.view(torch.float8_e4m3fn).float() * outer[expert]  # type: ignore[index]
    return part.float()
