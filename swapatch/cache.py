"""The compact cache: an ordinary transformers ``Cache`` whose sliding layers hold a bounded buffer.

Global layers are transformers' own. A sliding layer keeps rows of zeros that tokens are written into, and forgets what
no query can see any more. What it returns from ``update`` and says of itself is what transformers' own
``DynamicSlidingWindowLayer`` would: so code that knows nothing of swapatch, an unpatched model included, can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from ._compat import reset_layer
from ._errors import CacheStateError, UnsupportedModelError, explain
from .attention import spyre
from .geometry import Span, anchored_rows, ceil64, past, ring_pieces, ring_rows, roll_origin
from .plan import ModelPlan, plan_model, text_config


class SlidingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one sliding layer in a bounded buffer; subclasses say which row holds which position.

    ``keys`` and ``values`` are ``[batch, kv_heads, rows, head_dim]``, zero where nothing was written. Positions from
    ``origin`` to ``seen`` are held.

    Args:
        window: number of keys a query sees, itself included.
        fixed: whether the buffer is always attended whole, so that all decode steps have one shape.
    """

    is_sliding = True
    is_croppable = True
    keys: Any  # Tensor, or None before the first token
    values: Any

    def __init__(self, window: int, fixed: bool = False) -> None:
        super().__init__()
        self.sliding_window = window
        self._sliding_window_tensor = torch.tensor(window, dtype=torch.long)
        self.is_compileable = fixed
        self.seen = 0
        self.origin = 0
        # `recorded` counts the tokens that a crop must be able to take back, so nothing they need is forgotten.
        self.record_past = False
        self.recorded = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(window={self.sliding_window}, rows={self.rows}, seen={self.seen})"

    # -- which row holds which position --

    @staticmethod
    def base_rows(window: int) -> int:
        """Rows of the buffer while nothing is recorded."""
        raise NotImplementedError

    def pieces(self, positions: Span) -> list[Span]:
        """The rows of these positions, in time order, as few stretches as possible."""
        raise NotImplementedError

    def row_positions(self, stop: int) -> Tensor:
        """The position that each row holds once ``stop`` tokens were seen, ``[rows]``; not in 0 to stop if none."""
        raise NotImplementedError

    def first_held(self, stop: int, rows: int, keep: int) -> int:
        """The first position to hold when ``stop`` tokens have been seen, not after ``keep``."""
        raise NotImplementedError

    # -- storage --

    @property
    def rows(self) -> int:
        """Rows of the buffer, written or not; 0 before the first token."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for keys and values like these, ``[batch, kv_heads, any, head_dim]``."""
        self.device = key_states.device
        rows = self.base_rows(self.sliding_window)
        self.keys, self.values = _zeros(key_states, rows), _zeros(value_states, rows)
        self.is_initialized = True

    def make_room(self, tokens: int) -> None:
        """Make sure that ``tokens`` more rows can be written: forget what may go, grow only while recording."""
        self._leave_inference_mode()
        stop = self.seen + tokens
        takeback = self.recorded + tokens if self.record_past else 0
        keep = past(stop - takeback, self.sliding_window).start
        rows = self.rows
        origin = self.first_held(stop, rows, keep)
        if stop - origin > rows:
            rows = self.base_rows(self.sliding_window) + ceil64(takeback)
            origin = self.first_held(stop, rows, keep)
        self._hold(origin, rows)

    def _leave_inference_mode(self) -> None:
        """Buffers that a verb or a copy made in inference mode cannot be written outside of it: clone them there."""
        if self.keys is not None and self.keys.is_inference() and not torch.is_inference_mode_enabled():
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def widen(self, key: Tensor, value: Tensor) -> None:
        """Take over a wider dtype of new rows, as joining old and new ones would."""
        if key.dtype != self.keys.dtype or value.dtype != self.values.dtype:
            self.keys = self.keys.to(torch.promote_types(self.keys.dtype, key.dtype))
            self.values = self.values.to(torch.promote_types(self.values.dtype, value.dtype))

    def _hold(self, origin: int, rows: int) -> None:
        """Hold positions from ``origin`` on in ``rows`` rows; moves what is held if its rows change."""
        raise NotImplementedError

    def _move(self, origin: int, rows: int) -> None:
        """Into fresh buffers, for one cannot shift into itself in one copy; nothing changes until they are complete."""
        kept = Span(max(origin, self.origin), max(origin, self.seen))
        moved = copy(self)
        moved.origin = origin
        moved.keys, moved.values = (_fresh(old, rows) for old in (self.keys, self.values))
        moved._fill(kept, *self.read(kept))
        if not _born_zero(self.keys):
            moved._fill(Span(kept.stop, origin + rows), 0.0, 0.0)
        self.keys, self.values, self.origin = moved.keys, moved.values, origin

    def read(self, positions: Span) -> tuple[Tensor, Tensor]:
        """Keys and values at these positions in time order, ``[batch, kv_heads, positions, head_dim]``.

        Views where the rows are one stretch.
        """
        keys, values = (
            [buffer[:, :, slice(*part)] for part in self.pieces(positions)] for buffer in (self.keys, self.values)
        )
        return _join(keys), _join(values)

    def _fill(self, positions: Span, key: Tensor | float, value: Tensor | float) -> None:
        """Write the rows of these positions."""
        done = 0
        for part in self.pieces(positions):
            for buffer, new in ((self.keys, key), (self.values, value)):
                rows = new[:, :, done : done + part.size] if isinstance(new, Tensor) else new
                buffer[:, :, slice(*part)] = rows
            done += part.size

    @property
    def visible_past(self) -> Span:
        """The positions that a next token can see."""
        return past(self.seen, self.sliding_window)

    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values that a next token can see, ``[batch, kv_heads, min(seen, W - 1), head_dim]``."""
        return self.read(self.visible_past)

    def past_in(self, rows: int) -> tuple[Tensor, Tensor]:
        """The same at the end of this many rows, behind zeros; by copies that stay on the device."""
        seen, found = self.visible_past, []
        for buffer in (self.keys, self.values):
            first, whole = rows - seen.size, _zeros(buffer, rows)
            for part in self.pieces(seen):
                whole.narrow(2, first, part.size).copy_(buffer.narrow(2, part.start, part.size))
                first += part.size
            found.append(whole)
        return found[0], found[1]

    def write(self, key: Tensor, value: Tensor) -> None:
        """Append, and allocate the buffers first where there are none."""
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        self.append(key, value)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write any number of tokens, ``[batch, kv_heads, tokens, head_dim]``; rows nobody can see are left out."""
        tokens = key.shape[2]
        self.widen(key, value)
        self.make_room(tokens)
        new = Span(max(self.seen, self.origin), self.seen + tokens)
        # Detached: a cached row must not keep the graph of the forward that made it.
        self._fill(new, key[:, :, tokens - new.size :].detach(), value[:, :, tokens - new.size :].detach())
        self.advance(tokens)

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows have been written."""
        self.seen += tokens
        if self.record_past:
            self.recorded += tokens

    # -- what transformers asks of a layer --

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return what the new tokens may see, in time order: ``[batch, kv_heads, past + new, head_dim]``."""
        keys, values = key_states, value_states
        if self.seen:
            past_keys, past_values = self.past()
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
        self.write(key_states, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that ``update`` will return for this many queries, and the position of the first."""
        seen = self.visible_past
        return seen.size + query_length, seen.start

    def get_seq_length(self) -> int:
        """Tokens seen so far, whatever number of rows is left of them."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, as transformers' own sliding layers say."""
        return self.sliding_window

    def activate_past_recording(self) -> None:
        """From now on keep what ``crop`` needs to take tokens back, until the next ``crop``."""
        self.record_past = True

    @property
    def torn(self) -> bool:
        """Whether rows that the next token sees are gone: room was made for tokens that were never counted."""
        return self.visible_past.start < self.origin

    def crop_error(self, tokens: int) -> str | None:
        """Why the last ``tokens`` tokens cannot be taken back, or None when they can."""
        if tokens > self.seen:
            return f"{self.seen} tokens seen, {tokens} to remove"
        if self.seen >= self.sliding_window and not self.record_past:
            return f"{self.seen} tokens seen, past the window of {self.sliding_window}, and the past is not recorded"
        left = self.seen - tokens
        if past(left, self.sliding_window).start < self.origin:
            return f"the keys before position {self.origin} are gone, and position {left} needs them"
        return None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, and the rows that recording added.

        Raises:
            ValueError: for a positive number.
            CacheStateError: when rows that would be visible again are gone.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts in tensors
        check_crop([self], tokens_to_remove)
        if not self.is_initialized:
            return
        left = self.seen + tokens_to_remove
        self._fill(Span(max(left, self.origin), self.seen), 0.0, 0.0)
        self.seen, self.recorded = left, 0
        rows = self.base_rows(self.sliding_window)
        if self.rows > rows:
            self._move(max(self.origin, past(left, self.sliding_window).start), rows)

    def reset(self) -> None:
        """Forget everything: as good as new, for any batch size."""
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = self.origin = self.recorded = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        if self.is_initialized:
            self.keys, self.values = self.keys[indices, ...], self.values[indices, ...]


class AnchoredLayer(SlidingLayer):
    """Rows in time order: row ``r`` holds position ``origin + r``.

    When the rows are full the buffer rolls: a fresh one takes over what is still visible, 64 rows lower.
    """

    @staticmethod
    def base_rows(window: int) -> int:
        return anchored_rows(window)

    def pieces(self, positions: Span) -> list[Span]:
        return [Span(positions.start - self.origin, positions.stop - self.origin)]

    def row_positions(self, stop: int) -> Tensor:
        return torch.arange(self.origin, self.origin + self.rows)

    def first_held(self, stop: int, rows: int, keep: int) -> int:
        return roll_origin(self.origin, stop, rows, keep)

    def _hold(self, origin: int, rows: int) -> None:
        if origin != self.origin or rows != self.rows:
            self._move(origin, rows)


class RingLayer(SlidingLayer):
    """Rows in a ring: position ``p`` is in row ``p % rows``, where ``p - rows`` was before. Nothing is ever moved."""

    @staticmethod
    def base_rows(window: int) -> int:
        return ring_rows(window)

    def pieces(self, positions: Span) -> list[Span]:
        return ring_pieces(positions, self.rows)

    def row_positions(self, stop: int) -> Tensor:
        last = stop - 1
        return last - (last - torch.arange(self.rows)) % self.rows

    def first_held(self, stop: int, rows: int, keep: int) -> int:
        return min(max(self.origin, stop - rows), keep)

    def _hold(self, origin: int, rows: int) -> None:
        if rows != self.rows:
            self._move(origin, rows)
        self.origin = origin


LAYOUTS: dict[str, type[SlidingLayer]] = {"anchored": AnchoredLayer, "ring": RingLayer}
"""How the rows of a sliding buffer are laid out."""


class CompactCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A transformers ``Cache`` for a Gemma 3 or Gemma 4 model, with bounded buffers on its sliding layers.

    A patched model makes one by itself. By hand it is used like any other cache, and holds all state there is: two
    conversations with a cache each can take turns on one model.

    Args:
        model_or_config: the model, patched or not, or its config.
        max_cache_len: with it the global layers are static, of this many tokens.
        layout: how the sliding buffers are laid out: ``"anchored"`` (time order, rolled every 64 tokens) or ``"ring"``.

    Raises:
        UnsupportedModelError: for a model or config that swapatch does not know.
        ValueError: for an unknown layout, or a ``max_cache_len`` below 1.

    >>> cache = CompactCache(model)
    >>> for step in range(3):
    ...     keys, values = cache.update(torch.ones(1, 2, 100, 16), torch.ones(1, 2, 100, 16), layer_idx=0)
    >>> keys.shape  # 63 old rows and the new ones
    torch.Size([1, 2, 163, 16])
    >>> cache.layers[0]
    AnchoredLayer(window=64, rows=128, seen=300)
    """

    def __init__(self, model_or_config: Any, *, max_cache_len: int | None = None, layout: str = "anchored") -> None:
        check_layout(layout)
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            found = f"max_cache_len={max_cache_len!r}"
            raise ValueError(explain(found, "a number of tokens, or None", "pass 1 or more"))
        self.plan: ModelPlan = plan_model(model_or_config)
        self.layout = layout
        self.fixed = max_cache_len is not None
        config = text_config(model_or_config)
        stock = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
        super().__init__(layers=stock.layers)
        for index in self.plan.owners:
            self.layers[index] = LAYOUTS[layout](self.plan.window, fixed=self.fixed)
        # The tokens seen when a forward began, until it ends: one that was interrupted leaves it behind.
        self.begun: int | None = None

    @property
    def sliding(self) -> list[SlidingLayer]:
        """The layers with a bounded buffer."""
        return [cast(SlidingLayer, self.layers[index]) for index in self.plan.owners]

    def lengths(self) -> list[int]:
        """How many tokens the layers have seen, each number once; more than one only after an interrupted forward.

        The global layers are asked only if there was one: static ones count on the device, and asking means waiting.
        """
        seen = {layer.seen for layer in self.sliding}
        if self.begun is not None:
            own = [self.layers[layer.index] for layer in self.plan.layers if not layer.shared]
            seen |= {self.begun, *(int(layer.get_seq_length()) for layer in own)}
        return sorted(seen)

    def reset(self) -> None:
        """Forget everything: as good as new."""
        for layer in self.layers:
            reset_layer(layer)
        self.begun = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens on every layer, or raise and leave every layer as it is.

        Raises:
            ValueError: for a positive number.
            CacheStateError: when a sliding layer has evicted rows that would be visible again.
        """
        check_crop(self.sliding, tokens_to_remove)
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch; refused with static global layers, which have no such verb."""
        self._check_batch_verb("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch; refused with static global layers, which have no such verb."""
        self._check_batch_verb("batch_select_indices")
        super().batch_select_indices(indices)

    def _check_batch_verb(self, name: str) -> None:
        if self.fixed:
            do = "make the cache for the batch that is wanted"
            raise CacheStateError(explain(f"{name} with max_cache_len", "a cache without max_cache_len", do))

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Per layer keys, values and window, rows in time order, as iterating over a ``DynamicCache`` gives them."""
        for layer in self.layers:
            if isinstance(layer, SlidingLayer) and layer.is_initialized:
                yield *layer.past(), layer._sliding_window_tensor
            else:
                yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)


def make_cache(config: Any, **options: Any) -> CompactCache | None:
    """A compact cache, or None when the config has no sliding layer by now, as while a model drafts with few layers."""
    try:
        return CompactCache(config, **options)
    except UnsupportedModelError:
        return None


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that does not exist."""
    if layout not in tuple(LAYOUTS):  # of any type, also one that cannot be hashed
        raise ValueError(explain(f"layout={layout!r}", " or ".join(map(repr, LAYOUTS)), "pass one of these"))


def check_crop(layers: list[SlidingLayer], tokens_to_remove: int) -> None:
    """Raise unless every layer can take these tokens back."""
    if tokens_to_remove > 0:
        raise ValueError(
            explain(f"crop({tokens_to_remove})", "0 or a negative number", "call crop(-n) to take n tokens back")
        )
    for layer in layers:
        if layer.is_initialized and (reason := layer.crop_error(-tokens_to_remove)):
            raise CacheStateError(
                explain(
                    f"crop({tokens_to_remove}): {reason}",
                    "taking back tokens within the window, or those recorded since the last crop",
                    "call activate_past_recording() before the tokens that may be taken back",
                )
            )


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _zeros(like: Tensor, rows: int) -> Tensor:
    return _allocate(spyre.zeros, like, rows)


def _fresh(like: Tensor, rows: int) -> Tensor:
    return _zeros(like, rows) if _born_zero(like) else _allocate(_empty, like, rows)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _allocate(make: Callable[..., Tensor], like: Tensor, rows: int) -> Tensor:
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
        return make((batch, heads, rows, dim), like.dtype, like.device)


def _born_zero(like: Tensor) -> bool:
    """Whether zeros come with the allocation, as on a card, where filling some rows would go through the host."""
    return like.device.type == spyre.DEVICE
