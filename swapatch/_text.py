"""How numbers and tables are printed: with rich on a terminal where it is installed, as aligned text otherwise."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: int) -> str:
    """Bytes with a binary unit.

    >>> human_bytes(0), human_bytes(1023), human_bytes(294912), human_bytes(3 * 2**30)
    ('0 B', '1023 B', '288.0 KiB', '3.0 GiB')
    """
    size, unit = float(count), 0
    while size >= 1024 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {UNITS[unit]}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of them shortened.

    >>> ranges([0, 1, 2, 4, 6, 7])
    '0-2, 4, 6-7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> str:
    """A table as text, columns aligned right unless ``left`` has an ``l`` at their place.

    >>> print(aligned(["layer", "kind"], [["0", "sliding"], ["11", "global"]], left=" l"))
    layer  kind
        0  sliding
       11  global
    """
    table = [list(head), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = [_side(left, index) for index in range(len(widths))]
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        for row in table
    )
    return "\n".join(line.rstrip() for line in lines)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: str = "") -> None:
    """Print a table to standard output. A pipe or a file gets aligned text, which greps and diffs well."""
    if sys.stdout.isatty() and _print_rich(head, rows, left):
        return
    print(aligned(head, rows, left))


def _print_rich(head: Sequence[str], rows: Sequence[Sequence[str]], left: str) -> bool:
    try:
        # By name: rich is no dependency, and a type check without it must pass as well.
        console, table = importlib.import_module("rich.console"), importlib.import_module("rich.table")
        text = importlib.import_module("rich.text")
    except ImportError:
        return False
    grid = table.Table()
    for index, name in enumerate(head):
        grid.add_column(name, justify="left" if _side(left, index) == "<" else "right")
    for row in rows:
        grid.add_row(*map(text.Text, row))  # text as it is: a cell like "[0]" is no markup
    console.Console(file=sys.stdout).print(grid)
    return True


def _side(left: str, index: int) -> str:
    return "<" if left[index : index + 1] == "l" else ">"
