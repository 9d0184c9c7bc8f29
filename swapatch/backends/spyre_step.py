"""The backend for Spyre devices: the attention of a layer is one compiled call of torch-spyre's operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import KERNELS
from ..attention.windowed import rows_of
from ..geometry import Span, ceil64, past
from ..layers import MEMORY, Memory, SlidingLayer, make_room, zeros_like_rows
from ..step import FixedRowStep, LayerCall, Step
from . import spyre
from .backend import Backend, ModelCall

MEMORY[spyre.DEVICE] = Memory(spyre.zeros, born_zero=True)  # filling some rows would go through the host


class Spyre(Backend):
    """Steps over a compact cache; a call without one is stock's."""

    name = "spyre"
    device = spyre.DEVICE

    def check(self) -> None:
        spyre.operator()

    def begin(self, call: ModelCall) -> Step | str:
        layers = call.writable
        if layers is None:
            return "the Spyre operator has no gradient, and attends the rows of a CompactCache only"
        spyre.operator()
        spyre.check_dtype(call.like.dtype)
        # Masks are made on the CPU.
        padding, types = (None if given is None else given.cpu() for given in (call.padding, call.types))
        on_host = ModelCall(**{**vars(call), "padding": padding, "types": types})
        if not call.is_row:
            return SpyrePrefill(on_host)
        make_room(layers, 1)
        return SpyreDecode(call.family, on_host.rule, call.queries, layers[0], KERNELS["reference"])


class SpyreDecode(FixedRowStep):
    """One token: the same compiled call for every position and every layer of a kind."""

    def _whole_mask(self, layer: SlidingLayer) -> Tensor:
        allowed = self.rule.rows_allowed(self.keys, self.parts, layer.rows, torch.device("cpu"))
        return spyre.additive(
            allowed.expand(layer.key_rows.shape[0], 1, 1, layer.rows), layer.key_rows.dtype, layer.key_rows.device
        )

    def run(self, call: LayerCall) -> Tensor:
        layer = call.layer
        owns = not getattr(layer, "is_kv_shared_layer", False)
        held: Any = call.cache.layers[layer.layer_idx] if owns else None
        if owns:
            held.settle()
        buffers = (held.key_rows, held.value_rows) if owns else call.borrowed
        hidden, cos, sin = (_padded(states, 1) for states in (call.hidden, *call.position))
        index, mask = self.index.to(hidden.device), self.mask.to(hidden.device)
        out, keys, values = spyre.decode(
            self.family.project, layer, hidden, (cos, sin), buffers, index, mask, self.rule.window
        )
        if owns:
            held.step = self  # counts from here on
            held.key_rows, held.value_rows = keys, values  # what the call returned is current, not what it was given
        call.share(keys, values)
        return out


class SpyrePrefill(Step):
    """Many tokens, in whole blocks of 64 rows: the first call is square, a later one has the old rows before its own.

    Args:
        call: of the model, what it says of the mask on the CPU.
    """

    def __init__(self, call: ModelCall) -> None:
        super().__init__(call.family, call.rule, call.queries)
        self.call = call
        self.keys = Span(past(call.queries.start, call.window).start, call.queries.stop)
        # Old rows fill whole blocks, however many there are: one shape for every chunk but the first.
        self.old_rows = ceil64(call.window - 1) if call.queries.start else 0
        self.new_rows = ceil64(call.queries.size)
        self.first = self.old_rows - past(call.queries.start, call.window).size  # row of the first key that counts
        self._mask: Tensor | None = None

    def run(self, call: LayerCall) -> Tensor:
        layer, tokens = call.layer, call.hidden.shape[1]
        rows = 1 if tokens == 1 else ceil64(tokens)
        cos, sin = (_padded(states, rows) for states in call.position)
        owns = not getattr(layer, "is_kv_shared_layer", False)
        held: Any = call.cache.layers[layer.layer_idx] if owns else None
        before = call.borrowed if not owns else _past_in(held, self.old_rows) if self.old_rows else None
        mask = self._mask_of(rows, call.hidden.device)
        causal = self.call.causal and rows == self.old_rows + self.new_rows
        hidden = _padded(call.hidden, rows)
        out, keys, values = spyre.prefill(
            self.family.project, layer, hidden, (cos, sin), before, owns, mask, self.rule.window, causal
        )
        if owns:
            new = Span(self.old_rows, self.old_rows + self.queries.size)
            held.write(rows_of(keys, new), rows_of(values, new))
        call.share(keys, values)
        return out[:, :tokens]

    def _mask_of(self, rows: int, device: torch.device) -> Tensor:
        """``[batch, 1, rows, old rows + new rows]``: made on the CPU and moved once, for all layers."""
        if self._mask is None:
            batch = self.call.like.shape[0]
            allowed = torch.zeros((batch, 1, rows, self.old_rows + self.new_rows), dtype=torch.bool)
            part = self.rule.allowed(self.queries, self.keys, torch.device("cpu"))
            allowed[:, :, : self.queries.size, self.first : self.first + self.keys.size] = part
            self._mask = spyre.additive(allowed, self.call.like.dtype, device)
        return self._mask.to(device)

    def part(self, start: int) -> SpyrePrefill:
        part = SpyrePrefill(self.call)
        part.queries = Span(self.queries.start + start, self.queries.stop)
        return part

    def time_order(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen = Span(self.first, self.first + self.keys.size)
        return rows_of(keys, seen).clone(), rows_of(values, seen).clone()


def _past_in(layer: SlidingLayer, rows: int) -> tuple[Tensor, Tensor]:
    """What a next token can see, at the end of this many rows, behind zeros; by copies that stay on the device."""
    seen, found = layer.visible_past, []
    for buffer in (layer.key_rows, layer.value_rows):
        first, whole = rows - seen.size, zeros_like_rows(buffer, rows)
        for part in layer.pieces(seen):
            whole.narrow(2, first, part.size).copy_(buffer.narrow(2, part.start, part.size))
            first += part.size
        found.append(whole)
    return found[0], found[1]


def _padded(states: Tensor, rows: int) -> Tensor:
    """``[batch, rows, any]``: these rows, and zeros behind them; a tensor that starts where its storage does."""
    if states.shape[1] == rows:
        return states.clone() if states.storage_offset() else states  # a graph input would lose the offset
    padded = torch.zeros((states.shape[0], rows, states.shape[2]), dtype=states.dtype, device=states.device)
    padded.narrow(1, 0, states.shape[1]).copy_(states)
    return padded
