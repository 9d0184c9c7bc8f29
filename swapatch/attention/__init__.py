"""Attention over rectangles: ours (:mod:`.windowed`) and its definition (:mod:`.reference`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import reference, windowed

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""``(query, key, value, mask, causal, scale) -> output``, all ``[batch, heads, rows, head_dim]``."""

BACKENDS: dict[str, Attention] = {
    "auto": windowed.attend,
    "windowed": windowed.attend,
    "reference": reference.attend,
}

__all__ = ["BACKENDS", "Attention"]
