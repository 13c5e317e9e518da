"""The values of a quantized weight on a GPU: `decode` writes them to memory, `decode_tile` has them in registers.

`grouped_gemm` uses both: some experts at a time are decoded into a buffer, which the GEMM then reads; or, for few rows,
the GEMM decodes each tile that it reads. Bytes moved by `decode`: codes and scales of the experts that have rows are
read once, and their values are written once.
"""

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.quantized import FORMATS, HALF_OF_E2M1, NESTED_BLOCK, PER_127, Encoded, WeightFormat
from onepass.kernels import layout
from onepass.kernels.launch import Flat, Out, Plan, launch

E2M1 = HALF_OF_E2M1 + tuple(-c for c in HALF_OF_E2M1)
NESTED = tl.constexpr(NESTED_BLOCK)
FACTOR = tl.constexpr(PER_127)
SEGMENT = 8  # values that a thread of `decode_kernel` writes at once
TILE = 4096  # values of its programs


class Code(NamedTuple):
    """How a weight is encoded, known when a kernel is compiled; see `WeightFormat`."""

    ROWS: int
    COLUMNS: int
    PITCH: int
    FORMAT: str
    SCALES: str
    FLAT: bool
    BLOCK_ROWS: int
    BLOCK_COLUMNS: int
    LENGTH: int  # of a segment: values of one row and one block that are read at once
    FLIPPED: bool = False  # of a grouped GEMM: whether the columns of its result are those of the weight


class Encoding(NamedTuple):
    """What a weight is decoded from: pointers to its codes, ``data``, and to `WeightParts`."""

    data: Any
    scales: Any
    outer_scales: Any
    table: Any
    offset: Any
    codes: Any  # a pointer to the values of 4-bit codes, or None
    in_registers: Any = None  # these values themselves, or None


@triton.jit
def e4m3(code):
    """The float32 values of e4m3 codes in uint8, also on cards that do not have the type."""
    magnitude = (code & 0x7F).to(tl.int32)
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120; exact for subnormals
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code > 0x7F, -value, value)


@triton.jit
def scale_of(encoding, block, expert, there, CODE: tl.constexpr):
    """The float32 scales of blocks."""
    scale = tl.load(encoding.scales + block, mask=there, other=0)
    if encoding.table is not None:
        # The sum with zero rounds the product, which a compiler would otherwise fuse with the sum that follows.
        outer = tl.load(encoding.outer_scales + block // NESTED, mask=there, other=0.0)
        return tl.fma(tl.load(encoding.table + scale.to(tl.int32)), outer, 0.0) + tl.load(encoding.offset)
    elif CODE.SCALES == "e8m0":
        bits = scale.to(tl.int32)
        return tl.where(bits > 0, bits << 23, 0x400000).to(tl.float32, bitcast=True)
    elif CODE.SCALES == "e4m3":
        return e4m3(scale) * tl.load(encoding.outer_scales + expert)
    else:
        return scale.to(tl.float32)


@triton.jit
def value_of(code, encoding, FORMAT: tl.constexpr):
    """The float32 values of 4-bit codes, which ``encoding`` has in registers or in memory."""
    if FORMAT == "e2m1":
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126; exact for subnormals
    elif encoding.in_registers is not None:
        return tl.reshape(tl.gather(encoding.in_registers, tl.reshape(code, (code.numel,)), 0), code.shape)
    else:
        return tl.load(encoding.codes + code)


@triton.jit
def decode_segments(encoding, expert, row, column, there, CODE: tl.constexpr):
    """The float32 values ``[segments, LENGTH]`` of an expert, from ``column`` of ``row`` on.

    A segment lies in one row and one block. With a LENGTH of 1, bytes of two codes are read twice.
    """
    FORMAT: tl.constexpr = CODE.FORMAT
    LENGTH: tl.constexpr = CODE.LENGTH
    GRID_COLUMNS: tl.constexpr = (CODE.COLUMNS + CODE.BLOCK_COLUMNS - 1) // CODE.BLOCK_COLUMNS
    GRID: tl.constexpr = (CODE.ROWS + CODE.BLOCK_ROWS - 1) // CODE.BLOCK_ROWS * GRID_COLUMNS
    source = expert * (CODE.ROWS * CODE.PITCH) + row * CODE.PITCH + column
    if CODE.FLAT:
        block = source // CODE.BLOCK_COLUMNS
    else:
        block = expert * GRID + row // CODE.BLOCK_ROWS * GRID_COLUMNS + column // CODE.BLOCK_COLUMNS
    scale = scale_of(encoding, block, expert, there, CODE)[:, None]
    mask = there[:, None]
    if FORMAT == "int8" or FORMAT == "e4m3" or FORMAT == "native e4m3":
        code = tl.load(encoding.data + source[:, None] + tl.arange(0, LENGTH)[None, :], mask=mask, other=0)
        if FORMAT == "int8":
            return code.to(tl.float32) * scale * FACTOR
        elif FORMAT == "e4m3":
            return e4m3(code) * scale
        else:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    elif LENGTH == 1:
        pair = tl.load(encoding.data + source[:, None] // 2, mask=mask, other=0).to(tl.int32)
        first_of_pair = source[:, None] % 2 == 0
        code = tl.where(first_of_pair == CODE.FLAT, pair >> 4, pair & 15)
        return value_of(code, encoding, FORMAT) * scale
    else:
        within = tl.arange(0, LENGTH // 2)[None, :]
        pair = tl.load(encoding.data + source[:, None] // 2 + within, mask=mask, other=0).to(tl.int32)
        high = value_of(pair >> 4, encoding, FORMAT)
        low = value_of(pair & 15, encoding, FORMAT)
        both = tl.join(high, low) if CODE.FLAT else tl.join(low, high)
        return tl.reshape(both, (both.shape[0], LENGTH)) * scale


@triton.jit
def decode_tile(encoding, expert, k0, n0, CODE: tl.constexpr, HALVES: tl.constexpr, BLOCK_K: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """The float32 values ``[BLOCK_K, WIDTH]`` of a tile of a grouped GEMM, from k0 and n0 on; finite beyond the weight.

    The rows of the weight are the columns of the GEMM's result, in as many ranges as there are HALVES; if FLIPPED, its
    columns are.
    """
    FLIPPED: tl.constexpr = CODE.FLIPPED
    LENGTH: tl.constexpr = CODE.LENGTH
    OF_ROW: tl.constexpr = (WIDTH if FLIPPED else BLOCK_K) // LENGTH
    PART: tl.constexpr = WIDTH // HALVES
    HALF: tl.constexpr = (CODE.COLUMNS if FLIPPED else CODE.ROWS) // HALVES
    segment = tl.arange(0, BLOCK_K * WIDTH // LENGTH)
    if FLIPPED:
        k = segment // OF_ROW
        n = segment % OF_ROW * LENGTH
    else:
        n = segment // OF_ROW
        k = segment % OF_ROW * LENGTH
    there = (n0 + n % PART < HALF) & (k0 + k < (CODE.ROWS if FLIPPED else CODE.COLUMNS))
    n = n0 + n % PART + n // PART * HALF
    k += k0
    value = decode_segments(encoding, expert, k if FLIPPED else n, n if FLIPPED else k, there, CODE)
    return tl.reshape(value, (BLOCK_K, WIDTH)) if FLIPPED else tl.reshape(value, (WIDTH, BLOCK_K)).T


@triton.jit(do_not_specialize=["first"])
def decode_kernel(
    data: "Flat", scales: "Flat", outer_scales: "Flat", table: "Flat", offset: "Flat", codes: "Flat", offsets: "Flat",
    out: "Out",
    first: tl.int32,
    CODE: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """``out[e - first]`` are the values of expert e, from ``first`` on. Experts without rows are left out.

    Inputs: ``data``, the codes, ROWS × PITCH of every expert, two in a byte unless FORMAT is "int8" or e4m3;
    ``scales``, ``outer_scales``, ``table`` and ``offset`` of `WeightParts`; ``codes``, the values of 4-bit codes, or
    None; ``offsets`` of `Groups`, or None.
    Output: ``out`` ``(experts, ROWS, COLUMNS)``.
    Bytes moved: see the module docstring.

    A program has SEGMENTS segments of LENGTH values.
    """
    LENGTH: tl.constexpr = CODE.LENGTH
    SIZE: tl.constexpr = CODE.ROWS * CODE.COLUMNS
    TILES: tl.constexpr = (SIZE + SEGMENTS * LENGTH - 1) // (SEGMENTS * LENGTH)
    local = (tl.program_id(0) // TILES).to(tl.int64)
    expert = first + local
    if offsets is not None:  # noqa: SIM102  (the first is known when the kernel is compiled)
        if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
            return
    at = (tl.program_id(0) % TILES * SEGMENTS + tl.arange(0, SEGMENTS)) * LENGTH
    there = at < SIZE
    encoding = Encoding(data, scales, outer_scales, table, offset, codes)
    value = decode_segments(encoding, expert, at // CODE.COLUMNS, at % CODE.COLUMNS, there, CODE)
    place = local * SIZE + at[:, None] + tl.arange(0, LENGTH)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there[:, None])


def decode(weight: Encoded, out: Tensor, first: int = 0, offsets: Tensor | None = None) -> Tensor:
    """Launch `decode_kernel` for the experts of ``out``, and return it."""
    if out.numel():
        codes = codes_of(weight.format.name, weight.device)
        tensors = weight.data, *weight.parts, codes, offsets, out
        launch(decode_plan, (weight.format._replace(max_memory=0, flipped=False), len(out), first), tensors)
    return out


def codes_of(name: str, device: torch.device) -> Tensor | None:
    """The values of a format's 4-bit codes, on the device, unless they are computed."""
    if kind_of(name) != "table":
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # a graph copies nothing from the host
        return torch.cat([torch.full((1,), code, device=device) for code in FORMATS[name].codes])
    return table_of(name, device)


@lru_cache
def table_of(name: str, device: torch.device) -> Tensor:
    """The values of a format's codes."""
    return torch.tensor(FORMATS[name].codes, device=device)


def kind_of(name: str) -> str:
    """How the kernels find the value of a code of this format."""
    codes = FORMATS[name].codes
    if codes:
        return "e2m1" if codes == E2M1 else "table"
    return "int8" if name == "int8" else "native e4m3" if layout.compute_capability() >= 89 else "e4m3"


def code_of(f: WeightFormat, most: int, flipped: bool = False) -> Code:
    """What the kernels are told of a format. Segments have ``most`` values, a power of two, if a row allows it."""
    format, width = FORMATS[f.name], max(f.block_columns, 1)
    one = width >= f.columns and not format.flat  # block in a row, which need not be complete
    return Code(
        ROWS=f.rows, COLUMNS=f.columns, PITCH=f.pitch, FORMAT=kind_of(f.name), SCALES=format.scales, FLAT=format.flat,
        BLOCK_ROWS=f.block_rows, BLOCK_COLUMNS=width, LENGTH=gcd(f.columns, most if one else gcd(width, most)),
        FLIPPED=flipped,
    )  # fmt: skip


def decode_plan(f: WeightFormat, count: int, first: int) -> Plan:
    """The launch of `decode_kernel`."""
    code = code_of(f, SEGMENT)
    constexprs = dict(CODE=code, SEGMENTS=TILE // code.LENGTH)
    return Plan(decode_kernel, count * -(-f.rows * f.columns // TILE), (first,), constexprs, 4)
