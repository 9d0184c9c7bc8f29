"""One forward of the model, as its sliding layers see it: who sees whom, where rows go, how they are attended.

A :class:`Step` travels through the model in the place of the sliding mask. The forward of a sliding layer is replaced
by :func:`forward`, which does what the step says, or, without one, what it did before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._compat import cache_in
from ._errors import CacheStateError, explain
from .attention import window_attention
from .attention.windowed import Attend, attend, explicit, rows_of
from .families import Family
from .geometry import Span
from .layers import SlidingLayer
from .rules import Rule


class LayerCall(NamedTuple):
    """What a sliding layer is called with.

    Attributes:
        layer: the attention module.
        hidden: ``[batch, tokens, hidden]``.
        position: cosines and sines, ``[batch, tokens, head_dim]`` each.
        cache: the cache of the model's call, or None.
        shared: keys and values that layers share in this forward, by layer type, or None.
    """

    layer: Any
    hidden: Tensor
    position: tuple[Tensor, Tensor]
    cache: Any
    shared: Any

    @property
    def borrowed(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer that shares its own with this one."""
        keys, values = self.shared[self.layer.layer_type]
        return keys, values

    def share(self, keys: Tensor, values: Tensor) -> None:
        """Leave keys and values to the layers that share them, if there are any."""
        if self.shared is not None and self.layer.store_full_length_kv:
            self.shared[self.layer.layer_type] = keys, values


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replaces the forward of a sliding attention layer; without a step for a mask it is the class's own.

    Args:
        hidden_states: ``[batch, tokens, hidden]``.
        position_embeddings: cosines and sines, ``[batch, tokens, head_dim]`` each.
        attention_mask: the step that this forward is part of.

    Returns:
        ``[batch, tokens, hidden]``, and None in the place of attention weights.
    """
    if not isinstance(attention_mask, Step):
        stock: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, *args, **kwargs
        )
        return stock
    shared = kwargs.get("shared_kv_states")
    return attention_mask.run(LayerCall(self, hidden_states, position_embeddings, cache_in(kwargs), shared)), None


class MaskPose(ABC):
    """What transformers does with a mask on its way to the layers."""

    queries: Span

    def contiguous(self) -> MaskPose:
        """Itself: transformers asks every mask that was made ahead of a call to be contiguous."""
        return self

    def __getitem__(self, index: tuple[Any, Any, slice, Any]) -> MaskPose:
        """The step for its last queries, cut as the mask in whose place it stands, ``[:, :, queries]``.

        Gemma 4 drops queries that nobody needs before the layers that write nothing of their own.
        """
        start = index[2].start or 0
        return self.part(max(0, start + self.queries.size) if start < 0 else start)

    @abstractmethod
    def part(self, start: int) -> MaskPose:
        """The step without its first ``start`` queries."""


class Step(MaskPose):
    """Some new tokens, and how each sliding layer attends them.

    Args:
        family: projects.
        rule: says who sees whom.
        queries: positions of the new tokens.

    Attributes:
        lead: rows in front of the first token, which the text model is to compute with them, and nobody to see.
    """

    lead = 0

    # How to make the masks that stock would have made, where the step was begun before it was known what is wanted.
    stock_masks: Any = None

    def __init__(self, family: Family, rule: Rule, queries: Span) -> None:
        self.family = family
        self.rule = rule
        self.queries = queries

    @abstractmethod
    def run(self, call: LayerCall) -> Tensor:
        """The attention of one sliding layer, from its input to its output, ``[batch, tokens, hidden]``."""

    def time_order(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """For a caller who asked for the keys and values that layers shared: his own, oldest first."""
        return keys, values


class AttendingStep(Step):
    """A step whose projections are the layer's own: all that a subclass adds is what comes between them.

    Attributes:
        keys: positions of the rows that it expects.
    """

    keys: Span

    def run(self, call: LayerCall) -> Tensor:
        layer = call.layer
        query, key, value = self.family.project(layer, call.hidden, *call.position)
        out, keys, values = self.attend(call, query, key, value)
        call.share(keys, values)
        # [batch, tokens, heads, head_dim] -> [batch, tokens, hidden]
        result: Tensor = layer.o_proj(out.reshape(*call.hidden.shape[:2], -1))
        return result

    @abstractmethod
    def attend(
        self, call: LayerCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store the new rows and attend.

        Args:
            call: of the layer.
            query: ``[batch, heads, tokens, head_dim]``.
            key, value: ``[batch, kv_heads, tokens, head_dim]``; None where the layer shares another's.

        Returns:
            ``[batch, tokens, heads, head_dim]``, and the keys and values attended,
            ``[batch, kv_heads, rows, head_dim]``.
        """

    def attend_others(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend all of these rows, which somebody has added to those of the cache, or left of them.

        As transformers does where it makes no mask; where it makes one, that would not fit.
        """
        sdpa = call.layer.config._attn_implementation == "sdpa"
        masked = self.keys.size >= self.rule.window or self.rule.hidden(self.keys) is not None
        if not sdpa or masked or self.rule.types is not None or self.queries.size > 1:
            raise CacheStateError(
                explain(
                    f"{key.shape[2]} rows from {type(call.cache).__name__}.update",
                    f"{self.keys.size} rows, as its get_mask_sizes says",
                    "pass a cache whose two methods agree, or none",
                )
            )
        return attend(query, key, value, None, False, call.layer.scaling).transpose(1, 2)


class WindowStep(AttendingStep):
    """Any number of tokens over rows in time order: those of the call itself, behind what its cache returns.

    Args:
        family, rule, queries: as for :class:`Step`.
        keys: positions of the rows that the cache will return.
        kernel: one of :data:`swapatch.attention.KERNELS`.
        block: queries in one block, or None.
        traced: whether it began in the graph that the layers are part of. Else layers that are compiled by themselves
            leave their graphs to attend, so that all of them share these: a cache is asked by the layer's number.
    """

    def __init__(
        self,
        family: Family,
        rule: Rule,
        queries: Span,
        keys: Span,
        kernel: str,
        block: int | None,
        traced: bool = False,
    ) -> None:
        super().__init__(family, rule, queries)
        self.traced = traced
        self.keys = keys
        self.kernel = kernel
        self.block = block

    def part(self, start: int) -> WindowStep:
        queries = Span(self.queries.start + start, self.queries.stop)
        return WindowStep(self.family, self.rule, queries, self.keys, self.kernel, self.block, self.traced)

    def attend(
        self, call: LayerCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling() and not self.traced:
            return self._attend_outside(call, query, key, value)  # type: ignore[no-any-return]
        return self._attend(call, query, key, value)

    def _attend(
        self, call: LayerCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key is None or value is None:
            key, value = call.borrowed
        elif call.cache is not None:
            key, value = call.cache.update(key, value, call.layer.layer_idx)
        if call.cache is not None and key.shape[2] != self.keys.size:
            return self.attend_others(call, query, key, value), key, value
        out = window_attention(
            query,
            key,
            value,
            self.rule,
            self.queries,
            self.keys,
            call.layer.scaling,
            kernel=self.kernel,
            block=self.block,
        )
        return out, key, value

    _attend_outside = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]


class RowStep(AttendingStep):
    """One token: written in place into the buffers of a compact cache, which are attended as they lie.

    A layer counts the token as soon as it is written, and takes it back if the step fails on its way.

    Args:
        family, rule, queries: as for :class:`Step`.
        layer: one of the sliding layers, which are all alike; it has room for the token.
        kernel: computes one rectangle.
    """

    def __init__(self, family: Family, rule: Rule, queries: Span, layer: SlidingLayer, kernel: Attend) -> None:
        super().__init__(family, rule, queries)
        self.kernel = kernel
        self.origin = layer.origin  # stays what it is
        self.row = layer.pieces(queries)[0].start
        self.keys = rule.reach(queries)
        parts = layer.pieces(self.keys)
        # Visible rows in one stretch are cut out; those that wrap around the end of a ring are attended with the rest.
        self.rows = parts[0] if len(parts) == 1 else Span(0, layer.rows)
        self.parts = parts
        self._masks: dict[tuple[object, ...], Tensor | None] = {}

    def part(self, start: int) -> RowStep:
        return self  # nobody drops the only query

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # rows are numbers here
    def attend(
        self, call: LayerCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key is None or value is None:
            keys, values = call.borrowed
        else:
            keys, values = self._write(call, key, value)
        if keys.shape[2] != self.rows.size:
            return self.attend_others(call, query, keys, values), keys, values
        out = self.kernel(query, keys, values, self._mask(query), False, call.layer.scaling)
        return out.transpose(1, 2), keys, values

    def _write(self, call: LayerCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The rows to attend, the new one among them."""
        buffer, row = call.cache.layers[call.layer.layer_idx], self.row
        if not buffer.settle():
            return call.cache.update(key, value, call.layer.layer_idx)  # type: ignore[no-any-return]
        buffer.step = self
        buffer.widen(key, value)
        buffer.key_rows[:, :, row : row + 1] = key
        buffer.value_rows[:, :, row : row + 1] = value
        return rows_of(buffer.key_rows, self.rows), rows_of(buffer.value_rows, self.rows)

    def _mask(self, like: Tensor) -> Tensor | None:
        """Which of the rows the token sees, made at the first layer for all of its dtype and device."""
        name = (like.dtype, like.device)
        if name not in self._masks:
            self._masks[name] = self._make_mask(like)
        return self._masks[name]

    def _make_mask(self, like: Tensor) -> Tensor | None:
        if len(self.parts) == 1:
            all_seen = self.rule.hidden(self.keys) is None
            mask = None if all_seen else self.rule.additive(self.queries, self.keys, like)
            return explicit(mask, like, self.rows.size, self.rule)
        if self.rows.size == self.rule.window and self.rule.hidden(self.keys) is None:
            return explicit(None, like, self.rows.size, self.rule)
        return self.rule.row_mask(self.keys, self.parts, self.rows.size, like)

    def time_order(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held_keys, held_values = cache.sliding[-1].read(self.keys)  # the last sliding owner is the one that shares
        return held_keys.clone(), held_values.clone()


class FixedRowStep(RowStep):
    """One token over buffers that are attended whole: where to write and what to see are tensors, for any position.

    Nothing that :meth:`attend` reads is a number that changes, so a compiled layer has one graph. The tensors are the
    same from step to step, where a CUDA graph looks for them, so they are those of the step that began last.

    Attributes:
        index: the row to write, ``[1]``.
        mask: which rows the token sees, additive, ``[batch or 1, 1, 1, rows]``.
    """

    def __init__(self, family: Family, rule: Rule, queries: Span, layer: SlidingLayer, kernel: Attend) -> None:
        super().__init__(family, rule, queries, layer, kernel)
        self.index, self.mask = self._tensors(layer)
        # Its position as a tensor, [1, 1], for a graph that would count it in a number otherwise.
        self.place: Tensor | None = None

    def _tensors(self, layer: SlidingLayer) -> tuple[Tensor, Tensor]:
        """Index and mask, for all layers alike."""
        like, tensor = layer.key_rows, layer.workspace.tensor
        allowed = self.rule.rows_allowed(self.keys, self.parts, layer.rows, like.device)
        mask = tensor("mask", allowed.shape, like.dtype, like.device).fill_(-torch.inf).masked_fill_(allowed, 0.0)
        return tensor("index", (1,), torch.long, like.device).fill_(self.row), mask

    def attend(
        self, call: LayerCall, query: Tensor, key: Tensor | None, value: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if key is None or value is None:
            keys, values = call.borrowed
        else:
            buffer = call.cache.layers[call.layer.layer_idx]
            buffer.settle()
            buffer.step = self
            index = self.index.to(key.device)
            keys, values = buffer.key_rows.index_copy_(2, index, key), buffer.value_rows.index_copy_(2, index, value)
        mask = self.mask.to(device=query.device, dtype=query.dtype)
        return self.kernel(query, keys, values, mask, False, call.layer.scaling).transpose(1, 2), keys, values
