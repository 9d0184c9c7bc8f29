"""The integers, against counting one by one."""

import pytest

from swapatch.geometry import Span, anchored_rows, ceil64, past, query_blocks, ring_pieces, roll_origin, visible


@pytest.mark.parametrize("window", range(2, 200))
def test_visible_and_past(window: int) -> None:
    for position in range(3 * window):
        seen = [key for key in range(3 * window) if 0 <= position - key < window]
        assert list(range(*visible(position, window))) == seen
        assert list(range(*past(position, window))) == seen[:-1]


@pytest.mark.parametrize("window", (2, 63, 64, 65, 66, 128, 512, 1024))
def test_a_roll_keeps_what_is_visible_and_makes_room_for_64(window: int) -> None:
    rows = anchored_rows(window)
    assert rows == ceil64(window + 63)
    origin = rolls = 0
    for position in range(4 * rows):
        moved = roll_origin(origin, position + 1, rows, past(position + 1, window).start)
        rolls += moved != origin
        origin = moved
        assert origin <= visible(position, window).start
        assert origin % 64 == 0
        assert position - origin < rows
    assert rolls == (4 * rows - rows) // 64


def test_query_blocks_cover_once() -> None:
    blocks = list(query_blocks(Span(3, 1000), 256))
    assert [position for block in blocks for position in range(*block)] == list(range(3, 1000))
    assert max(block.size for block in blocks) == 256


@pytest.mark.parametrize("rows", (64, 128))
def test_a_ring_is_cut_where_it_wraps_and_nowhere_else(rows: int) -> None:
    for start in range(2 * rows):
        for size in range(1, rows + 1):
            parts = ring_pieces(Span(start, start + size), rows)
            wanted = [position % rows for position in range(start, start + size)]
            assert [row for part in parts for row in range(*part)] == wanted
            assert len(parts) == 1 + (wanted[-1] < wanted[0])
