"""The rows as a table in Markdown, to be pasted into the README."""

from __future__ import annotations

from itertools import groupby

from .rows import Row
from .screen import amount


def markdown(rows: list[Row]) -> str:
    """A table for each thing that was measured: a line for each way, a column for each number of tokens."""
    groups = groupby(rows, lambda row: (row.case, row.model, row.setting, row.dtype, row.device))
    return "\n\n".join(one_table(", ".join(filter(None, about)), list(group)) for about, group in groups) + "\n"


def one_table(title: str, rows: list[Row]) -> str:
    """Medians; in brackets how often swapatch's goes into them. Below it what did not run, and what differs."""
    cells = {}
    for row in rows:
        for name, value in ((row.stock, row.stock_value), (row.patched, row.patched_value)):
            if name:
                cells[name, row.tokens] = "-" if value is None else amount(value, row.unit)
    columns, names = (list(dict.fromkeys(part)) for part in zip(*((t, n) for n, t in cells), strict=True))
    lines = [[title, *("" if tokens is None else f"{tokens:,} tokens" for tokens in columns)]]
    lines.append(["---"] * len(lines[0]))
    lines += [[name, *(cells.get((name, tokens), "") for tokens in columns)] for name in names]
    notes = dict.fromkeys(f"* {row.stock or row.patched}: {row.note}" for row in rows if row.note)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(["", *notes] if notes else [])])
