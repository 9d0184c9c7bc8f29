"""The rows as they come, on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .rows import Row


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str, Row | None], None]]:
    """Rows as they come, with a bar below them where there is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield lambda number, name, row: print(f"{name:<14} {line(row) if row else '...'}", flush=True)
        return
    console = Console(soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def show(number: int, name: str, row: Row | None) -> None:
            bar.update(task, completed=number, description=name)
            if row is not None or not console.is_terminal:
                console.print(f"{name:<14} {line(row) if row else '...'}", markup=False)

        yield show


def line(row: Row) -> str:
    about = ", ".join(str(part) for part in (row.setting, row.tokens and f"{row.tokens:,} tokens", row.dtype) if part)
    sides = [
        f"{name} {amount(value, row.unit)}"
        for name, value in ((row.stock, row.stock_value), (row.patched, row.patched_value))
        if value is not None
    ]
    ratio = f"ratio {row.ratio:.2f} ({row.rounds} rounds)" if row.ratio is not None else ""
    return " | ".join(part for part in (about, *sides, ratio, row.note) if part)


def amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
    return f"{value:.1%}" if unit == "fraction" else f"{value:,.1f} {unit}"
