"""The integers of a sliding window: sizes, rows and ranges. No tensors, no transformers.

A *position* counts tokens from the start of the sequence. A *row* is a place in a buffer. With window ``W`` the query
at position ``i`` sees the keys at positions ``j`` with ``0 <= i - j < W``, itself included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

ALIGN = 64
"""Rows are allocated and rolled in blocks of 64, the alignment that the Spyre operator asks of its keys."""


ENDLESS = 2**31 - 1
"""The window of a global layer: no sequence is as long."""


class Span(NamedTuple):
    """Half-open range of positions or rows, ``start <= x < stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions in the range."""
        return self.stop - self.start


def ceil64(n: int) -> int:
    """Round up to a whole number of 64-row blocks.

    >>> [ceil64(n) for n in (0, 1, 64, 65)]
    [0, 64, 64, 128]
    """
    return -(-n // ALIGN) * ALIGN


def doubled(n: int, least: int = 256) -> int:
    """Round up to ``least`` or twice, four times, eight times as much: few sizes, where each costs a compilation.

    Of all numbers up to 8,192 that makes 6, and on average a quarter of what is rounded up to them is waste.

    >>> [doubled(n) for n in (1, 256, 257, 8000)]
    [256, 256, 512, 8192]
    """
    return least << max(0, (-(-n // least) - 1).bit_length())


def anchored_rows(window: int) -> int:
    """Rows of an anchored buffer: ``ceil64(W + 63)``.

    After a roll by 64 at least ``W - 1`` old rows remain, so the next 64 tokens can be written without another one.

    >>> anchored_rows(512), anchored_rows(1024)
    (576, 1088)
    """
    return ceil64(window + ALIGN - 1)


def ring_rows(window: int) -> int:
    """Rows of a ring: ``ceil64(W)``, since a query sees ``W`` keys and the oldest makes way for the newest.

    >>> ring_rows(512), ring_rows(65)
    (512, 128)
    """
    return ceil64(window)


def ring_pieces(positions: Span, rows: int) -> list[Span]:
    """The rows of these positions in a ring (row = position modulo rows), in time order: one stretch, or two.

    >>> ring_pieces(Span(60, 70), 64)
    [Span(start=60, stop=64), Span(start=0, stop=6)]
    """
    first = positions.start % rows
    stop = first + positions.size
    return [Span(first, stop)] if stop <= rows else [Span(first, rows), Span(0, stop - rows)]


def past(seen: int, window: int) -> Span:
    """The keys before position ``seen`` that the query at ``seen`` or a later one can still see.

    >>> past(3, 8), past(100, 8)
    (Span(start=0, stop=3), Span(start=93, stop=100))
    """
    return Span(max(0, seen - window + 1), seen)


def visible(position: int, window: int) -> Span:
    """The keys that the query at ``position`` sees.

    >>> visible(2, 8), visible(100, 8)
    (Span(start=0, stop=3), Span(start=93, stop=101))
    """
    return Span(max(0, position - window + 1), position + 1)


def roll_origin(origin: int, stop: int, rows: int, keep: int) -> int:
    """Where an anchored buffer must begin so that the positions before ``stop`` fit into its rows.

    The answer is ``origin`` itself while there is room. Else the buffer rolls by whole blocks of 64 rows, as few as
    are needed, but never past ``keep``, the first position that must stay.

    >>> roll_origin(0, 576, 576, 65), roll_origin(0, 577, 576, 66)
    (0, 64)
    """
    overflow = stop - origin - rows
    return origin if overflow <= 0 else min(origin + ceil64(overflow), keep)


def query_blocks(queries: Span, size: int) -> Iterator[Span]:
    """Cut a range of queries into blocks of at most ``size``.

    >>> list(query_blocks(Span(5, 9), 3))
    [Span(start=5, stop=8), Span(start=8, stop=9)]
    """
    for start in range(queries.start, queries.stop, size):
        yield Span(start, min(start + size, queries.stop))
