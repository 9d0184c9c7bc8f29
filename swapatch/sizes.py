"""What a cache holds, rows and bytes of storage layer by layer: measured on a cache, or predicted from a config.

Bytes are those of the storages that keys and values keep alive. A view of the last rows of a prompt counts the whole
prompt, because that is what stays in memory. What belongs to no layer is not counted: the scratch buffer of a cache
whose rows have rolled, as large as one sliding layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ._compat import kv_shape
from ._errors import explain
from ._text import aligned, human_bytes, ranges
from .families import plan_model
from .layers import LAYOUTS, SlidingLayer
from .plan import text_config


@dataclass(frozen=True)
class LayerReport:
    """One layer of a cache.

    Attributes:
        index: number of the layer.
        kind: ``"sliding"``, ``"global"``, or ``"shared"`` for a layer without keys and values of its own.
        rows: rows of its buffers.
        bytes: storage its keys and values keep alive, whatever part of it they show.
    """

    index: int
    kind: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """The layers of a cache, and sums over them. Printed, layers alike share a line."""

    layers: tuple[LayerReport, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of storage of all layers."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def sliding_bytes(self) -> int:
        """Bytes of storage of the sliding layers."""
        return sum(layer.bytes for layer in self.layers if layer.kind == "sliding")

    def __str__(self) -> str:
        alike: dict[tuple[str, int, int], list[int]] = {}
        for layer in self.layers:
            alike.setdefault((layer.kind, layer.rows, layer.bytes), []).append(layer.index)
        table = [
            [kind, f"{rows:,}", f"{size:,}", *_sizes(size * len(layers)), ranges(layers)]
            for (kind, rows, size), layers in alike.items()
        ]
        table.append(["total", "", "", *_sizes(self.total_bytes), ""])
        return aligned(["kind", "rows", "bytes a layer", "bytes", "", "layers"], table, left="l    l")


def _sizes(size: int) -> tuple[str, str]:
    return f"{size:,}", human_bytes(size)


def report(
    cache_or_config: Any,
    *,
    tokens: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "anchored",
) -> Report:
    """Rows and bytes of a cache, measured; or of the cache that a model would have, predicted from its config.

    Both count storage. To measure, pass any transformers cache and nothing else. To predict, pass a config or a model,
    and ``tokens``; nothing is allocated.

    Args:
        cache_or_config: a cache, a config, or a model.
        tokens: tokens that the cache has seen, the last of them in a step of its own.
        batch: sequences.
        dtype: of the keys and values.
        layout: ``"anchored"`` or ``"ring"`` for swapatch's cache; for comparison transformers' ``"dynamic"``,
            ``"static"`` (made for ``tokens`` tokens), or ``"full"``, a dynamic one that knows of no window.

    Raises:
        UnsupportedModelError: neither a cache nor something that swapatch can patch.
        ValueError: ``tokens`` missing, or given with a cache; an unknown layout; a count below 1.

    >>> from transformers import DynamicCache, Gemma3TextConfig
    >>> report(DynamicCache()).total_bytes
    0
    >>> config = Gemma3TextConfig(sliding_window=512, num_hidden_layers=6)
    >>> predicted = report(config, tokens=8192)
    >>> predicted.layers[0].rows, predicted.layers[5].rows
    (576, 8192)
    """
    if isinstance(cache_or_config, Cache):
        if tokens is not None:
            raise ValueError(explain(f"tokens={tokens} with a cache", "tokens with a config", "leave tokens out"))
        return _measure(cache_or_config)
    plan = plan_model(cache_or_config)
    _check(tokens, batch, layout)
    config, layers = text_config(cache_or_config), []
    for layer in plan.layers:
        size = Size(0, 0) if layer.shared else SIZES[layout](layer.kind, tokens or 0, plan.window)
        heads, dim = kv_shape(config, layer.index)
        row_bytes = 2 * batch * heads * dim * dtype.itemsize  # keys and values
        kind = "shared" if layer.shared else layer.kind
        layers.append(LayerReport(layer.index, kind, size.rows, size.stored * row_bytes))
    return Report(tuple(layers))


class Size(NamedTuple):
    """Rows that a layer's buffers show, and rows of storage behind them."""

    rows: int
    stored: int


def _compact(layout: str) -> Callable[[str, int, int], Size]:
    def size(kind: str, tokens: int, window: int) -> Size:
        rows = LAYOUTS[layout].base_rows(window) if kind == "sliding" else tokens
        return Size(rows, rows)

    return size


def _dynamic(kind: str, tokens: int, window: int) -> Size:
    # A step joins W - 1 old rows and its own, and shows the last W - 1 of them: the oldest row stays in the storage.
    return Size(min(tokens, window - 1), min(tokens, window)) if kind == "sliding" else Size(tokens, tokens)


def _static(kind: str, tokens: int, window: int) -> Size:
    rows = min(tokens, window) if kind == "sliding" else tokens
    return Size(rows, rows)


def _full(kind: str, tokens: int, window: int) -> Size:
    return Size(tokens, tokens)


STOCK: dict[str, Callable[[str, int, int], Size]] = {"dynamic": _dynamic, "static": _static, "full": _full}
"""transformers' own caches: the size of a layer from its kind, the tokens seen, and the window."""

SIZES: dict[str, Callable[[str, int, int], Size]] = {**{name: _compact(name) for name in LAYOUTS}, **STOCK}
"""The same for every layout that can be predicted."""


def _check(tokens: int | None, batch: int, layout: str) -> None:
    if tokens is None:
        raise ValueError(explain("a config, and no tokens", "a prediction for a number of tokens", "pass tokens=..."))
    if tokens < 1 or batch < 1:
        raise ValueError(explain(f"tokens={tokens}, batch={batch}", "counts from 1", "pass positive numbers"))
    if layout not in SIZES:
        raise ValueError(explain(f"layout={layout!r}", ", ".join(map(repr, SIZES)), "pass one of these"))


def _measure(cache: Any) -> Report:
    seen: set[int] = set()
    layers = []
    for index, layer in enumerate(cache.layers):
        bounded = isinstance(layer, SlidingLayer)
        held = (layer.key_rows, layer.value_rows) if bounded else (layer.keys, layer.values)
        buffers = [buffer for buffer in held if isinstance(buffer, Tensor) and buffer.ndim == 4]
        rows = buffers[0].shape[2] if buffers else 0
        layers.append(LayerReport(index, _kind(layer), rows, sum(_bytes(b, seen) for b in buffers)))
    return Report(tuple(layers))


def _kind(layer: Any) -> str:
    sliding = getattr(layer, "is_sliding", None)
    return "shared" if sliding is None else "sliding" if sliding else "global"


def _bytes(buffer: Tensor, seen: set[int]) -> int:
    storage = buffer.untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()
