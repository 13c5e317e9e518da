"""Decode the experts of a quantized weight into a scratch, which a grouped GEMM then reads.

`grouped_gemm` calls it, a chunk of experts at a time. Bytes moved: codes and scales of the experts that have rows once,
their decoded values once.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.moe_options import Groups
from onepass.core.quantized import FORMATS, NESTED_BLOCK, PER_127, Encoded, WeightFormat
from onepass.kernels.launch import Flat, Out, Plan, launch

SEGMENT = 64  # most values that a program multiplies by one scale
TILE = 4096  # values of a program


@triton.jit
def e4m3(code):
    """The float32 values of e4m3 codes in uint8, also on cards that do not have the type."""
    magnitude = (code & 0x7F).to(tl.int32)
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120; exact for subnormals
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code > 0x7F, -value, value)


@triton.jit
def scale_of(
    scales, outer_scales, table, offset, block, expert, there, SCALES: tl.constexpr, NESTED: tl.constexpr
):  # fmt: skip
    """The float32 scales of blocks."""
    scale = tl.load(scales + block, mask=there, other=0)
    if table is not None:
        # The sum with zero rounds the product, which a compiler would otherwise fuse with the sum that follows.
        outer = tl.load(outer_scales + block // NESTED, mask=there, other=0.0)
        return tl.fma(tl.load(table + scale.to(tl.int32)), outer, 0.0) + tl.load(offset)
    elif SCALES == "e8m0":
        bits = scale.to(tl.int32)
        return tl.where(bits > 0, bits << 23, 0x400000).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        return e4m3(scale) * tl.load(outer_scales + expert)
    else:
        return scale.to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def decode_kernel(
    data: "Flat", scales: "Flat", outer_scales: "Flat", table: "Flat", offset: "Flat", codes: "Flat", offsets: "Flat",
    out: "Out",
    first: tl.int32,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PITCH: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    FLAT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, NESTED: tl.constexpr,
    FACTOR: tl.constexpr, LENGTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """``out[e - first]`` are the values of expert e, from ``first`` on. Experts without rows are left out.

    Inputs: ``data``, the codes, ROWS × PITCH of every expert, two in a byte unless FORMAT is "int8" or "e4m3";
    ``scales``, ``outer_scales``, ``table`` and ``offset`` of `WeightParts`; ``codes``, the values of 4-bit codes, or
    None; ``offsets`` of `Groups`, or None.
    Output: ``out`` ``(experts, ROWS, COLUMNS)``.
    Bytes moved: see the module docstring.

    A program has SEGMENTS segments of LENGTH values, each in one block. With a LENGTH of 1, bytes are read twice.
    """
    SIZE: tl.constexpr = ROWS * COLUMNS
    TILES: tl.constexpr = (SIZE + SEGMENTS * LENGTH - 1) // (SEGMENTS * LENGTH)
    GRID_COLUMNS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    GRID: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS * GRID_COLUMNS
    local = (tl.program_id(0) // TILES).to(tl.int64)
    expert = first + local
    if offsets is not None:  # noqa: SIM102  (the first is known when the kernel is compiled)
        if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
            return
    segment = tl.program_id(0) % TILES * SEGMENTS + tl.arange(0, SEGMENTS)
    at = segment * LENGTH
    there = at < SIZE
    row = at // COLUMNS
    column = at % COLUMNS
    source = expert * (ROWS * PITCH) + row * PITCH + column
    if FLAT:
        block = source // BLOCK_COLUMNS
    else:
        block = expert * GRID + row // BLOCK_ROWS * GRID_COLUMNS + column // BLOCK_COLUMNS
    scale = scale_of(scales, outer_scales, table, offset, block, expert, there, SCALES, NESTED)[:, None]
    place = local * SIZE + at[:, None] + tl.arange(0, LENGTH)[None, :]
    if FORMAT == "int8":
        value = tl.load(data + source[:, None] + tl.arange(0, LENGTH)[None, :], mask=there[:, None], other=0)
        value = value.to(tl.float32)
    elif FORMAT == "e4m3":
        value = e4m3(tl.load(data + source[:, None] + tl.arange(0, LENGTH)[None, :], mask=there[:, None], other=0))
    elif LENGTH == 1:
        pair = tl.load(data + source[:, None] // 2, mask=there[:, None], other=0).to(tl.int32)
        first_of_pair = source[:, None] % 2 == 0
        value = tl.load(codes + tl.where(first_of_pair == FLAT, pair >> 4, pair & 15))
    else:
        within = tl.arange(0, LENGTH // 2)[None, :]
        pair = tl.load(data + source[:, None] // 2 + within, mask=there[:, None], other=0).to(tl.int32)
        high = tl.load(codes + (pair >> 4))
        low = tl.load(codes + (pair & 15))
        both = tl.join(high, low) if FLAT else tl.join(low, high)
        value = tl.reshape(both, (SEGMENTS, LENGTH))
    value = value * scale
    if FACTOR != 1.0:
        value = value * FACTOR
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there[:, None])


def decode(weight: Encoded, out: Tensor, first: int = 0, offsets: Tensor | None = None) -> Tensor:
    """Launch `decode_kernel` for the experts of ``out``, and return it."""
    if out.numel():
        codes = codes_of(weight.format.name, weight.device)
        tensors = weight.data, *weight.parts, codes, offsets, out
        launch(decode_plan, (weight.format._replace(max_memory=0, flipped=False), len(out), first), tensors)
    return out


@lru_cache
def codes_of(name: str, device: torch.device) -> Tensor | None:
    """The values of a format's 4-bit codes, on the device."""
    codes = FORMATS[name].codes
    return torch.tensor(codes, device=device) if codes else None


def decode_plan(f: WeightFormat, count: int, first: int) -> Plan:
    """The launch of `decode_kernel`."""
    format = FORMATS[f.name]
    size, width = f.rows * f.columns, max(f.block_columns, 1)
    if format.flat:
        length = gcd(size, width, SEGMENT)
    else:  # all columns are one block, or the last one is not complete
        length = gcd(f.columns, SEGMENT) if width >= f.columns else gcd(f.columns, width, SEGMENT)
    constexprs = dict(
        ROWS=f.rows, COLUMNS=f.columns, PITCH=f.pitch, FORMAT=f.name if f.name == "int8" else "" if format.codes else
        "e4m3",
        SCALES=format.scales, FLAT=format.flat, BLOCK_ROWS=f.block_rows, BLOCK_COLUMNS=width, NESTED=NESTED_BLOCK,
        FACTOR=PER_127 if f.name == "int8" else 1.0, LENGTH=length, SEGMENTS=TILE // length,
    )  # fmt: skip
    return Plan(decode_kernel, count * -(-size // TILE), (first,), constexprs, 4)


def decoded_chunks(weight: Encoded, groups: Groups) -> Iterator[tuple[int, Tensor]]:
    """Decode all experts that have rows, a chunk at a time: yield its first expert and its values.

    The values of the next chunk overwrite them.
    """
    f = weight.format
    most = max(1, f.max_memory // max(1, f.rows * f.columns * weight.dtype.itemsize))
    chunks = -(-f.experts // most)
    count = -(-f.experts // chunks)
    scratch = torch.empty((count, f.rows, f.columns), dtype=weight.dtype, device=weight.device)
    for first in range(0, f.experts, count):
        part = scratch[: min(count, f.experts - first)]
        decode(weight, part, first, groups.offsets)
        yield first, scratch.mT if f.flipped else scratch
