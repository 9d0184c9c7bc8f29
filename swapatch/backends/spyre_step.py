"""The backend for Spyre devices: the attention of a layer is one compiled call of torch-spyre's operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from .._compat import kv_shape
from .._errors import CacheStateError, explain
from ..attention import KERNELS
from ..attention.windowed import rows_of
from ..geometry import Span, doubled, past
from ..layers import MEMORY, GlobalLayer, Memory, SlidingLayer, alike, make_room, zeros_like_rows
from ..plan import GLOBAL, SLIDING
from ..rules import Rule
from ..step import FixedRowStep, LayerCall, Step
from . import spyre
from .backend import Backend, ModelCall

MEMORY[spyre.DEVICE] = Memory(spyre.zeros, spyre.shift, spyre.laid_out)


class Spyre(Backend):
    """Steps over a compact cache; a call without one is stock's.

    Global layers are computed in the same way, as layers whose window has no end.
    """

    name = "spyre"
    device = spyre.DEVICE
    host_masks = True
    whole = True

    def check(self) -> None:
        spyre.operator()

    def kinds(self, call: ModelCall) -> tuple[str, ...]:
        return (SLIDING, GLOBAL) if _global_layers(call) else (SLIDING,)

    def begin(self, call: ModelCall) -> dict[str, Step] | str:
        layers = call.writable
        if layers is None:
            return "the Spyre operator has no gradient, and attends the rows of a CompactCache only"
        spyre.operator()
        spyre.check_dtype(call.like.dtype)
        by_kind = {SLIDING: layers}
        if longest := _global_layers(call):
            for layer in longest:
                layer.room(call.queries.size)  # or it raises, before anything has changed
            by_kind[GLOBAL] = longest
        if not call.queries.start:
            _allocate(call, [layer for owners in by_kind.values() for layer in owners])
        if call.is_row:
            return {kind: _begin_row(call, kind, owners) for kind, owners in by_kind.items()}
        whole = set(call.config.layer_types) <= set(by_kind)
        return {kind: SpyrePrefill(call, kind, owners, whole) for kind, owners in by_kind.items()}


def _allocate(call: ModelCall, layers: list[SlidingLayer]) -> None:
    """Buffers for layers that have seen nothing yet."""
    shapes = [
        (layer, *kv_shape(call.config, index)) for index, layer in enumerate(call.cache.layers) if layer in layers
    ]
    for _, _, dim in shapes:
        spyre.check_head_dim(dim)
    for layer, heads, dim in shapes:
        like = torch.empty((call.like.shape[0], heads, 1, dim), dtype=call.like.dtype, device=call.device)
        if not alike(layer.key_rows, like):
            layer.lazy_initialization(like, like)


def _begin_row(call: ModelCall, kind: str, layers: list[SlidingLayer]) -> Step:
    make_room(layers, 1)
    return SpyreDecode(call.family, _rule(call, kind, layers[0]), call.queries, layers[0], KERNELS["reference"])


def _global_layers(call: ModelCall) -> list[SlidingLayer]:
    """The global layers of a cache, ours from its first call on; none where they are to be stock's."""
    cache = call.cache
    if not call.whole or call.writable is None:
        return []
    indices = [layer.index for layer in cache.plan.layers if layer.kind == "global" and not layer.shared]
    for index in indices:
        layer = cache.layers[index]
        if type(layer) in (DynamicLayer, StaticLayer) and not layer.is_initialized:
            cache.layers[index] = GlobalLayer(getattr(layer, "max_cache_len", None), cache.expected)
    layers = [cache.layers[index] for index in indices]
    alike = all(type(layer) is GlobalLayer and layer.seen == call.queries.start for layer in layers)
    return layers if alike else []


def _rule(call: ModelCall, kind: str, layer: SlidingLayer) -> Rule:
    """Who sees whom on this kind of layer."""
    return call.rule if kind == SLIDING else call.rule.endless()


class SpyreDecode(FixedRowStep):
    """One token: the same compiled call for every position and every layer of a kind."""

    def _tensors(self, layer: SlidingLayer) -> tuple[Tensor, Tensor]:
        allowed = self.rule.rows_allowed(self.keys, self.parts, layer.rows, torch.device("cpu"))
        whole = allowed.expand(layer.key_rows.shape[0], 1, 1, layer.rows)
        device = layer.key_rows.device
        return torch.tensor([self.row]).to(device), spyre.additive(whole, layer.key_rows.dtype, device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph of its own, of all layers alike
    def run(self, call: LayerCall) -> Tensor:
        layer = call.layer
        held = _held(call)
        buffers = call.borrowed if held is None else (held.key_rows, held.value_rows)
        hidden, cos, sin = map(_from_start, (call.hidden, *call.position))
        index, mask = (tensor.to(hidden.device) for tensor in (self.index, self.mask))
        out, keys, values = spyre.decode(
            self.family, layer, hidden, (cos, sin), buffers, held is not None, index, mask, self.rule.window
        )
        if held is not None:
            held.step = self  # counts from here on
            held.key_rows, held.value_rows = keys, values  # what the call returned is current, not what it was given
        call.share(keys, values)
        return out

    def time_order(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _joined(keys, self.parts), _joined(values, self.parts)


class SpyrePrefill(Step):
    """Many tokens: the first call is square, a later one has the rows of the buffers before its own.

    The text model computes them with some rows in front, so that few numbers of rows occur; the tokens are the last
    ones. What the buffers hold afterwards is picked from the rows that were attended. All that is a number here is used
    before the layers run, which see tensors.

    Args:
        call: of the model.
        kind: of the layers.
        layers: those of this kind that hold rows, all alike.
        whole: whether all layers are ours. One of stock's would store the rows in front, so that each of ours has to
            put them in front of its own.
    """

    def __init__(self, call: ModelCall, kind: str, layers: list[SlidingLayer], whole: bool) -> None:
        layer, tokens, seen = layers[0], call.queries.size, call.queries.start
        super().__init__(call.family, _rule(call, kind, layer), call.queries)
        rows = doubled(tokens)
        self.front = rows - tokens
        self.lead = self.front if whole else 0
        self.origin, size = layer.room(tokens)
        if layer.rows not in (0, size):  # more rows from now on, while the past is recorded
            for each in layers:
                each.hold(each.origin, size)
        self.is_first = not seen
        self.keys = Span(past(seen, self.rule.window).start, call.queries.stop)
        old = [] if self.is_first else layer.pieces(Span(self.keys.start, seen))
        first = (0 if self.is_first else size) + self.front
        self.parts = [*old, Span(first, first + tokens)]  # the rows of these keys among those that are attended
        self.causal = call.causal and self.is_first
        batch, columns = call.like.shape[0], first + tokens
        self._allowed = torch.zeros((batch, 1, rows, columns), dtype=torch.bool)
        allowed, done = self.rule.allowed(self.queries, self.keys, torch.device("cpu")), 0
        for part in self.parts:
            self._allowed[:, :, self.front :, part.start : part.stop] = allowed[..., done : done + part.size]
            done += part.size
        self.dtype, self.where = call.like.dtype, call.device
        self.mask = spyre.additive(self._allowed, self.dtype, self.where)
        self.source = self._source(layer, size, seen, first).to(self.where)
        self.size = size

    def _source(self, layer: SlidingLayer, size: int, seen: int, first: int) -> Tensor:
        """Which of the attended rows each row of the buffers takes over, ``[size]``."""
        # A row that is to hold no token takes over what it holds, or the first row: finite numbers, never seen.
        source = torch.zeros(size, dtype=torch.long) if self.is_first else torch.arange(size)
        for kept in (Span(max(self.origin, layer.origin), seen), Span(max(self.origin, seen), self.queries.stop)):
            if kept.size <= 0:
                continue
            start = first + kept.start - seen
            rows = [Span(start, start + kept.size)] if kept.start >= seen else layer.pieces(kept)
            taken = torch.cat([torch.arange(*part) for part in rows])
            for part in layer.place(kept, self.origin, size):
                source[part.start : part.stop], taken = taken[: part.size], taken[part.size :]
        return source

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a graph of its own, of all layers alike
    def run(self, call: LayerCall) -> Tensor:
        held = _held(call)
        buffers = None
        if held is not None:
            if held.key_rows.device != call.hidden.device:  # a model on several devices
                like = torch.empty(held.key_rows[:, :, :1].shape, dtype=self.dtype, device=call.hidden.device)
                held.key_rows, held.value_rows = zeros_like_rows(like, self.size), zeros_like_rows(like, self.size)
            buffers = held.key_rows, held.value_rows
        before = call.borrowed if held is None else None if self.is_first else buffers
        hidden, cos, sin = map(_from_start, (call.hidden, *call.position))
        mask, source = self.mask.to(hidden.device), self.source.to(hidden.device)
        out, keys, values, buffers = spyre.prefill(
            self.family,
            call.layer,
            hidden,
            (cos, sin),
            before,
            buffers,
            None if held is None else source,
            mask,
            self.rule.window,
            self.causal,
        )
        if held is not None and buffers is not None:
            held.step = self  # counts from here on
            held.key_rows, held.value_rows = buffers
        call.share(keys, values)
        return out

    def part(self, start: int) -> SpyrePrefill:
        """The same buffers; of the queries the last ones, in rows of their own."""
        part = object.__new__(type(self))
        vars(part).update(vars(self))
        part.queries = Span(self.queries.start + start, self.queries.stop)
        rows = 1 if part.queries.size == 1 else doubled(part.queries.size)
        if rows < self._allowed.shape[2]:
            part._allowed = self._allowed[:, :, -rows:]
            part.mask = spyre.additive(part._allowed, self.dtype, self.where)
            part.causal = False  # fewer queries than keys
        return part

    def time_order(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _joined(keys, self.parts), _joined(values, self.parts)


def _joined(rows: Tensor, parts: list[Span]) -> Tensor:
    return torch.cat([rows_of(rows, part) for part in parts], dim=2)


def _from_start(states: Tensor) -> Tensor:
    """Starting where the storage does: a graph would lose the offset of a view."""
    if not states.storage_offset():
        return states
    return torch.empty(states.shape, dtype=states.dtype, device=states.device).copy_(states)


def _held(call: LayerCall) -> Any:
    """The cache layer that this layer writes to; None where it attends what another one shares."""
    if call.shared is not None and call.layer.is_kv_shared_layer:
        return None
    held = call.cache.layers[call.layer.layer_idx]
    if not held.settle():
        raise CacheStateError(
            explain(
                f"another number of rows put into layer {call.layer.layer_idx} within a forward",
                "rows that are set between two calls",
                "set them before the forward",
            )
        )
    return held
