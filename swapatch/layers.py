"""The sliding layers of a compact cache: keys and values in a bounded buffer, in one of two layouts.

A layer keeps rows of zeros that tokens are written into, and forgets what no query can see any more. What it returns
from ``update`` and shows of itself is what transformers' own sliding layer would, the dynamic or the static one: so
code that knows nothing of swapatch, an unpatched model included, can use it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from ._compat import CROPS_TO_LENGTH
from ._errors import CacheStateError, explain
from .geometry import ENDLESS, Span, anchored_rows, ceil64, doubled, past, ring_pieces, ring_rows, roll_origin


class Memory(NamedTuple):
    """How buffers are allocated on a kind of device.

    Attributes:
        zeros: ``(shape, dtype, device) -> Tensor``.
        shift: ``(buffer, by) -> Tensor``: row ``r`` takes over row ``r + by``, in place, and no row is filled with
            zeros ever, since filling a part of a buffer is dear there; None where rows move by way of a scratch buffer.
        laid_out: ``(rows) -> Tensor``: a buffer that holds these rows, laid out as ``zeros`` does it.
    """

    zeros: Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
    shift: Callable[[Tensor, int], Tensor] | None = None
    laid_out: Callable[[Tensor], Tensor] = torch.clone


def _plain_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


PLAIN = Memory(_plain_zeros)

MEMORY: dict[str, Memory] = {}
"""The kinds of device that want another :class:`Memory` than the plain one; a backend adds its own."""


def memory_of(like: Tensor) -> Memory:
    """How buffers are allocated where this tensor is."""
    return MEMORY.get(like.device.type, PLAIN)


class Move(NamedTuple):
    """Rows of a layer on their way to other places in the same buffers.

    Attributes:
        layer: whose rows they are.
        origin: the first position that its buffers will hold.
        kept: the positions that they hold already, and go on holding.
        keys, values: a copy of the rows at these, ``[batch, kv_heads, kept, head_dim]``.
    """

    layer: SlidingLayer
    origin: int
    kept: Span
    keys: Tensor
    values: Tensor


class Workspace:
    """What all layers of a cache share: tensors that stay where they are from step to step, and a move under way.

    Rows that move within their buffers are copied here first, by one layer at a time. An interrupt leaves a move half
    done; it is finished before anybody asks for the origin of a layer, without which no row is found.
    """

    def __init__(self) -> None:
        self.move: Move | None = None
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor to write into: the same one each time, until another shape or dtype is asked for."""
        tensor = self._tensors.get((name, device))
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            with torch.inference_mode(False):  # else it could not be written outside of it
                tensor = torch.empty(shape, dtype=dtype, device=device)
            self._tensors[name, device] = stays(tensor)
        return tensor

    def aside(self, name: str, rows: Tensor, most: int) -> Tensor:
        """A copy of some rows, ``[batch, kv_heads, rows, head_dim]``, in a scratch buffer for so many at most."""
        batch, heads, count, dim = rows.shape
        if not count:
            return rows
        return self.tensor(name, (batch, heads, most, dim), rows.dtype, rows.device)[:, :, :count].copy_(rows)

    def finish(self) -> None:
        """Finish the move under way, if there is one; being interrupted again does no harm."""
        if self.move is not None:
            layer, origin, kept, keys, values = self.move
            layer.lay(layer.key_rows, origin, kept, keys)
            layer.lay(layer.value_rows, origin, kept, values)
            layer._origin, self.move = origin, None


class SlidingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one sliding layer in a bounded buffer; subclasses say which row holds which position.

    The buffers ``key_rows`` and ``value_rows`` are ``[batch, kv_heads, rows, head_dim]``, zero where nothing was
    written. Positions from ``origin`` to ``seen`` are held. ``keys`` and ``values`` are what a reader is shown of them.

    A step that writes in place changes no integer here, which a compiled graph would read: it leaves itself in
    ``step``, and until :meth:`count` takes them over for good ``seen`` and ``origin`` are those after it.

    Args:
        window: number of keys a query sees, itself included.
        max_cache_len: tokens of a cache of fixed size, whose buffers are attended whole, so that all decode steps have
            one shape; None for one that grows.
        workspace: of the cache; None for a layer by itself.
    """

    is_sliding = True
    is_croppable = True
    key_rows: Any = None  # Tensor, or None before the first token
    value_rows: Any = None
    title: ClassVar[str]

    def __new__(cls, window: int | None = None, max_cache_len: int | None = None, *args: Any) -> SlidingLayer:
        """One of the two kinds of a layout: which is transformers' own dynamic or static layer to whoever asks."""
        return object.__new__(_KINDS.get((cls, max_cache_len is not None), cls))

    def __init__(self, window: int, max_cache_len: int | None = None, workspace: Workspace | None = None) -> None:
        self.workspace = workspace or Workspace()
        self._lent: list[Tensor | None] | None = None
        self.step: Any = None  # the last step that wrote in place, until the next one
        self._seen = self._recorded = self._origin = 0
        self.record_past = False
        CacheLayerMixin.__init__(self)
        self._lent = None  # the None that it has put there counts for nothing
        self.sliding_window = window
        self._sliding_window_tensor: Tensor | None = torch.tensor(window, dtype=torch.long)
        self.is_compileable = max_cache_len is not None
        # Rows that a reader finds at least, zeros behind those that were seen: none unless the cache is of fixed size.
        self.least = 0
        if max_cache_len is not None:
            self.least = self.max_cache_len = min(window, max_cache_len)

    def __repr__(self) -> str:
        return f"{self.title}(window={self.sliding_window}, rows={self.rows}, seen={self.seen})"

    def __copy__(self) -> SlidingLayer:
        """A layer with rows of its own, for they are written in place: stock's layers can share theirs."""
        self.workspace.finish()
        self.count()
        copy: SlidingLayer = object.__new__(type(self))
        copy.__dict__.update(self.__dict__, workspace=Workspace())
        if self.rows:
            laid_out = memory_of(self.key_rows).laid_out
            copy._adopt(map(laid_out, (self.key_rows, self.value_rows)))
        if self._lent is not None:
            copy._lent = [None if rows is None else rows.clone() for rows in self._lent]
        return copy

    # -- which row holds which position --

    @staticmethod
    @abstractmethod
    def base_rows(window: int) -> int:
        """Rows of the buffer while nothing is recorded."""

    @staticmethod
    @abstractmethod
    def place(positions: Span, origin: int, rows: int) -> list[Span]:
        """The rows of these positions, in time order, as few stretches as possible.

        In a buffer of so many rows that holds positions from ``origin`` on.
        """

    def pieces(self, positions: Span) -> list[Span]:
        """The rows of these positions in the buffer as it is."""
        return self.place(positions, self.origin, self.rows)

    @abstractmethod
    def first_held(self, stop: int, rows: int, keep: int) -> int:
        """The first position to hold when ``stop`` tokens have been seen, not after ``keep``."""

    # -- counting --

    @property
    def seen(self) -> int:
        """Tokens seen so far, with those that a step has written in place."""
        return self._seen if self.step is None else int(self.step.queries.stop)

    @seen.setter
    def seen(self, tokens: int) -> None:
        self.count()
        self._seen = tokens

    @property
    def origin(self) -> int:
        """The first position that is held; below 0 if the first rows stand for no token."""
        if self.workspace.move is not None:
            self.workspace.finish()
        return self._origin if self.step is None else int(self.step.origin)

    @origin.setter
    def origin(self, position: int) -> None:
        self.count()
        self._origin = position

    @property
    def recorded(self) -> int:
        """Tokens that a crop must be able to take back, so nothing they need is forgotten."""
        return self._recorded + (self.step.queries.size if self.record_past and self.step is not None else 0)

    @recorded.setter
    def recorded(self, tokens: int) -> None:
        self.count()
        self._recorded = tokens

    def count(self) -> None:
        """Count the rows that the last step wrote for good."""
        if self.step is not None:
            self._recorded, self._seen, self._origin, self.step = self.recorded, self.seen, self.origin, None

    def take_back(self, step: Any) -> None:
        """A step failed on its way through the model: the row that it may have written here never was."""
        if self.step is step:
            self.step = self._lent = None

    # -- storage --

    @property
    def rows(self) -> int:
        """Rows of the buffer, written or not; 0 before the first token."""
        return 0 if self.key_rows is None else int(self.key_rows.shape[2])

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for keys and values like these, ``[batch, kv_heads, any, head_dim]``."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows = self.base_rows(self.sliding_window)
        self._adopt(zeros_like_rows(states, rows) for states in (key_states, value_states))
        if self.least:
            self.batch_size = self.max_batch_size = key_states.shape[0]
        self.is_initialized = True

    def _adopt(self, buffers: Iterable[Tensor], origin: int | None = None) -> None:
        """Have these two from now on, and hold positions from ``origin`` on, or from where it was; all at once.

        In a cache of fixed size they stay where they are.
        """
        keys, values = map(stays, buffers) if self.least else buffers
        self.key_rows, self.value_rows, self._origin = keys, values, self._origin if origin is None else origin

    @property
    def _tied(self) -> bool:
        """Whether the rows are part of an older graph, for somebody to go backward through."""
        return bool(self.key_rows.requires_grad or self.value_rows.requires_grad)

    def make_room(self, tokens: int) -> None:
        """Make sure that ``tokens`` more rows can be written: forget what may go, grow only while recording."""
        if not torch.compiler.is_compiling():  # which cannot tell, and has this done before the graph
            self.leave_inference_mode()
        self.hold(*self.room(tokens))

    def room(self, tokens: int) -> tuple[int, int]:
        """The first position to hold, and rows of the buffer, so that ``tokens`` more rows can be written."""
        stop = self.seen + tokens
        takeback = self.recorded + tokens if self.record_past else 0
        keep = past(stop - takeback, self.sliding_window).start
        rows = self.rows
        origin = self.first_held(stop, rows, keep)
        if stop - origin > rows:
            rows = self.base_rows(self.sliding_window) + ceil64(takeback)
            origin = self.first_held(stop, rows, keep)
        return origin, rows

    def leave_inference_mode(self) -> None:
        """Buffers made in inference mode, by ``reorder_cache`` and its like, cannot be written outside: clone them."""
        if self.rows and self.key_rows.is_inference() and not torch.is_inference_mode_enabled():
            self._change(torch.clone)

    def widen(self, key: Tensor, value: Tensor) -> None:
        """Take over a wider dtype of new rows, as joining old and new ones would."""
        if key.dtype != self.key_rows.dtype or value.dtype != self.value_rows.dtype:
            pairs = (self.key_rows, key), (self.value_rows, value)
            self._adopt(rows.to(torch.promote_types(rows.dtype, new.dtype)) for rows, new in pairs)

    def hold(self, origin: int, rows: int) -> None:
        """Hold positions from ``origin`` on in ``rows`` rows, and count for good what is held."""
        self.count()
        if (origin, rows) != (self.origin, self.rows):
            self._hold(origin, rows)

    @abstractmethod
    def _hold(self, origin: int, rows: int) -> None:
        """Moves what is held if its rows change."""

    def _move(self, origin: int, rows: int) -> None:
        """Within the buffers, if they keep their size, else into fresh ones; nothing changes until these are complete.

        On a card within them in one step, which an interrupt may leave half done.
        """
        self.count()
        same = rows == self.rows
        if same and not self.seen:  # all of it is zero
            self._origin = origin
            return
        shift = memory_of(self.key_rows).shift
        if shift is not None and same:
            by = origin - self.origin
            self.key_rows, self.value_rows, self._origin = shift(self.key_rows, by), shift(self.value_rows, by), origin
            return
        kept = Span(max(origin, self.origin), max(origin, self.seen))  # asked for the origin: no move is under way
        held = self.read(kept)
        if same and not self._tied:
            work = self.workspace
            copies = work.aside("keys", held[0], rows), work.aside("values", held[1], rows)
            work.move = Move(self, origin, kept, *copies)  # from here on it is going to be finished
            work.finish()
            return
        moved = [zeros_like_rows(old, rows) for old in held]
        for new, old in zip(moved, held, strict=True):
            _write(new, self.place(kept, origin, rows), old)
        self._adopt(moved, origin)

    def lay(self, buffer: Tensor, origin: int, kept: Span, held: Tensor) -> None:
        """Make a buffer hold positions from ``origin`` on: what is kept, ``held`` in time order, and zeros."""
        rows = buffer.shape[2]
        _write(buffer, self.place(kept, origin, rows), held)
        for free in (Span(origin, kept.start), Span(kept.stop, origin + rows)):
            _write(buffer, self.place(free, origin, rows), 0.0)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put something else in the place of both buffers."""
        if not self.settle():
            self.keys, self.values = change(self.keys), change(self.values)
        elif self.rows:
            self.workspace.finish()
            changed = change(self.key_rows), change(self.value_rows)
            memory = memory_of(changed[0])
            self._adopt(changed if memory is PLAIN else map(memory.laid_out, changed))

    def read(self, positions: Span) -> tuple[Tensor, Tensor]:
        """Keys and values at these positions in time order, ``[batch, kv_heads, positions, head_dim]``.

        Views where the rows are one stretch.
        """
        keys, values = (
            [buffer[:, :, slice(*part)] for part in self.pieces(positions)]
            for buffer in (self.key_rows, self.value_rows)
        )
        return _join(keys), _join(values)

    def _fill(self, positions: Span, key: Tensor | float, value: Tensor | float) -> None:
        """Write the rows of these positions."""
        rows = self.pieces(positions)
        _write(self.key_rows, rows, key)
        _write(self.value_rows, rows, value)

    @property
    def visible_past(self) -> Span:
        """The positions that a next token can see."""
        return past(self.seen, self.sliding_window)

    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values that a next token can see, ``[batch, kv_heads, min(seen, W - 1), head_dim]``."""
        return self.read(self.visible_past)

    def write(self, key: Tensor, value: Tensor) -> None:
        """Append, and allocate the buffers first where there are none, or empty ones for another batch."""
        if not (self.seen or (alike(self.key_rows, key) and alike(self.value_rows, value))):
            self.lazy_initialization(key, value)
        self.append(key, value)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Write any number of tokens, ``[batch, kv_heads, tokens, head_dim]``; rows nobody can see are left out."""
        tokens = key.shape[2]
        self.widen(key, value)
        self.make_room(tokens)
        new = Span(max(self.seen, self.origin), self.seen + tokens)
        # With their graph, as stock keeps them: a later step may go backward through them.
        self._fill(new, key[:, :, tokens - new.size :], value[:, :, tokens - new.size :])
        self.seen += tokens
        if self.record_past:
            self.recorded += tokens

    # -- what a reader finds --

    @property
    def keys(self) -> Any:
        """Keys of the visible rows in time order, ``[batch, kv_heads, rows, head_dim]``; None before the first token.

        As transformers' own layers hold them: the last ``W - 1`` and those that are recorded; in a cache of fixed size
        the last ``W``, or all with zeros behind them. They are lent: what is written into them, or set in their place,
        counts from the next use of the layer on; then they are a copy like any other.
        """
        return self._lend()[0]

    @keys.setter
    def keys(self, rows: Tensor | None) -> None:
        self._lent = [rows, self._lend()[1]]

    @property
    def values(self) -> Any:
        """Values of the same rows, likewise."""
        return self._lend()[1]

    @values.setter
    def values(self, rows: Tensor | None) -> None:
        self._lent = [self._lend()[0], rows]

    @property
    def cumulative_length(self) -> int:
        """Tokens seen so far, under the name that transformers' own layers count them by."""
        return self.seen

    @cumulative_length.setter
    def cumulative_length(self, tokens: int) -> None:
        self.seen = int(tokens)

    @property
    def shown(self) -> Span:
        """The positions that a reader finds."""
        if self.least:
            return Span(max(self.seen - self.least, self.origin, 0), self.seen)
        return Span(past(self.seen - self.recorded, self.sliding_window).start, self.seen)

    def _lend(self) -> list[Tensor | None]:
        if self._lent is None:
            if not self.rows:
                return [None, None]
            with torch.inference_mode(False):  # who reads in that mode may go on outside of it
                self._lent = [_padded(rows, self.least).clone() for rows in self.read(self.shown)]
        return self._lent

    def settle(self) -> bool:
        """Take back what was lent, with what was written into it; says whether this is a bounded layer still.

        With another number of rows than was lent it goes on as transformers' own layer, which attends whatever there
        is as long as it needs no mask.
        """
        if self._lent is None:
            return True
        (keys, values), self._lent = self._lent, None
        if keys is None or values is None:
            self.key_rows = self.value_rows = None
            return True
        shown = self.shown
        if {keys.shape[2], values.shape[2]} != {max(shown.size, self.least)}:
            self._hand_over(keys, values)
            return False
        # They may be of another batch, dtype or device, and the count set to that of rows which lie elsewhere by now.
        placed = self.origin <= shown.start and shown.stop - self.origin <= self.rows
        tied = bool(self.rows) and self._tied
        if tied or not (placed and alike(self.key_rows, keys) and alike(self.value_rows, values)):
            rows = max(self.rows, self.base_rows(self.sliding_window), ceil64(shown.size))
            self._adopt(zeros_like_rows(lent, rows) for lent in (keys, values))
            self.origin = self.origin if placed else shown.start
        self._fill(shown, keys[:, :, : shown.size], values[:, :, : shown.size])
        return True

    def _hand_over(self, keys: Tensor, values: Tensor) -> None:
        if self.least:
            raise CacheStateError(
                explain(
                    f"{keys.shape[2]} rows of keys and {values.shape[2]} of values put into a {self}",
                    f"{self.least} of each, as in any cache of fixed size",
                    "call crop(-n) to take tokens back, update(...) to add some",
                )
            )
        window, seen, recording, slides = self.sliding_window, self.seen, self.record_past, self.is_sliding
        self.__dict__.clear()
        layer: Any = self
        layer.__class__ = DynamicSlidingWindowLayer if slides else DynamicLayer  # the same object: somebody may hold it
        layer.__init__(*([window] if slides else []))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if slides:
            layer.cumulative_length, layer.record_past = seen, recording

    # -- what transformers asks of a layer --

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return what the new tokens may see, in time order: ``[batch, kv_heads, past + new, head_dim]``.

        In a cache of fixed size at least as many rows as a reader finds, with zeros behind them.
        """
        if not self.settle():
            return self.update(key_states, value_states, *args, **kwargs)
        keys, values = key_states, value_states
        if self.seen:
            past_keys, past_values = self.past()
            keys, values = torch.cat([past_keys, keys], dim=2), torch.cat([past_values, values], dim=2)
        self.write(key_states, value_states)
        return _padded(keys, self.least), _padded(values, self.least)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that ``update`` will return for this many queries, and the position of the first."""
        seen = self.visible_past
        return max(seen.size + query_length, self.least), seen.start

    def get_seq_length(self) -> int:
        """Tokens seen so far, whatever number of rows is left of them."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, or the tokens of a fixed cache if they are fewer, as transformers' own sliding layers say."""
        return self.least or self.sliding_window

    def activate_past_recording(self) -> None:
        """From now on keep what ``crop`` needs to take tokens back, until the next ``crop``."""
        self.record_past = True

    @property
    def torn(self) -> bool:
        """Whether rows that the next token sees are gone: room was made for tokens that were never counted."""
        return self.visible_past.start < self.origin

    def crop_error(self, tokens: int) -> str | None:
        """Why the last ``tokens`` tokens cannot be taken back, or None when they can."""
        if self.seen >= self.sliding_window and not self.record_past:
            return f"{self.seen} tokens seen, past the window of {self.sliding_window}, and the past is not recorded"
        left = self.seen - tokens
        if left and past(left, self.sliding_window).start < self.origin:
            return f"the keys before position {self.origin} are gone, and position {left} needs them"
        return None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, all if it were fewer, and the rows that recording added.

        Args:
            tokens_to_remove: 0 or below. Where the installed transformers takes a positive number, it is that of the
                tokens to keep.

        Raises:
            ValueError: for a positive number with any other transformers.
            CacheStateError: when rows that would be visible again are gone.
        """
        if not self.settle():
            return self.crop(tokens_to_remove)
        tokens = to_remove([self], tokens_to_remove, self.seen)
        if not self.is_initialized:
            return None
        left = self.seen - tokens
        if memory_of(self.key_rows).shift is None:
            self._fill(Span(max(left, self.origin), self.seen), 0.0, 0.0)
        self.seen, self.recorded = left, 0
        if not left:
            self.origin = 0
        rows = self.base_rows(self.sliding_window)
        if self.rows > rows:
            self._move(max(self.origin, past(left, self.sliding_window).start), rows)
        return None

    def reset(self) -> None:
        """Forget everything: as good as new, for any batch size.

        In a cache of fixed size the buffers stay where they are, as stock's do.
        """
        self.workspace.finish()
        self._lent = None
        self.seen = self.origin = self.recorded = 0
        if self.least and self.rows and not self._tied and memory_of(self.key_rows).shift is None:
            self.leave_inference_mode()
            self.key_rows.zero_()
            self.value_rows.zero_()
        else:
            self.key_rows = self.value_rows = None
            self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put these sequences of the batch in the place of all."""
        self._change(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        self._change(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences of the batch."""
        self._change(lambda rows: rows[indices, ...])

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        self._change(lambda rows: rows.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the buffers back to where the model is."""
        self._change(lambda rows: rows.to(self.device, non_blocking=True))


class AnchoredLayer(SlidingLayer):
    """Rows in time order: row ``r`` holds position ``origin + r``.

    When the rows are full the buffer rolls: what is still visible moves 64 rows lower, within the same buffer.
    """

    title = "AnchoredLayer"

    @staticmethod
    def base_rows(window: int) -> int:
        return anchored_rows(window)

    @staticmethod
    def place(positions: Span, origin: int, rows: int) -> list[Span]:
        return [Span(positions.start - origin, positions.stop - origin)]

    def first_held(self, stop: int, rows: int, keep: int) -> int:
        return roll_origin(self.origin, stop, rows, keep)

    def _hold(self, origin: int, rows: int) -> None:
        self._move(origin, rows)


class RingLayer(SlidingLayer):
    """Rows in a ring: position ``p`` is in row ``p % rows``, where ``p - rows`` was before. Nothing is ever moved."""

    title = "RingLayer"

    @staticmethod
    def base_rows(window: int) -> int:
        return ring_rows(window)

    @staticmethod
    def place(positions: Span, origin: int, rows: int) -> list[Span]:
        return ring_pieces(positions, rows)

    def first_held(self, stop: int, rows: int, keep: int) -> int:
        return min(max(self.origin, stop - rows), keep)

    def _hold(self, origin: int, rows: int) -> None:
        if rows != self.rows:
            self._move(origin, rows)
        self.origin = origin


class GlobalLayer(AnchoredLayer):
    """A layer that forgets nothing: all positions in one buffer, row ``r`` for position ``r``.

    A window without an end, for a backend that computes global layers as well. The buffer has one of few sizes, and
    when it is full the next one.

    Args:
        max_cache_len: tokens of a cache of fixed size; None for one that grows.
        expected: tokens that there will be, so that the buffer need not grow on the way.
    """

    title = "GlobalLayer"
    is_sliding = False

    def __init__(self, max_cache_len: int | None, expected: int = 0) -> None:
        super().__init__(ENDLESS, max_cache_len)
        self.expected = expected
        self._sliding_window_tensor = None

    def get_max_length(self) -> int:
        """The tokens of a fixed cache; -1 without an end, as transformers' own layers say."""
        return self.least or -1

    @staticmethod
    def base_rows(window: int) -> int:
        return doubled(1)

    def room(self, tokens: int) -> tuple[int, int]:
        if self.least and self.seen + tokens > self.least:
            raise CacheStateError(
                explain(
                    f"{tokens} tokens behind {self.seen} in a cache for {self.least}",
                    "no more tokens than the cache was made for",
                    "make it with a larger max_cache_len",
                )
            )
        return 0, max(self.rows, doubled(max(self.seen + tokens, self.least, self.expected)))

    def _hold(self, origin: int, rows: int) -> None:
        held = self.key_rows, self.value_rows
        self._adopt(zeros_like_rows(old, rows) for old in held)
        for new, old in zip((self.key_rows, self.value_rows), held, strict=True):
            new.narrow(2, 0, old.shape[2]).copy_(old)  # whole: a copy of a new shape is a new program on a card

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens, all if it were fewer."""
        if not self.settle():
            return self.crop(tokens_to_remove)
        self.seen, self.recorded = self.seen - to_remove([self], tokens_to_remove, self.seen), 0
        return None


class DynamicAnchoredLayer(AnchoredLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """Of a cache that grows."""


class StaticAnchoredLayer(AnchoredLayer, StaticSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """Of a cache of fixed size."""


class DynamicRingLayer(RingLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """Of a cache that grows."""


class StaticRingLayer(RingLayer, StaticSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """Of a cache of fixed size."""


_KINDS: dict[tuple[type, bool], type[SlidingLayer]] = {
    (AnchoredLayer, False): DynamicAnchoredLayer,
    (AnchoredLayer, True): StaticAnchoredLayer,
    (RingLayer, False): DynamicRingLayer,
    (RingLayer, True): StaticRingLayer,
}

LAYOUTS: dict[str, type[SlidingLayer]] = {"anchored": AnchoredLayer, "ring": RingLayer}
"""How the rows of a sliding buffer are laid out."""


OURS = frozenset((*_KINDS.values(), GlobalLayer))


def make_room(layers: list[SlidingLayer], tokens: int) -> None:
    """The same for layers that have seen the same tokens, which then hold the same positions in the same rows."""
    origin, rows = layers[0].room(tokens)
    for layer in layers:
        layer.hold(origin, rows)


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that does not exist."""
    if layout not in tuple(LAYOUTS):  # of any type, also one that cannot be hashed
        raise ValueError(explain(f"layout={layout!r}", " or ".join(map(repr, LAYOUTS)), "pass one of these"))


def to_remove(layers: list[SlidingLayer], tokens_to_remove: int, seen: int) -> int:
    """How many of ``seen`` tokens ``crop(tokens_to_remove)`` takes back from these layers, all of which can do it.

    Raises:
        ValueError: for a positive number, where the installed transformers takes none.
        CacheStateError: when rows that would be visible again are gone.
    """
    asked = int(tokens_to_remove)  # assisted decoding counts in tensors
    if asked > 0 and not CROPS_TO_LENGTH:
        raise ValueError(explain(f"crop({asked})", "0 or a negative number", "call crop(-n) to take n tokens back"))
    tokens = max(seen - asked, 0) if asked > 0 else min(-asked, seen)
    for layer in layers:
        if layer.is_initialized and (reason := layer.crop_error(min(tokens, layer.seen))):
            raise CacheStateError(
                explain(
                    f"crop({asked}): {reason}",
                    "taking back tokens within the window, or those recorded since the last crop",
                    "call activate_past_recording() before the tokens that may be taken back",
                )
            )
    return tokens


def _write(buffer: Tensor, rows: list[Span], new: Tensor | float) -> None:
    """Put rows in time order, or one number, where they belong."""
    done = 0
    for part in rows:
        if isinstance(new, Tensor):
            buffer[:, :, slice(*part)] = new[:, :, done : done + part.size]
        else:
            buffer[:, :, slice(*part)].fill_(new)
        done += part.size


def _padded(rows: Tensor, least: int) -> Tensor:
    """The rows, and zeros behind them if they were fewer."""
    lacking = least - rows.shape[2]
    return torch.nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking > 0 else rows


def alike(buffer: Tensor | None, rows: Tensor) -> bool:
    """Whether these rows can be written into a buffer."""
    if buffer is None:
        return False
    batch, heads, _, dim = buffer.shape
    fits = (rows.shape[0], rows.shape[1], rows.shape[3]) == (batch, heads, dim)
    return fits and (buffer.dtype, buffer.device) == (rows.dtype, rows.device)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def zeros_like_rows(like: Tensor, rows: int) -> Tensor:
    """A buffer of zeros, ``[batch, heads, rows, head_dim]``, on the device of ``like`` and as that device wants it."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside of it
        return memory_of(like).zeros((batch, heads, rows, dim), like.dtype, like.device)


def stays(tensor: Tensor) -> Tensor:
    """The tensor, marked as one that stays where it is: a CUDA graph then uses it in place, as it does stock's."""
    if not torch.compiler.is_compiling():  # which cannot read the mark
        torch._dynamo.mark_static_address(tensor)
    return tensor
