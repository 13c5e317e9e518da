"""Assignments (pairs of a token and an expert) sorted by expert, and the tiles of rows of the grouped GEMMs.

`moe.token_sort` calls `sort_by_expert`, a stable counting sort. `order` has the assignments sorted by expert: expert e
has the sorted rows ``offsets[e]`` to ``offsets[e + 1]``, and assignments to out-of-range ids come last. No row is
padded. Every expert's rows are divided into tiles of BLOCK_M rows, and a tile with fewer rows masks the rest. If these
are the largest, there is a second list, of as few tiles as possible of BLOCK_M rows or half as many more (`tiles_of`).

Bytes moved: the ids are read three times and the order is written once, plus one count per block and expert. Few
assignments are sorted by one launch, whose programs each read all ids.
"""

from functools import partial
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from onepass.core.moe_options import Groups
from onepass.kernels.launch import Flat, Out, Plan, launch
from onepass.kernels.layout import power_of_two

MOST_ROWS = 128  # per tile of the first list
BLOCK = 128  # assignments of a program of the sort; twice as many take 1.3 to 1.9 times as long on an H200
OTHERS = tl.constexpr(32)  # assignments with which a program that places compares its own at once
FEW = 2048  # assignments that one launch sorts, in about the time of several on an H200, and a third of their host time
ROWS, PART = 16, 256  # assignments of a program of that launch, and those that it compares them with at once
SORTED_ROWS = 1024  # assignments of a program of that launch if they are sorted already
TILES = tl.constexpr(16)  # tiles that a program finds at once
FIELDS = tl.constexpr(5)  # numbers of a tile: expert, first row and end; first tile and size of its group
GROUP = tl.constexpr(16)  # tiles of a group, at most


@triton.jit
def bucket(expert, E: tl.constexpr):
    """The expert, or E for an out-of-range id."""
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["assignments", "blocks"])
def count_kernel(
    experts: "Flat", counts: "Out",
    assignments: tl.int32, blocks: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the assignments of each block to each expert, and to out-of-range ids.

    Input: ``experts`` ``(T, K)``.
    Output: ``counts`` ``(E + 1, blocks)``.
    Bytes moved: see the module docstring.
    """
    assignment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.histogram(bucket(tl.load(experts + assignment, mask=assignment < assignments, other=E), E), BLOCK_E)
    e = tl.arange(0, BLOCK_E)
    beyond = tl.maximum((tl.program_id(0) + 1) * BLOCK - assignments, 0)  # counted as out-of-range ids
    tl.store(counts + e * blocks + tl.program_id(0), found - tl.where(e == E, beyond, 0), mask=e <= E)


@triton.jit
def write_tiles(
    begin, end, of_expert, last, first, tile_list, tiles, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Write the FIELDS of TILES tiles from ``first`` on. The rows of expert e, from ``begin`` to ``end``, have
    ``of_expert`` tiles, the ones before ``last``, in groups of up to GROUP. Where so many tiles of BLOCK_M rows do not
    hold all rows, as many of the first as needed are longer by half."""
    tile = first + tl.arange(0, TILES)
    mine = (tile[:, None] < last[None, :]) & (tile[:, None] >= (last - of_expert)[None, :])
    e = tl.arange(0, BLOCK_E)
    expert = tl.sum(tl.where(mine, e[None, :], 0), 1) + tl.where(tl.sum(mine.to(tl.int32), 1) == 0, E, 0)
    last_of_expert = tl.sum(tl.where(mine, last[None, :], 0), 1)
    begin_of_expert = tl.sum(tl.where(mine, begin[None, :], 0), 1)
    end_of_expert = tl.sum(tl.where(mine, end[None, :], 0), 1)
    count = tl.sum(tl.where(mine, of_expert[None, :], 0), 1)
    most = tl.cdiv(count, tl.maximum(tl.cdiv(count, GROUP), 1))
    within = tile - (last_of_expert - count)
    group = tile - within % tl.maximum(most, 1)
    HALF: tl.constexpr = BLOCK_M // 2
    longer = tl.maximum(tl.cdiv(end_of_expert - begin_of_expert, HALF) - 2 * count, 0)
    row = begin_of_expert + within * BLOCK_M + tl.minimum(within, longer) * HALF
    rows = tl.where(within < longer, BLOCK_M + HALF, BLOCK_M)
    to = tile_list + FIELDS * tile
    there = tile < tiles
    tl.store(to, expert, mask=there)
    tl.store(to + 1, row, mask=there)
    tl.store(to + 2, tl.minimum(row + rows, end_of_expert), mask=there)
    tl.store(to + 3, group, mask=there)
    tl.store(to + 4, tl.minimum(most, last_of_expert - group), mask=there)


@triton.jit
def tiles_of(rows, BLOCK_M: tl.constexpr, LONGER: tl.constexpr):
    """How many tiles the rows of an expert have: as few as possible, of BLOCK_M rows, or with LONGER tiles, as in the
    second list, also of half as many more."""
    return tl.cdiv(rows, BLOCK_M + BLOCK_M // 2 if LONGER else BLOCK_M)


@triton.jit
def write_lists(begin, end, n, tile_list, tiles, longer, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write the n-th TILES tiles of both lists, and behind them how many each has. In the second, which follows the
    first, experts with an odd number of halves of tiles come first. Experts with as many longer tiles are then next to
    each other in most cases, and `tile_of_turn` gives each program about as many of them."""
    of_first = tl.cdiv(tiles, TILES)
    used = tile_list + FIELDS * (tiles + longer)
    if n < of_first:
        of_expert = tiles_of(end - begin, BLOCK_M, False)
        last = tl.cumsum(of_expert, 0)
        tl.store(used, tl.sum(of_expert), mask=n == 0)
        tl.store(used + 1, 0, mask=(n == 0) & (longer == 0))
        write_tiles(begin, end, of_expert, last, n * TILES, tile_list, tiles, E, BLOCK_E, BLOCK_M)
    else:
        first = (n - of_first) * TILES
        of_expert = tiles_of(end - begin, BLOCK_M, True)
        odd = tl.cdiv(end - begin, BLOCK_M // 2) % 2 != 0
        of_odd = tl.where(odd, of_expert, 0)
        last = tl.where(odd, tl.cumsum(of_odd, 0), tl.sum(of_odd) + tl.cumsum(of_expert - of_odd, 0))
        tl.store(used + 1, tl.sum(of_expert), mask=n == of_first)
        write_tiles(begin, end, of_expert, last, first, tile_list + FIELDS * tiles, longer, E, BLOCK_E, BLOCK_M)


@triton.jit(do_not_specialize=["assignments", "blocks", "tiles", "longer"])
def place_kernel(
    experts: "Flat", ends: "Flat", order: "Out", offsets: "Out", tile_list: "Out", places: "Out",
    assignments: tl.int32, blocks: tl.int32, tiles: tl.int32, longer: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the assignments in sorted order and the place of each in it; other programs find the tiles of both lists.

    Inputs: ``experts`` ``(T, K)``; ``ends`` ``(E + 1, blocks)``, the inclusive cumulative sums of `count_kernel`.
    Outputs: ``order`` and ``places`` ``(T·K,)``; ``offsets`` ``(E + 1,)``; ``tile_list``
    ``(FIELDS·(tiles + longer) + 2,)``, where E is the expert of a tile that is not used.
    Bytes moved: see the module docstring; 2 E elements of ``ends`` for each TILES tiles.
    """
    n = tl.program_id(0) - blocks
    if n < 0:
        begin = tl.program_id(0) * BLOCK
        assignment = begin + tl.arange(0, BLOCK)
        there = assignment < assignments
        expert = bucket(tl.load(experts + assignment, mask=there, other=0), E)
        before = expert * blocks + tl.program_id(0) - 1
        place = tl.load(ends + before, mask=there & (before >= 0), other=0)
        for part in range(0, BLOCK, OTHERS):  # the earlier assignments of the block to the same expert
            other = begin + part + tl.arange(0, OTHERS)
            of_other = bucket(tl.load(experts + other, mask=other < assignments, other=0), E)
            same = (of_other[None, :] == expert[:, None]) & (other[None, :] < assignment[:, None])
            place += tl.sum(same.to(tl.int32), 1)
        tl.store(order + place, assignment, mask=there)
        tl.store(places + assignment, tl.where(expert < E, place, assignments), mask=there)
    else:
        e = tl.arange(0, BLOCK_E)
        first = tl.load(ends + e * blocks - 1, mask=(e > 0) & (e < E), other=0)
        end = tl.load(ends + (e + 1) * blocks - 1, mask=e < E, other=0)
        if n == 0:
            tl.store(offsets + e, first, mask=e < E)
            tl.store(offsets + e + 1, end, mask=e == E - 1)
        write_lists(first, end, n, tile_list, tiles, longer, E, BLOCK_E, BLOCK_M)


@triton.jit
def tile_of_turn(turn, tile_list, tiles, shift, N_TILES: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    """What a program of a grouped GEMM computes in this turn: a tile of columns, of N_TILES, and the expert, the first
    row and the end of a tile of rows of this list, of which ``tiles`` are used. There may be no rows in the last turn.

    The tiles of a group of rows come before the next columns. They read the same columns of a weight at about the same
    time, so that these stay in the cache. A group has tiles of one expert.

    Programs change places by a ``shift`` from turn to turn: otherwise, longer tiles, which recur at equal distances,
    might all be those of a few programs. In the last turn, if there are fewer tiles than programs, up to MOST of these
    share a tile, PART of its rows each.
    """
    programs = tl.num_programs(0)
    left = tiles * N_TILES - turn * programs
    place = tl.program_id(0) + turn * shift % programs
    place = tl.where(place < programs, place, place - programs)
    sharing, part = 1, 0
    if left < programs:
        sharing = tl.minimum(programs // left, MOST)
        part = place % sharing
        place //= sharing
    work = turn * programs + tl.minimum(place, left - 1)
    of_group = tile_list + FIELDS * (work // N_TILES)  # a tile of this group
    group, size = tl.load(of_group + 3), tl.load(of_group + 4)
    within = work - group * N_TILES
    tile = tile_list + FIELDS * (group + within % size)
    begin, end = tl.load(tile + 1) + part * PART, tl.load(tile + 2)
    end = tl.where(part + 1 < sharing, tl.minimum(begin + PART, end), end)
    return within // size, tl.load(tile), begin, tl.where(place < left, end, begin)


@triton.jit
def count_of(counts, assignments, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The given counts of all experts, each from 0 to the number of assignments."""
    e = tl.arange(0, BLOCK_E)
    return tl.minimum(tl.maximum(tl.load(counts + e, mask=e < E, other=0).to(tl.int64), 0), assignments)


@triton.jit(do_not_specialize=["assignments", "tiles", "longer"])
def sort_kernel(
    experts: "Flat", counts: "Flat", order: "Out", offsets: "Out", tile_list: "Out",
    places: "Out",
    assignments: tl.int32, tiles: tl.int32, longer: tl.int32,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The results of the other kernels in one launch: a program places ROWS assignments, and finds some of the tiles.

    Inputs: ``experts`` ``(T, K)``; None, or ``counts`` ``(E,)``, the assignments to each expert, if they are sorted
    already. Wrong counts do not lead beyond the assignments.
    Outputs: those of `place_kernel`.
    Bytes moved: the ids twice or the counts once per program in, the outputs out.
    """
    first = tl.program_id(0) * ROWS
    if first < assignments:
        assignment = first + tl.arange(0, ROWS)
        there = assignment < assignments
        place = assignment
        if counts is None:
            expert = bucket(tl.load(experts + assignment, mask=there, other=0), E)
            key = expert * assignments + assignment
            place = tl.zeros([ROWS], tl.int32)
            for part in range(0, assignments, PART):
                other = part + tl.arange(0, PART)
                of_other = bucket(tl.load(experts + other, mask=other < assignments, other=E), E) * assignments + other
                place += tl.sum((of_other[None, :] < key[:, None]).to(tl.int32), 1)
            inside = expert < E
        else:
            inside = place < tl.sum(count_of(counts, assignments, E, BLOCK_E))
        tl.store(order + place, assignment, mask=there)
        tl.store(places + assignment, tl.where(inside, place, assignments), mask=there)
    if tl.program_id(0) < tl.cdiv(tiles, TILES) + tl.cdiv(longer, TILES):
        e = tl.arange(0, BLOCK_E)
        if counts is None:
            count = tl.zeros([BLOCK_E], tl.int32)
            for part in range(0, assignments, PART):
                other = part + tl.arange(0, PART)
                count += tl.histogram(bucket(tl.load(experts + other, mask=other < assignments, other=E), E), BLOCK_E)
            count = tl.where(e < E, count, 0)
        else:
            count = count_of(counts, assignments, E, BLOCK_E)
        end = tl.cumsum(count, 0)
        begin = tl.minimum(end - count, assignments).to(tl.int32)
        end = tl.minimum(end, assignments).to(tl.int32)
        if tl.program_id(0) == 0:
            tl.store(offsets + e, begin, mask=e <= E)
        for n in range(tl.program_id(0), tl.cdiv(tiles, TILES) + tl.cdiv(longer, TILES), tl.num_programs(0)):
            write_lists(begin, end, n, tile_list, tiles, longer, E, BLOCK_E, BLOCK_M)


def rows_of_tile(assignments: int, E: int) -> int:
    """Rows per tile: about as many as an expert has on average, but not fewer than 16 nor more than `MOST_ROWS`."""
    rows = 16
    while rows < MOST_ROWS and rows < assignments // max(E, 1):  # comparisons, of which a trace of any size has few
        rows *= 2
    return rows


def lengths_of_lists(assignments: int, num_experts: int) -> tuple[int, int]:
    """The number of tiles that each list has room for: as many as there can be."""
    rows = rows_of_tile(assignments, num_experts)
    tiles = assignments // rows + min(num_experts, assignments)
    return tiles, tiles if rows == MOST_ROWS else 0


def programs_of(tiles: int) -> int:
    """The number of programs that find so many tiles, TILES each."""
    return -(-tiles // TILES.value)


def shift_of(programs: int) -> int:
    """The ``shift`` of `tile_of_turn`. Except where its place wraps, a program moves on by a number of tiles that has
    no divisor in common with the size of any group, so that it has every tile of a group about as often as the others.
    """
    shift = 1
    while any(gcd(programs + shift, size) > 1 for size in range(2, GROUP.value + 1)):
        shift += 1
    return shift


def size_of_tile_list(assignments: int, num_experts: int) -> int:
    """The size of the `tile_list` of `Groups`."""
    return FIELDS.value * sum(lengths_of_lists(assignments, num_experts)) + 2


def sort_by_expert(experts: Tensor, num_experts: int, counts: Tensor | None = None) -> Groups:
    """Sort the assignments ``(T, K)`` by expert, without making the CPU wait.

    With ``counts`` ``(E,)`` they are sorted already, and only the offsets and tiles are computed.
    """
    E = num_experts
    assignments = experts.numel()
    new = partial(experts.new_empty, dtype=torch.int32)
    results = Groups(new(assignments), new(E + 1), new(size_of_tile_list(assignments, E)), new(assignments))
    if not assignments:
        results.offsets.zero_()
        results.tile_list.zero_()
        return results
    if counts is not None or assignments <= FEW:
        launch(sort_plan, (assignments, E, counts is not None), (experts, counts, *results))
    else:
        counts = new((E + 1) * -(-assignments // BLOCK))
        launch(count_plan, (assignments, E), (experts, counts))
        ends = counts.cumsum(0, dtype=torch.int32)
        launch(place_plan, (assignments, E), (experts, ends, *results))
    return results


def count_plan(assignments: int, E: int) -> Plan:
    """The launch of `count_kernel`."""
    blocks = -(-assignments // BLOCK)
    constexprs = dict(E=E, BLOCK_E=power_of_two(E + 1), BLOCK=BLOCK)
    return Plan(count_kernel, blocks, (assignments, blocks), constexprs, 4)


def place_plan(assignments: int, E: int) -> Plan:
    """The launch of `place_kernel`."""
    blocks, (tiles, longer) = -(-assignments // BLOCK), lengths_of_lists(assignments, E)
    constexprs = dict(E=E, BLOCK_E=power_of_two(E), BLOCK=BLOCK, BLOCK_M=rows_of_tile(assignments, E))
    programs = blocks + programs_of(tiles) + programs_of(longer)
    return Plan(place_kernel, programs, (assignments, blocks, tiles, longer), constexprs, 8)


def sort_plan(assignments: int, E: int, is_sorted: bool) -> Plan:
    """The launch of `sort_kernel`."""
    (tiles, longer), rows = lengths_of_lists(assignments, E), SORTED_ROWS if is_sorted else ROWS
    constexprs = dict(
        E=E, BLOCK_E=power_of_two(E + 1), ROWS=rows, PART=PART, BLOCK_M=rows_of_tile(assignments, E)
    )  # fmt: skip
    programs = max(-(-assignments // rows), programs_of(tiles) + programs_of(longer))
    return Plan(sort_kernel, programs, (assignments, tiles, longer), constexprs, 4)
