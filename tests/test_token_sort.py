"""The sort of assignments by expert, the tiles of rows, and which program of a grouped GEMM computes which tile."""

import os
from importlib import import_module
from itertools import pairwise

import pytest
import torch

triton = pytest.importorskip("triton")
tl = import_module("triton.language")
module = import_module("onepass.kernels.token_sort")
tile_of_turn, FIELDS = module.tile_of_turn, module.FIELDS.value
PART = module.MOST_ROWS // 2


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize(
    "assignments, experts", [(1, 1), (31, 5), (128, 3), (129, 40), (1500, 7), (4000, 9), (4096, 130)]
)
def test_assignments_are_sorted_by_one_launch_or_by_several(device, monkeypatch, few, assignments, experts):
    """The order is that of a stable sort, with out-of-range ids last, and each tile lies within one expert. In the
    second list, there are as few tiles as possible of up to half as many more rows, the longer ones of an expert first,
    and experts whose rows have an odd number of halves of tiles come first. An expert's tiles are in groups of up to
    16, of about as many each.
    """
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are called")
    monkeypatch.setattr(module, "FEW", few)
    generator = torch.Generator().manual_seed(assignments)
    ids = torch.randint(-1, experts + 1, (assignments, 1), generator=generator)
    if assignments == 1500:
        ids[:1000] = 2  # more than a tile, of an expert between others
    if assignments == 4000:
        ids[100:3600] = 4  # more than a group, in both lists
    groups = module.sort_by_expert(ids.to(device, torch.int32 if experts == 7 else torch.int64), experts)
    groups = groups._replace(**{name: t.cpu() for name, t in groups._asdict().items()})
    inside = torch.where((ids >= 0) & (ids < experts), ids, experts).flatten()
    assert torch.equal(groups.order.long(), inside.argsort(stable=True))
    places = groups.order.long().argsort()
    assert torch.equal(groups.places.long(), places.where(inside < experts, assignments))
    counts = inside.bincount(minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    assert torch.equal(groups.offsets.long(), offsets)
    lengths = module.lengths_of_lists(assignments, experts)
    assert (lengths[1] > 0) == (module.rows_of_tile(assignments, experts) == module.MOST_ROWS)
    rows, lists = module.rows_of_tile(assignments, experts), ([], [])
    for e, (begin, count) in enumerate(zip(offsets.tolist(), counts.tolist())):
        halves = -(-count // (rows // 2))
        few = -(-halves // 3)
        longer = max(halves - 2 * few, 0)
        for which, sizes in enumerate(([2] * -(-halves // 2), [3] * longer + [2] * (few - longer))):
            ends = torch.tensor([0, *sizes]).cumsum(0).mul(rows // 2).clamp(max=count).add(begin).tolist()
            lists[which].append((which and halves % 2 == 0, e, [*pairwise(ends)]))
    both, used = groups.tile_list.split([FIELDS * sum(lengths), 2])
    for of_experts, tile_list, count in zip(lists, both.view(-1, FIELDS).split(lengths), used.tolist()):
        tiles = []
        for _, e, of_expert in sorted(of_experts):
            most = -(-len(of_expert) // -(-len(of_expert) // 16)) if of_expert else 1
            for first in range(0, len(of_expert), most):
                group, before = of_expert[first : first + most], len(tiles)
                tiles += [(e, *rows, before, len(group)) for rows in group]
        if not len(tile_list):
            assert count == 0
            continue
        assert [tuple(tile) for tile in tile_list.tolist()][: len(tiles)] == tiles
        assert (tile_list[len(tiles) :, 0] == experts).all() and count == len(tiles)


@triton.jit
def tiles_kernel(found, tile_list, turns, tiles, shift, N_TILES: tl.constexpr, PART: tl.constexpr, MOST: tl.constexpr):
    for turn in range(turns):
        n_tile, expert, begin, end = tile_of_turn(turn, tile_list, tiles, shift, N_TILES, PART, MOST)
        to = found + (turn * tl.num_programs(0) + tl.program_id(0)) * 4
        tl.store(to, n_tile)
        tl.store(to + 1, expert)
        tl.store(to + 2, begin)
        tl.store(to + 3, end)


def tiles_of_programs(device, counts, which, n_tiles, programs):
    """The columns, expert, first row and end of what each program computes in each turn, of the list ``which``, and how
    many tiles are left for the last turn."""
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are called")
    experts = torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
    groups = module.sort_by_expert(experts.unsqueeze(1), len(counts))
    lengths = module.lengths_of_lists(len(experts), len(counts))
    assert lengths[1], "expected tiles of the most rows, of which there are two lists"
    tiles = groups.tile_list[-2:].tolist()[which]
    turns = -(-tiles * n_tiles // programs)
    found = torch.empty(turns, programs, 4, dtype=torch.int32, device=device)
    tile_list = groups.tile_list[which * FIELDS * lengths[0] :]
    tiles_kernel[(programs,)](found, tile_list, turns, tiles, module.shift_of(programs), n_tiles, PART, 2 + which)
    return found.cpu(), tiles * n_tiles - (turns - 1) * programs


@pytest.mark.parametrize("programs", [1, 3, 15, 40])
@pytest.mark.parametrize("n_tiles", [1, 3, 5])
@pytest.mark.parametrize("counts", [(200,), (130, 0, 700, 65, 1), (448, 448, 449, 0), (3500, 300)])
@pytest.mark.parametrize("which", [0, 1])
def test_every_row_is_computed_once(device, which, counts, n_tiles, programs):
    """With all columns, by one program, or by several in the last turn, each of which has another part of a tile."""
    tiles, left = tiles_of_programs(device, counts, which, n_tiles, programs)
    computed = torch.zeros(n_tiles, sum(counts), dtype=torch.int32)
    ends = torch.tensor(counts).cumsum(0)
    for n_tile, expert, begin, end in tiles.flatten(0, 1).tolist():
        computed[n_tile, begin:end] += 1
        assert begin >= end or ends[expert] - counts[expert] <= begin < end <= ends[expert]
    assert (computed == 1).all()
    sharing = min(programs // left, 2 + which)
    rows = (tiles[-1, :, 3] - tiles[-1, :, 2]).max()
    assert rows <= (2 + which - (sharing - 1)) * PART


@pytest.mark.parametrize("halves", [7, 10, 11, 16])
@pytest.mark.parametrize("programs", [24, 32])
def test_programs_have_about_as_many_longer_tiles(device, programs, halves):
    tiles, _ = tiles_of_programs(device, (halves * PART,) * 16, 1, 12, programs)
    longer = (tiles[:, :, 3] - tiles[:, :, 2] > 2 * PART).sum(0)
    expected = halves - 2 * -(-halves // 3)
    assert longer.sum() == 16 * 12 * expected and longer.max() <= longer.sum() / programs + 3
