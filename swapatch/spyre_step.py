"""Steps on a Spyre device, where the attention of a layer is one compiled call of torch-spyre's operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import Attention, spyre
from .attention.spyre import Projection
from .cache import CompactCache, SlidingLayer
from .geometry import Span, ceil64, past
from .masks import CausalWindow
from .step import FixedStep, Step, rows_of


class SpyreDecode(FixedStep):
    """One token: the same compiled call for every position and every layer of a kind."""

    def _make_mask(self, layer: SlidingLayer) -> Tensor:
        seen = self.rule.rows_allowed(self.queries.start, layer.row_positions(self.queries.stop))
        allowed = seen.view(-1, 1, 1, layer.rows).expand(layer.keys.shape[0], 1, 1, layer.rows)
        return spyre.additive(allowed, layer.keys.dtype, layer.keys.device)

    def run(
        self,
        project: Projection,
        layer: Any,
        hidden: Tensor,
        position: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        held: Any = self.cache.layers[layer.layer_idx] if shared is None else None
        buffers = (held.keys, held.values) if shared is None else shared
        hidden, cos, sin = (_padded(states, 1) for states in (hidden, *position))
        index, mask = self.index.to(hidden.device), self.mask.to(hidden.device)
        out, keys, values = spyre.decode(project, layer, hidden, (cos, sin), buffers, index, mask, self.rule.window)
        if held is not None:
            held.keys, held.values = keys, values  # what the call returned is current, not what it was given
        return out, keys, values


class SpyrePrefill(Step):
    """Many tokens, in whole blocks of 64 rows: the first call is square, a later one has the old rows before its own.

    Args:
        batch: number of sequences.
        dtype: of the model.
        causal: whether no key after a query is ever seen, so that a square call may read windows only.
    """

    def __init__(
        self,
        cache: CompactCache,
        rule: CausalWindow,
        queries: Span,
        attention: Attention,
        *,
        batch: int,
        dtype: torch.dtype,
        causal: bool,
    ) -> None:
        super().__init__(cache, rule, queries, attention)
        self.batch, self.dtype, self.causal = batch, dtype, causal
        # Old rows fill whole blocks, however many there are: one shape for every chunk but the first.
        self.old_rows = ceil64(rule.window - 1) if queries.start else 0
        self.new_rows = ceil64(queries.size)
        self.first = self.old_rows - past(queries.start, rule.window).size  # row of the first key that counts
        self._mask: Tensor | None = None

    def run(
        self,
        project: Projection,
        layer: Any,
        hidden: Tensor,
        position: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = hidden.shape[1]
        rows = 1 if tokens == 1 else ceil64(tokens)
        cos, sin = (_padded(states, rows) for states in position)
        held: Any = self.cache.layers[layer.layer_idx] if shared is None else None
        before = shared if held is None else held.past_in(self.old_rows) if self.old_rows else None
        mask, causal = self._mask_of(rows, hidden.device), self.causal and rows == self.old_rows + self.new_rows
        hidden = _padded(hidden, rows)
        out, keys, values = spyre.prefill(
            project, layer, hidden, (cos, sin), before, held is not None, mask, self.rule.window, causal
        )
        if held is not None:
            new = Span(self.old_rows, self.old_rows + self.queries.size)
            held.write(rows_of(keys, new), rows_of(values, new))
        return out[:, :tokens], keys, values

    def _mask_of(self, rows: int, device: torch.device) -> Tensor:
        """``[batch, 1, rows, old rows + new rows]``: made on the CPU and moved once, for all layers."""
        if self._mask is None:
            allowed = torch.zeros((self.batch, 1, rows, self.old_rows + self.new_rows), dtype=torch.bool)
            part = self.rule.allowed(self.queries, self.keys, torch.device("cpu"))
            allowed[:, :, : self.queries.size, self.first : self.first + self.keys.size] = part
            self._mask = spyre.additive(allowed, self.dtype, device)
        return self._mask.to(device)

    def __getitem__(self, index: tuple[Any, Any, slice, Any]) -> Step:
        part: Any = super().__getitem__(index)
        part._mask = None
        return part  # type: ignore[no-any-return]

    def shared(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen = Span(self.first, self.first + self.keys.size)
        return rows_of(keys, seen).clone(), rows_of(values, seen).clone()


def _padded(states: Tensor, rows: int) -> Tensor:
    """``[batch, rows, any]``: these rows, and zeros behind them; a tensor that starts where its storage does."""
    if states.shape[1] == rows:
        return states.clone() if states.storage_offset() else states  # a graph input would lose the offset
    padded = torch.zeros((states.shape[0], rows, states.shape[2]), dtype=states.dtype, device=states.device)
    padded.narrow(1, 0, states.shape[1]).copy_(states)
    return padded
