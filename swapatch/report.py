"""What a cache holds: rows and bytes of storage, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
    """The layers of a cache, and sums over them."""

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
        lines = [f"{'layer':>5}  {'kind':<8}{'rows':>8}{'bytes':>14}"]
        lines += [f"{x.index:>5}  {x.kind:<8}{x.rows:>8}{x.bytes:>14,}" for x in self.layers]
        return "\n".join([*lines, f"{'total':>5}  {'':<8}{'':>8}{self.total_bytes:>14,}"])


def report(cache: Any) -> Report:
    """Rows and bytes of any transformers cache, counted as storage: a view counts all that it keeps alive.

    >>> from transformers import DynamicCache
    >>> report(DynamicCache()).total_bytes
    0
    """
    seen: set[int] = set()
    layers = []
    for index, layer in enumerate(cache.layers):
        buffers = [b for b in (layer.keys, layer.values) if isinstance(b, Tensor) and b.ndim == 4]
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
