from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from secondguess.engine.slots import SlotCache
from secondguess.types import Rows

SHAPES = ((2, 4), (1, 6))  # layers may differ
COLUMNS = 12


def rows_at(slots: list[int], columns: list[list[int]], width: int) -> Rows:
    columns_RN = torch.tensor(columns, dtype=torch.int64)
    r, n = columns_RN.shape
    visible_RNW = torch.ones(r, n, width, dtype=torch.bool)
    positions_RW = torch.arange(width).expand(r, width)
    return Rows(torch.tensor(slots), columns_RN, columns_RN, columns_RN, visible_RNW, positions_RW)


def numbered_cache() -> SlotCache:
    """Three slots; every element of K tells its slot and column, V is -K."""
    cache = SlotCache(3, COLUMNS, SHAPES, torch.float64)
    slots = list(range(3))
    rows = rows_at(slots, [list(range(COLUMNS))] * 3, COLUMNS)
    number_RN = 100.0 * torch.arange(3)[:, None] + torch.arange(COLUMNS)
    for layer, (g, d) in enumerate(SHAPES):
        k = number_RN[:, None, :, None].expand(3, g, COLUMNS, d).double()
        cache.write(layer, rows, k, -k)
    return cache


def contents(cache: SlotCache, slot: int, layer: int) -> list[int]:
    """The numbers in a slot's columns, checked to be the same in K, V, all heads and dimensions."""
    g, d = SHAPES[layer]
    nothing = torch.empty(1, g, 0, d, dtype=torch.float64)
    k, v = cache.write(layer, rows_at([slot], [[]], COLUMNS), nothing, nothing)
    assert torch.equal(k, -v)
    assert torch.equal(k, k[:, :1, :, :1].expand_as(k))
    return k[0, 0, :, 0].int().tolist()


def test_write_returns_what_the_rows_look_at() -> None:
    cache = SlotCache(4, COLUMNS, SHAPES, torch.float32)
    k_RGND, v_RGND = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    k_RGWD, v_RGWD = cache.write(0, rows_at([3, 1], [[0, 1, 2], [5, 3, 4]], 7), k_RGND, v_RGND)
    assert k_RGWD.shape == (2, 2, 7, 4)
    assert torch.equal(k_RGWD[0, :, :3], k_RGND[0])
    assert torch.equal(k_RGWD[1, :, [5, 3, 4]], k_RGND[1])
    assert torch.equal(v_RGWD[1, :, [5, 3, 4]], v_RGND[1])
    assert k_RGWD[0, :, 3:].abs().max() == 0
    assert k_RGWD[1, :, :3].abs().max() == 0


def test_consecutive_slots_are_not_copied() -> None:
    cache = SlotCache(4, COLUMNS, SHAPES, torch.float32)
    new = torch.ones(2, 2, 1, 4)
    k_RGWD, _ = cache.write(0, rows_at([1, 2], [[0], [0]], 3), new, new)
    cache.write(0, rows_at([1, 2], [[1], [1]], 3), new, new)
    assert k_RGWD[:, :, 1].min() == 1


def test_padding_rows_change_only_their_own_columns() -> None:
    cache = numbered_cache()
    rows = rows_at([0], [[4, 9, 10]], 5)  # one row at the committed length 4, two of padding past the tree
    for layer, (g, d) in enumerate(SHAPES):
        k = torch.full((1, g, 3, d), 77.0, dtype=torch.float64)
        cache.write(layer, rows, k, -k)
        assert contents(cache, 0, layer) == [0, 1, 2, 3, 77, 5, 6, 7, 8, 77, 77, 11]
        assert contents(cache, 1, layer) == list(range(100, 112))


def test_bytes() -> None:
    assert SlotCache(3, COLUMNS, SHAPES, torch.float32).bytes == 2 * 3 * COLUMNS * (2 * 4 + 1 * 6) * 4


def test_compact_moves_accepted_rows() -> None:
    cache = numbered_cache()
    # Slot 2: columns 5, 6, 9 -> 5, 6, 7 (two stay); slot 0: 11, 3 -> 3, 4 (a source is also a goal), padding ignored.
    cache.compact(
        torch.tensor([2, 0]), torch.tensor([[5, 6, 9], [11, 3, 0]]), torch.tensor([5, 3]), torch.tensor([3, 2])
    )
    for layer in range(2):
        assert contents(cache, 2, layer) == [200, 201, 202, 203, 204, 205, 206, 209, 208, 209, 210, 211]
        assert contents(cache, 0, layer) == [0, 1, 2, 11, 3, 5, 6, 7, 8, 9, 10, 11]
        assert contents(cache, 1, layer) == list(range(100, 112))


def test_nothing_is_written_where_nothing_moves() -> None:
    cache, slots = numbered_cache(), torch.tensor([0, 1])
    writes = cache.stores(1)[0]._version
    cache.compact(slots, torch.empty(2, 0, dtype=torch.int64), torch.tensor([4, 7]), torch.tensor([0, 0]))
    cache.compact(slots, torch.tensor([[4, 5], [7, 9]]), torch.tensor([4, 7]), torch.tensor([2, 1]))
    assert cache.stores(1)[0]._version == writes
    cache.compact(slots, torch.tensor([[4, 5], [7, 9]]), torch.tensor([4, 7]), torch.tensor([2, 2]))
    assert cache.stores(1)[0]._version > writes
    assert contents(cache, 1, 1) == [100, 101, 102, 103, 104, 105, 106, 107, 109, 109, 110, 111]


@given(st.lists(st.tuples(st.lists(st.integers(0, 11), max_size=4), st.integers(0, 8)), min_size=1, max_size=3))
def test_compact_equals_a_gather(moves: list[tuple[list[int], int]]) -> None:
    cache = numbered_cache()
    padded = [(source + [0] * 4)[:4] for source, _ in moves]
    cache.compact(
        torch.arange(len(moves)),
        torch.tensor(padded),
        torch.tensor([start for _, start in moves]),
        torch.tensor([len(source) for source, _ in moves]),
    )
    for slot, (source, start) in enumerate(moves):
        expected = [100 * slot + column for column in range(COLUMNS)]
        expected[start : start + len(source)] = [100 * slot + column for column in source]
        assert contents(cache, slot, 1) == expected
