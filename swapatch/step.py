"""One forward of the model, seen from its sliding layers: where each writes its new rows, and what its queries see.

A :class:`Step` travels through the model in the place of the sliding mask.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .attention import Attention
from .attention.spyre import Projection
from .attention.windowed import PREFILL_BLOCK
from .cache import CompactCache, SlidingLayer
from .geometry import Span, past
from .masks import CausalWindow, Rectangle


class Step:
    """Some new tokens over a cache: where each sliding layer writes and what its queries see.

    Args:
        cache: the cache of this call.
        rule: who sees whom.
        queries: positions of the new tokens.
        attention: computes one rectangle.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        self.cache = cache
        self.rule = rule
        self.queries = queries
        self.attention = attention
        self.keys = self._keys(queries, rule.window)
        self.stock_masks: Callable[[], Any] | None = None
        self._rectangles: dict[tuple[object, ...], list[Rectangle]] = {}

    @staticmethod
    def _keys(queries: Span, window: int) -> Span:
        """Positions of the keys that :meth:`write` returns."""
        return Span(past(queries.start, window).start, queries.stop)

    def run(
        self,
        project: Projection,
        layer: Any,
        hidden: Tensor,
        position: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The attention of one sliding layer, from its input to its output.

        Args:
            project: makes query, key and value.
            layer: the attention module.
            hidden: ``[batch, tokens, hidden]``.
            position: cosines and sines, ``[batch, tokens, head_dim]`` each.
            shared: keys and values of the layer whose these are, if they are not its own.

        Returns:
            ``[batch, tokens, hidden]``, and the keys and values attended, ``[batch, kv_heads, rows, head_dim]``.
        """
        query, key, value = project(layer, hidden, *position)
        if key is None or value is None:
            assert shared is not None, "a layer without keys of its own shares another's"
            keys, values = shared
        else:
            keys, values = self.write(layer.layer_idx, key, value)
        out = self.attend(query, keys, values, layer.scaling)
        # [batch, tokens, heads, head_dim] -> [batch, tokens, hidden]
        return layer.o_proj(out.reshape(*hidden.shape[:2], -1)), keys, values

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # counters move here, and prompts come in any length
    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new rows, ``[batch, kv_heads, tokens, head_dim]``; return all keys and values to attend."""
        keys, values = self.cache.layers[layer].update(key, value)
        return keys, values

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Windowed attention.

        Args:
            query: ``[batch, heads, tokens, head_dim]``.
            keys, values: ``[batch, kv_heads, rows, head_dim]``, as :meth:`write` returned them.
            scale: multiplies the scores.

        Returns:
            ``[batch, tokens, heads, head_dim]``
        """
        rectangles = self.rectangles(query)
        if len(rectangles) == 1:
            _, seen, mask, causal = rectangles[0]
            part = self.attention(query, rows_of(keys, seen), rows_of(values, seen), mask, causal, scale)
            return part.transpose(1, 2)
        batch, heads, tokens, dim = query.shape
        out = query.new_empty((batch, tokens, heads, dim))
        for rows, seen, mask, causal in rectangles:
            part = self.attention(rows_of(query, rows), rows_of(keys, seen), rows_of(values, seen), mask, causal, scale)
            out[:, rows.start : rows.stop] = part.transpose(1, 2)
        return out

    def rectangles(self, like: Tensor) -> list[Rectangle]:
        """What to compute, the same for every layer, made at the first one."""
        name = (like.dtype, like.device)
        if name not in self._rectangles:
            self._rectangles[name] = self._make_rectangles(like)
        return self._rectangles[name]

    def _make_rectangles(self, like: Tensor) -> list[Rectangle]:
        return self.rule.rectangles(self.queries, self.keys, like, PREFILL_BLOCK)

    def commit(self) -> None:
        """Called once the text model has run."""

    def contiguous(self) -> Step:
        """Itself: transformers 5.18 to 5.23 asks every mask that was made ahead of a call to be contiguous."""
        return self

    def __getitem__(self, index: tuple[Any, Any, slice, Any]) -> Step:
        """The step for some of its queries, sliced as the mask in whose place it stands, ``[:, :, queries]``.

        Gemma 4 drops queries that nobody needs before the layers that write nothing of their own.
        """
        start, stop, _ = index[2].indices(self.queries.size)
        part = copy(self)
        part.queries = Span(self.queries.start + start, self.queries.start + stop)
        part._rectangles = {}
        return part

    def shared(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What a caller gets who asked for the keys and values that layers shared: in time order, and his own."""
        return keys, values


class DecodeStep(Step):
    """One token: written in place into the buffers, which are attended as they lie.

    The counters of the layers move on only at :meth:`commit`, when every layer has written.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        super().__init__(cache, rule, queries, attention)
        layer = cache.sliding[0]
        self.row = layer.pieces(queries)[0].start
        parts = layer.pieces(self.keys)
        # Visible rows in one stretch are cut out; those that wrap around the end of a ring are attended with the rest.
        self.whole = len(parts) > 1
        self.rows = Span(0, layer.rows) if self.whole else parts[0]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        buffer: Any = self.cache.layers[layer]
        row = self.row
        buffer.widen(key, value)
        buffer.keys[:, :, row : row + 1] = key
        buffer.values[:, :, row : row + 1] = value
        return rows_of(buffer.keys, self.rows), rows_of(buffer.values, self.rows)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        mask = self.rectangles(query)[0].mask  # the only one, over all keys
        return self.attention(query, keys, values, mask, False, scale).transpose(1, 2)

    def _make_rectangles(self, like: Tensor) -> list[Rectangle]:
        if not self.whole:
            return super()._make_rectangles(like)
        positions = self.cache.sliding[0].row_positions(self.queries.stop)
        all_seen = self.rows.size == self.rule.window and self.rule.hidden(self.keys) is None
        mask = None if all_seen else self.rule.row_mask(self.queries.start, positions, like)
        return [Rectangle(Span(0, 1), Span(0, self.rows.size), mask)]

    def commit(self) -> None:
        for layer in self.cache.sliding:
            layer.advance(1)

    def shared(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held_keys, held_values = self.cache.sliding[-1].read(self.keys)  # the last sliding owner is the one that shares
        return held_keys.clone(), held_values.clone()


class FixedStep(DecodeStep):
    """One token over buffers that are attended whole: where to write and what to see are tensors, for any position.

    Nothing that :meth:`write` and :meth:`attend` read is a number that changes, so a compiled layer has one graph.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        super().__init__(cache, rule, queries, attention)
        layer = cache.sliding[0]
        self.index = torch.tensor([self.row]).to(layer.keys.device)
        self.mask = self._make_mask(layer)

    def _make_mask(self, layer: SlidingLayer) -> Tensor:
        """Which rows the token sees, ``[batch or 1, 1, 1, rows]``, for all layers alike."""
        return self.rule.row_mask(self.queries.start, layer.row_positions(self.queries.stop), layer.keys)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        buffer: Any = self.cache.layers[layer]
        index = self.index.to(key.device)
        return buffer.keys.index_copy_(2, index, key), buffer.values.index_copy_(2, index, value)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        mask = self.mask.to(device=query.device, dtype=query.dtype)
        return self.attention(query, keys, values, mask, False, scale).transpose(1, 2)


def rows_of(tensor: Tensor, rows: Span) -> Tensor:
    """A view of some rows of ``[batch, heads, rows, head_dim]``, or the tensor itself for all of them."""
    return tensor if rows == (0, tensor.shape[2]) else tensor[:, :, rows.start : rows.stop]
