"""Sorting the choices of experts: a stable counting sort, and the tiles of rows that the products work through.

A slot is one of the T * TOPK choices of an expert by a token. `order` has the slots sorted by expert, so that expert e
has the sorted rows ``offsets[e]`` to ``offsets[e + 1]``; slots of no expert lie behind all. No row is padded: every
expert's rows are cut into tiles of BLOCK_M, and a tile that is not full masks the rest.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.kernels.launch import Flat, Out, Plan, launch
from onepass.kernels.layout import power_of_two
from onepass.options import Groups

MOST_ROWS = 128  # of a tile
COMPARED = 8192  # a slot with an expert, by a program


@triton.jit
def chosen(experts, slots, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """This block's slots, a 1 where a slot chose an expert, and a 1 where it chose none."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + slot, mask=slot < slots, other=0)
    here = (expert[:, None] == tl.arange(0, BLOCK_E)[None, :]) & (slot < slots)[:, None]
    none = (expert < 0) | (expert >= E)
    return slot, here.to(tl.int32), none.to(tl.int32)


@triton.jit(do_not_specialize=["slots", "blocks"])
def count_kernel(
    experts: "Flat", counts: "Out",
    slots: tl.int32, blocks: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many slots of each block of BLOCK chose each expert, and none: ``counts`` ``(E + 1, blocks)``."""
    _, here, none = chosen(experts, slots, E, BLOCK_E, BLOCK)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts + e * blocks + tl.program_id(0), tl.sum(here, 0), mask=e < E)
    tl.store(counts + E * blocks + tl.program_id(0), tl.sum(none, 0))


@triton.jit(do_not_specialize=["slots", "blocks"])
def place_kernel(
    experts: "Flat", ends: "Flat", order: "Out",
    slots: tl.int32, blocks: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put slots where they belong; ``ends`` are the sums of all counts up to and with each."""
    slot, here, none = chosen(experts, slots, E, BLOCK_E, BLOCK)
    e = tl.arange(0, BLOCK_E)
    before = e * blocks + tl.program_id(0) - 1
    begin = tl.load(ends + before, mask=(before >= 0) & (e < E), other=0)
    place = tl.sum(here * (begin[None, :] + tl.cumsum(here, 0) - 1), 1)
    of_none = tl.load(ends + E * blocks + tl.program_id(0) - 1) + tl.cumsum(none, 0) - 1
    tl.store(order + tl.where(none > 0, of_none, place), slot, mask=slot < slots)


@triton.jit(do_not_specialize=["blocks", "tiles"])
def tile_kernel(
    ends: "Flat", offsets: "Out", tile_expert: "Out", tile_row: "Out",
    blocks: tl.int32, tiles: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Where each expert's rows begin; which expert a tile belongs to (E for none), and its first sorted row."""
    e = tl.arange(0, BLOCK_E)
    begin = tl.load(ends + e * blocks - 1, mask=(e > 0) & (e < E), other=0)
    end = tl.load(ends + (e + 1) * blocks - 1, mask=e < E, other=0)
    if tl.program_id(0) == 0:
        tl.store(offsets + e, begin, mask=e < E)
        tl.store(offsets + e + 1, end, mask=e == E - 1)
    of_expert = tl.cdiv(end - begin, BLOCK_M)
    last = tl.cumsum(of_expert, 0)  # of the tiles of expert e, plus 1
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - of_expert)[None, :])
    expert = tl.sum(tl.where(mine, e[None, :], 0), 1) + tl.where(tl.sum(mine.to(tl.int32), 1) == 0, E, 0)
    row = tl.sum(tl.where(mine, (begin - (last - of_expert) * BLOCK_M)[None, :], 0), 1) + tile * BLOCK_M
    tl.store(tile_expert + tile, expert, mask=tile < tiles)
    tl.store(tile_row + tile, row, mask=tile < tiles)


def rows_of_tile(slots: int, E: int) -> int:
    return min(MOST_ROWS, max(16, power_of_two(slots // max(E, 1))))


def tiles_for(slots: int, E: int) -> int:
    """As many as there could be."""
    return slots // rows_of_tile(slots, E) + min(E, slots)


def group(experts: Tensor, E: int) -> Groups:
    """Without waiting for the device."""
    slots, tiles = experts.numel(), tiles_for(experts.numel(), E)
    block = block_for(E)
    new = partial(experts.new_empty, dtype=torch.int32)
    order, offsets, tile_expert, tile_row = new(slots), new(E + 1), new(tiles), new(tiles)
    if not slots:
        return Groups(order, offsets.zero_(), tile_expert, tile_row)
    counts = new((E + 1) * -(-slots // block))
    launch(sort_plan, (count_kernel, slots, E), (experts, counts))
    ends = counts.cumsum(0, dtype=torch.int32)
    launch(sort_plan, (place_kernel, slots, E), (experts, ends, order))
    launch(tile_plan, (slots, E), (ends, offsets, tile_expert, tile_row))
    return Groups(order, offsets, tile_expert, tile_row)


def block_for(E: int) -> int:
    return max(16, min(1024, COMPARED // power_of_two(E)))


def sort_plan(kernel: object, slots: int, E: int) -> Plan:
    block = block_for(E)
    blocks = -(-slots // block)
    return Plan(kernel, blocks, (slots, blocks), dict(E=E, BLOCK_E=power_of_two(E), BLOCK=block), 8)


def tile_plan(slots: int, E: int) -> Plan:
    tiles, blocks = tiles_for(slots, E), -(-slots // block_for(E))
    constexprs = dict(E=E, BLOCK_E=power_of_two(E), BLOCK=16, BLOCK_M=rows_of_tile(slots, E))
    return Plan(tile_kernel, -(-tiles // 16), (blocks, tiles), constexprs, 4)
