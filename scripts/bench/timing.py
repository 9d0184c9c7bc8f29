"""Several ways of doing the same, timed in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .checks import TOLERANCES, Computed, check
from .device import CPU
from .rows import Row
from .sizes import Options

LONG = 3.0
"""Seconds from which on a run has no use for a warm-up: the run that is checked is timed as well."""

AGAIN = 20.0
"""Seconds that a first round of such runs may take, if there is to be a second one."""

Way: TypeAlias = Callable[[], tuple[float, Computed]]
"""One way of doing the work: runs it once, and returns the seconds it took and what it computed.

The first call of every way computes the same, and so does the second, and so on.
"""

timed = CPU.timed
"""For what only ever runs there; where a model may be elsewhere, its device is asked."""


@dataclass
class Result:
    """Seconds of every way, round by round, and how far what it computed was from the first way's."""

    seconds: dict[str, list[float]]
    errors: dict[str, float]
    tolerance: float

    def row(self, stock: str, patched: str, **about: Any) -> Row:
        stocks, patcheds = self.seconds[stock], self.seconds[patched]
        return Row(
            unit="s",
            stock=stock,
            stock_value=statistics.median(stocks),
            patched=patched,
            patched_value=statistics.median(patcheds),
            ratio=statistics.median(s / p for s, p in zip(stocks, patcheds, strict=True)),
            ratio_of_sums=sum(stocks) / sum(patcheds),
            rounds=len(stocks),
            error=max(self.errors[stock], self.errors[patched]),
            tolerance=self.tolerance,
            **about,
        )


def compare(
    ways: dict[str, Way], dtype: torch.dtype, options: Options, tolerance: float | None = None, patience: int = 1
) -> Result:
    """Check that all ways compute the same as the first, then time them in turn, ``patience`` times as long."""
    start, budget, rounds = time.perf_counter(), patience * options.sizes.seconds * len(ways), patience * options.rounds
    first = {name: way() for name, way in ways.items()}
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    errors = check({name: computed for name, (_, computed) in first.items()}, tolerance)
    warm = max(seconds for seconds, _ in first.values()) >= LONG
    times = {name: [seconds] if warm else [] for name, (seconds, _) in first.items()}
    del first
    end = start + max(budget, AGAIN) if warm else time.perf_counter() + budget
    names = list(ways)
    while (done := len(times[names[0]])) == 0 or (done < rounds and time.perf_counter() < end):
        # There and back: none is always the one that finds the caches as the same other one left them.
        for name in names if done % 2 == 0 else names[::-1]:
            times[name].append(ways[name]()[0])
    return Result(times, errors, tolerance)
