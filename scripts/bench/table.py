"""The rows as a table in Markdown, to be pasted into the README."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from .rows import Row
from .screen import amount

OURS = "swapatch"


def markdown(rows: list[Row]) -> str:
    """A table for each thing that was measured: a line for each way, a column for each number of tokens."""
    groups = groupby(rows, lambda row: (row.case, row.model, row.setting, row.dtype, row.device))
    return "\n\n".join(one_table(", ".join(filter(None, about)), list(group)) for about, group in groups) + "\n"


def one_table(title: str, rows: list[Row]) -> str:
    """Medians; in brackets how often swapatch's goes into them. Below it what did not run, and what differs."""
    values = {}
    for row in rows:
        values |= {(name, row.tokens): value for name, value in of_both(row)}
    names, columns = (list(dict.fromkeys(part)) for part in zip(*values, strict=True))
    head = [title, *("" if tokens is None else f"{tokens:,} tokens" for tokens in columns)]
    lines = [head, ["---"] * len(head)]
    for name in names:
        own = [(values.get((name, tokens)), values.get((OURS, tokens))) for tokens in columns]
        lines.append([name, *(cell(value, None if name == OURS else ours, rows[0]) for value, ours in own)])
    notes = dict.fromkeys(f"* {row.stock or row.patched}: {row.note}" for row in rows if row.note)
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(["", *notes] if notes else [])])


def of_both(row: Row) -> Iterator[tuple[str, float | None]]:
    for name, value in ((row.stock, row.stock_value), (row.patched, row.patched_value)):
        if name:
            yield name, value


def cell(value: float | None, ours: float | None, row: Row) -> str:
    if value is None:
        return "-"
    speed = f", {1 / value:.1f} tokens/s" if row.setting == "one step" else ""
    return amount(value, row.unit) + speed + (f" ({value / ours:.2f})" if ours else "")
