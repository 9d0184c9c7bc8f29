"""What happened to the calls of a patched model: computed in windows, or left to stock, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class CallCounts:
    """What happened to the calls of a model since it was patched.

    A call that is part of a compiled graph counts when the graph is traced, and never again.

    Attributes:
        windowed: calls that swapatch computed, by kind: ``"prefill"`` (over a cache), ``"decode"`` (one more token),
            ``"uncached"`` and ``"training"``.
        stock: calls left to transformers' own code, by the reason in words.
    """

    windowed: dict[str, int] = field(default_factory=dict)
    stock: dict[str, int] = field(default_factory=dict)


class Calls:
    """The counters behind :class:`CallCounts`, under the names of its fields."""

    def __init__(self) -> None:
        self.windowed: Counter[str] = Counter()
        self.stock: Counter[str] = Counter()
        # A compiler calls this while it traces, and leaves nothing of it in the graph.
        self._count_at_trace = torch.compiler.assume_constant_result(_counting(self))  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.windowed, self.stock)

    def count(self, counter: str, name: str) -> None:
        """One more in ``"windowed"`` or ``"stock"``."""
        if torch.compiler.is_compiling():
            self._count_at_trace(counter, name)
        else:
            getattr(self, counter)[name] += 1

    def move(self, kind: str, reason: str) -> None:
        """A call that was counted as windowed when it began goes to stock all the same."""
        self.windowed[kind] -= 1
        self.count("stock", reason)

    def now(self) -> CallCounts:
        """What was counted so far."""
        return CallCounts(dict(+self.windowed), dict(self.stock))


def _counting(calls: Calls) -> Any:
    def count(counter: str, name: str) -> None:
        getattr(calls, counter)[name] += 1

    return count


def _load(windowed: Counter[str], stock: Counter[str]) -> Calls:
    calls = Calls()
    calls.windowed, calls.stock = windowed, stock
    return calls
