"""The sort of assignments by expert, the tiles of rows, and which program of a grouped GEMM computes which tile."""

import os
from collections import defaultdict
from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
tl = import_module("triton.language")
module = import_module("onepass.kernels.token_sort")
place_of_turn = import_module("onepass.kernels.row_gemm").place_of_turn


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize(
    "assignments, experts", [(1, 1), (31, 5), (128, 3), (129, 40), (1500, 7), (3000, 9), (4096, 130)]
)
def test_assignments_are_sorted_by_one_launch_or_by_several(device, monkeypatch, few, assignments, experts):
    """The order is that of a stable sort, with out-of-range ids last, and each tile lies within one expert. In the
    second list, a last tile of half of the rows or less is a part of the one before, if there is one, and experts with
    such a tile come first.
    """
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are called")
    monkeypatch.setattr(module, "FEW", few)
    generator = torch.Generator().manual_seed(assignments)
    ids = torch.randint(-1, experts + 1, (assignments, 1), generator=generator)
    if assignments == 1500:
        ids[:1000] = 2  # more than a tile, of an expert between others
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
        end, is_longer = begin + count, count > rows and 0 < count % rows <= rows // 2
        for which, last in enumerate((count, count - rows if is_longer else count)):
            begins = [*range(begin, begin + last, rows)]
            lists[which].append((which and not 0 < count % rows <= rows // 2, e, [*zip(begins, [*begins[1:], end])]))
    both, used = groups.tile_list.split([3 * sum(lengths), 2])
    for tiles, tile_list, count in zip(lists, both.view(-1, 3).split(lengths), used.tolist()):
        tiles = [(e, *rows) for _, e, of_expert in sorted(tiles) for rows in of_expert]
        if not len(tile_list):
            assert count == 0
            continue
        assert [tuple(tile) for tile in tile_list.tolist()][: len(tiles)] == tiles
        assert (tile_list[len(tiles) :, 0] == experts).all() and count == len(tiles)


@triton.jit
def places_kernel(places, turns, tiles, group, N_TILES: tl.constexpr, MOST: tl.constexpr):
    for turn in range(turns):
        tile, n_tile, sharing, part, there = place_of_turn(turn, tiles, N_TILES, group, MOST)
        to = places + (turn * tl.num_programs(0) + tl.program_id(0)) * 5
        tl.store(to, tile)
        tl.store(to + 1, n_tile)
        tl.store(to + 2, sharing)
        tl.store(to + 3, part)
        tl.store(to + 4, there.to(tl.int32))


@pytest.mark.parametrize("programs", [1, 3, 15, 40])
@pytest.mark.parametrize("tiles, n_tiles, group", [(1, 1, 1), (1, 14, 4), (7, 5, 1), (13, 3, 4), (21, 4, 16)])
@pytest.mark.parametrize("parts", [2, 3])
def test_every_tile_is_computed_once(device, parts, tiles, n_tiles, group, programs):
    """By one program, or by several in the last turn, of which each has another part of its rows."""
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are called")
    turns = -(-tiles * n_tiles // programs)
    places = torch.empty(turns, programs, 5, dtype=torch.int32, device=device)
    places_kernel[(programs,)](places, turns, tiles, group, n_tiles, parts)
    found = defaultdict(list)
    for turn, of_turn in enumerate(places.tolist()):
        for tile, n_tile, sharing, part, there in of_turn:
            assert 0 <= tile < tiles and 0 <= n_tile < n_tiles and (sharing == 1 or turn == turns - 1)
            if there:
                found[tile, n_tile].append((part, sharing))
    left = tiles * n_tiles - (turns - 1) * programs
    most = min(parts, programs // left)
    assert len(found) == tiles * n_tiles
    assert all(sorted(of_tile) == [(n, len(of_tile)) for n in range(len(of_tile))] for of_tile in found.values())
    assert sum(len(of_tile) == most for of_tile in found.values()) >= left


def test_programs_have_about_as_many_longer_tiles(device):
    """Every fourth tile is longer, as where all experts have as many rows."""
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("kernels are called")
    places = torch.empty(16, 24, 5, dtype=torch.int32, device=device)
    places_kernel[(24,)](places, 16, 64, 4, 6, 3)
    assert (places[:, :, 0] % 4 == 3).sum(0).tolist() == [4] * 24
