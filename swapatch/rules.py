"""Who sees whom on a sliding layer, answered for one rectangle of queries and keys at a time.

A rule is tensors and integers, nothing else: it knows neither where the keys are stored nor how they are attended. A
mask over a whole prompt would be ``L x L``. Nobody here builds one: the attention asks for each block of queries and
the few keys it can reach, a decode step for one query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .geometry import ALIGN, ENDLESS, Span, query_blocks, visible
from .masks import image_rectangle
from .plan import GLOBAL, SLIDING


class Rectangle(NamedTuple):
    """Some queries and the keys they look at, both counted from the first of those given to the attention.

    Attributes:
        queries: rows of the query tensor.
        keys: rows of the key tensor.
        mask: additive, ``[batch or 1, 1, queries, some]``, in the query's dtype, over the last keys: those before them
            are all seen. None hides nothing.
        causal: used instead of a mask: the last query sees all keys, each one before it one key less.
        sequences: of the batch; None for all of them.
    """

    queries: Span
    keys: Span
    mask: Tensor | None = None
    causal: bool = False
    sequences: Span | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the sequences that the rectangle is about."""
        return tensor if self.sequences is None else tensor[slice(*self.sequences)]

    def is_further(self, first: Rectangle, times: int) -> bool:
        """Whether all is as in the first one, as many blocks further down."""
        by = -times * first.queries.size
        place = _shift(first.queries, by), _shift(first.keys, by), first.sequences
        same = self.mask is first.mask and not (self.causal or first.causal)
        return same and (self.queries, self.keys, self.sequences) == place

    def blocks(self, size: int, like: Tensor) -> Iterator[Rectangle]:
        """The same by rectangles of at most ``size`` queries that need a mask, none of them larger than a square."""
        if not self.causal:
            yield self
            return
        first = self.keys.stop - self.queries.size  # the key that the first query sees as its last
        for part in query_blocks(self.queries, size):
            mask = _additive_band(0, part.size, part.size, ENDLESS, like.dtype, like.device)
            stop = first + part.stop - self.queries.start
            yield Rectangle(part, Span(self.keys.start, stop), mask, sequences=self.sequences)


class Rule:
    """The rule of text: ``0 <= query - key < window``, and never a key that the 2D mask hides.

    Args:
        window: keys that a query sees, itself included; :data:`ENDLESS` on a global layer.
        padding: the 2D attention mask, ``[batch, positions]``, nonzero where a token counts; keys past its end are
            hidden, as transformers pads it. None when every token counts.
        segments: which of several packed sequences a token belongs to, ``[batch, positions]``; a token sees its own
            only. None, or one number in each row, when nothing is packed.
    """

    images = ""
    types: Tensor | None = None

    def __init__(self, window: int, padding: Tensor | None = None, segments: Tensor | None = None) -> None:
        self.window = window
        self.padding = padding
        self.segments = segments
        self._looks: dict[object, Any] = {}  # what was found in the tensors, which means waiting for a device
        self._rectangles: dict[tuple[object, ...], list[Rectangle]] = {}  # all layers of a call ask the same

    def endless(self) -> Rule:
        """The same rule without a window, for global layers; it looks no second time into the same tensors."""
        rule = rule_of(ENDLESS, self.padding, self.segments, self.images, self.types)
        rule._looks = self._looks
        return rule

    def reach(self, queries: Span) -> Span:
        """The range of keys that these queries can see at all."""
        return Span(visible(queries.start, self.window).start, queries.stop)

    def hidden(self, keys: Span) -> Tensor | None:
        """Which of these keys the 2D mask hides, ``[batch, keys]`` bool; None when it hides none of them."""
        if self.padding is None or all(run and _within(keys, run) for run in self._tokens):
            return None
        shown = _shown(self.padding, keys)
        if None in self._tokens and self._look(keys, lambda: bool(shown.all())):
            return None
        return ~shown

    def allowed(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        """Bool ``[batch or 1, 1, queries, keys]``: True where the query sees the key."""
        seen = _band(queries.start - keys.start, queries.size, keys.size, self.window, device)
        if (hidden := self.hidden(keys)) is not None:
            seen = seen & ~hidden.to(device)[:, None, None]
        if (packed := self._packed) is not None:
            parts = [packed[:, span.start : span.stop].to(device) for span in (queries, keys)]
            seen = seen & (parts[0][:, None, :, None] == parts[1][:, None, None])
        return seen

    def additive(self, queries: Span, keys: Span, like: Tensor) -> Tensor | None:
        """The mask of a rectangle: 0 where seen, -inf elsewhere, in the dtype and on the device of ``like``.

        None where the numbers alone say that all of it is seen. Rectangles that are only shifted against each other
        share one tensor.
        """
        if self.shifts_alike(queries, keys):
            return self._band(queries, keys, like)
        return _filled(self.allowed(queries, keys, like.device), like.dtype)

    def _band(self, queries: Span, keys: Span, like: Tensor) -> Tensor | None:
        offset = queries.start - keys.start
        if offset >= keys.size - 1 and queries.stop - keys.start <= self.window:
            return None  # one query, or keys that all of them have behind them
        if self.window == ENDLESS:  # each block of a size of its own
            return _filled(_band(offset, queries.size, keys.size, self.window, like.device), like.dtype)
        return _additive_band(offset, queries.size, keys.size, self.window, like.dtype, like.device)

    def rows_allowed(self, keys: Span, rows: list[Span], size: int, device: torch.device) -> Tensor:
        """Which rows of a buffer one token sees, bool ``[batch or 1, 1, 1, size]``; never a look into a tensor.

        Args:
            keys: the positions that it reaches, its own the last.
            rows: where they lie, in this order.
            size: rows of the buffer.
            device: where the mask is wanted.
        """
        shown = None if self.padding is None else _shown(self.padding, keys).to(device)
        allowed = torch.zeros((1 if shown is None else shown.shape[0], 1, 1, size), dtype=torch.bool, device=device)
        done = 0
        for part in rows:
            if shown is None:
                allowed[..., part.start : part.stop].fill_(True)
            else:
                allowed[..., part.start : part.stop] = shown[:, None, None, done : done + part.size]
            done += part.size
        return allowed

    def row_mask(self, keys: Span, rows: list[Span], size: int, like: Tensor) -> Tensor:
        """The same as an additive mask in the dtype and on the device of ``like``."""
        return _filled(self.rows_allowed(keys, rows, size, like.device), like.dtype)

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        """Whether this rectangle looks like any other of its size, shifted along the diagonal."""
        return self._packed is None and self.hidden(keys) is None

    @property
    def tensors(self) -> list[Tensor]:
        """All that it is made of but numbers."""
        return [tensor for tensor in (self.padding, self.segments, self.types) if tensor is not None]

    def is_plain(self, queries: Span, keys: Span) -> bool:
        """Whether nothing is left to a mask, without a window: a causal square, or one query that sees all."""
        alike = queries == keys or (queries.size == 1 and queries.stop == keys.stop)
        return alike and self.shifts_alike(queries, keys)

    def rectangles(self, queries: Span, keys: Span, like: Tensor, block: int) -> Iterable[Rectangle]:
        """Cover these queries, over the keys at hand; those that are left out see nothing.

        Each sequence is causal over its own tokens. What that does not say, for the window ends before, is cut into
        rectangles of at most ``block`` queries.
        """
        cover = self._cover(queries, Span(keys.start, min(keys.stop, queries.stop)), like, block)
        if self._is_much(queries, block):
            return cover
        name = (queries, keys, like.dtype, like.device, block)
        if name not in self._rectangles:
            self._rectangles[name] = list(cover)
        return self._rectangles[name]

    def _is_much(self, queries: Span, block: int) -> bool:
        """Whether the masks of all blocks together would be as large as one over everything, so that none is kept."""
        return self.window == ENDLESS and queries.size > block and None in self._tokens

    def _cover(self, queries: Span, keys: Span, like: Tensor, block: int) -> Iterator[Rectangle]:
        if queries.size <= block and not self._is_causal(queries, keys):
            yield from self._masked(None, queries, keys, like, block)
            return
        for sequences, runs in self._runs_alike:
            if runs is None:
                yield from self._masked(sequences, queries, keys, like, block)
            for run in runs or ():
                part = Span(max(queries.start, run.start), queries.stop)
                if self._packed is not None:
                    part = _overlap(part, run)
                if part.size > 0:
                    yield from self._causal(sequences, part, _overlap(keys, run), queries, keys, like, block)

    def _causal(
        self, sequences: Span | None, part: Span, run: Span, queries: Span, keys: Span, like: Tensor, block: int
    ) -> Iterator[Rectangle]:
        """The rectangles of ``part``, of a run of keys that hides none; further queries come behind it."""
        own = Span(part.start, max(part.start, min(part.stop, run.stop)))
        first = max(run.start, visible(own.start, self.window).start)
        if own.size and own.stop - first < self.window:
            whole = _shift(own, queries.start), _shift(Span(first, own.stop), keys.start)
            yield Rectangle(*whole, causal=own.size > 1, sequences=sequences)
            part = Span(own.stop, part.stop)
        size = max(block, part.size) if self.window == ENDLESS else block  # the rest of them see all there is
        align = max(1, min(ALIGN, self.window // 8))  # a kernel is some percent faster over a round number of keys
        for some in query_blocks(part, size):
            reach = _overlap(run, self.reach(some))
            reach = Span(max(run.start, keys.start + (reach.start - keys.start) // align * align), reach.stop)
            if reach.size > 0:
                mask = self._band(some, reach, like)
                yield Rectangle(_shift(some, queries.start), _shift(reach, keys.start), mask, sequences=sequences)

    def _masked(
        self, sequences: Span | None, queries: Span, keys: Span, like: Tensor, block: int
    ) -> Iterator[Rectangle]:
        """Rectangles with a mask of their own."""
        for part in query_blocks(queries, block):
            reach = _overlap(keys, self.reach(part))
            mask = self.additive(part, reach, like)
            if mask is not None and sequences is not None and mask.shape[0] > 1:
                mask = mask[sequences.start : sequences.stop]
            yield Rectangle(_shift(part, queries.start), _shift(reach, keys.start), mask, sequences=sequences)

    def _is_causal(self, queries: Span, keys: Span) -> bool:
        """Whether nothing but the order of these tokens counts."""
        first = max(keys.start, visible(queries.start, self.window).start)
        return queries.stop - first < self.window and self.shifts_alike(queries, Span(first, queries.stop))

    @property
    def _packed(self) -> Tensor | None:
        if self.segments is None:
            return None
        segments = self.segments
        return segments if self._look("packed", lambda: bool((segments != 0).any())) else None

    @property
    def _tokens(self) -> list[Span | None]:
        """The tokens of each sequence that the 2D mask shows; None where it hides some between them."""
        return self._look("tokens", lambda: [] if self.padding is None else _stretches(self.padding))  # type: ignore[no-any-return]

    @property
    def _runs_alike(self) -> Sequence[tuple[Span | None, list[Span] | None]]:
        """Neighbours in the batch, and the runs of tokens in them that see each other; None for those with holes."""
        return self._look("runs", self._find_runs)  # type: ignore[no-any-return]

    def _find_runs(self) -> Sequence[tuple[Span | None, list[Span] | None]]:
        if (packed := self._packed) is not None:
            runs: Sequence[list[Span] | None] = [_equal(row) for row in packed.tolist()]
        elif self.padding is not None:
            runs = [None if run is None else [run] for run in self._tokens]
        else:
            return [(None, [Span(0, ENDLESS)])]
        return _neighbours(runs)

    def _look(self, name: object, look: Callable[[], Any]) -> Any:
        if name not in self._looks:
            self._looks[name] = look()
        return self._looks[name]


class ImageRule(Rule):
    """The rule of a vision model, where tokens of one image may see each other both ways.

    How images and window combine differs between the families, and may change: transformers' own functions are asked,
    for one rectangle at a time.

    Args:
        window, padding, segments: as for :class:`Rule`.
        images: whose functions, as of :func:`swapatch.masks.rule_name`.
        types: token types of all positions so far, ``[batch, positions]``; nonzero within an image.
    """

    types: Tensor

    def __init__(
        self, window: int, padding: Tensor | None, segments: Tensor | None, images: str, types: Tensor
    ) -> None:
        super().__init__(window, padding, segments)
        self.images = images
        self.types = types

    def reach(self, queries: Span) -> Span:
        """Also all of each image that the queries touch."""
        text = super().reach(queries)
        touched = self._touched(queries)
        starts, stops = [image.start for image in touched], [image.stop for image in touched]
        return Span(min([text.start, *starts]), max([text.stop, *stops]))

    def allowed(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        if not self._touched(queries):
            return super().allowed(queries, keys, device)
        kind = GLOBAL if self.window == ENDLESS else SLIDING
        mask = image_rectangle(self.images, self.window, self.padding, self.types, queries, keys, device, kind)
        return super().allowed(queries, keys, device) if mask is None else mask

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        return not self._touched(queries) and super().shifts_alike(queries, keys)

    def _is_much(self, queries: Span, block: int) -> bool:
        many = self.window == ENDLESS and queries.size > block and bool(self._touched(queries))
        return many or super()._is_much(queries, block)

    def _cover(self, queries: Span, keys: Span, like: Tensor, block: int) -> Iterator[Rectangle]:
        if queries.size <= block:
            yield from super()._cover(queries, keys, like, block)
            return
        start = queries.start
        for image in [*self._touched(queries), Span(queries.stop, queries.stop)]:
            text, image = Span(start, max(start, image.start)), _overlap(image, queries)
            start = image.stop
            if text.size:
                parts = super()._cover(text, Span(keys.start, min(keys.stop, text.stop)), like, block)
                yield from _moved(parts, text.start - queries.start)
            if image.size > 0:
                yield from _moved(self._masked(None, image, keys, like, block), image.start - queries.start)

    def _touched(self, queries: Span) -> list[Span]:
        return [image for image in self._blocks if image.start < queries.stop and queries.start < image.stop]

    @property
    def _blocks(self) -> list[Span]:
        return self._look("images", lambda: _runs((self.types != 0).any(dim=0).tolist()))  # type: ignore[no-any-return]


def rule_of(window: int, padding: Tensor | None, segments: Tensor | None, images: str, types: Tensor | None) -> Rule:
    """The rule that these make: of text where there are no token types."""
    if types is None:
        return Rule(window, padding, segments)
    return ImageRule(window, padding, segments, images, types)


def _shown(padding: Tensor, keys: Span) -> Tensor:
    """Which of these keys a 2D attention mask shows, bool ``[batch, keys]``: none past its end."""
    shown = padding[:, keys.start : keys.stop].bool()
    lacking = keys.size - shown.shape[1]
    return torch.nn.functional.pad(shown, (0, lacking)) if lacking else shown


def _band(offset: int, queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """The window alone, bool ``[1, 1, queries, keys]``; the first query is ``offset`` positions after the first key."""
    query = torch.arange(offset, offset + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return ((key <= query) & (key > query - window))[None, None]


@lru_cache(maxsize=64)  # all blocks of a prompt but the first and last ones are alike, in all layers and calls
def _additive_band(
    offset: int, queries: int, keys: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False):  # for calls outside of it as well
        return _filled(_band(offset, queries, keys, window, device), dtype)


def _filled(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, -torch.inf)


def _runs(flags: list[bool]) -> list[Span]:
    """The stretches of True.

    >>> _runs([True, True, False, True])
    [Span(start=0, stop=2), Span(start=3, stop=4)]
    """
    edges = [i for i, (a, b) in enumerate(pairwise([False, *flags, False])) if a != b]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _stretches(padding: Tensor) -> list[Span | None]:
    """Of each sequence the tokens that a 2D mask shows, in one look; None where it hides some between them.

    >>> _stretches(torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0]]))
    [Span(start=1, stop=3), None, Span(start=0, stop=0)]
    """
    shown = padding.ne(0).view(torch.uint8)
    counted = shown.cumsum(1)
    found = torch.stack([counted[:, -1], counted.argmax(1), shown.argmax(1)]).tolist()  # the first places of the most
    return [
        Span(0, 0) if not count else Span(first, last + 1) if last - first + 1 == count else None
        for count, last, first in zip(*found, strict=True)
    ]


def _equal(numbers: list[int]) -> list[Span]:
    """The stretches of one number.

    >>> _equal([0, 0, 1])
    [Span(start=0, stop=2), Span(start=2, stop=3)]
    """
    edges = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if a != b), len(numbers)]
    return [Span(*pair) for pair in pairwise(edges)]


def _neighbours(items: Sequence[Any]) -> list[tuple[Span, Any]]:
    """Equal items that follow each other, and where they stand.

    >>> _neighbours(["a", "a", "b"])
    [(Span(start=0, stop=2), 'a'), (Span(start=2, stop=3), 'b')]
    """
    found, start = [], 0
    for item, group in groupby(items):
        stop = start + len(list(group))
        found.append((Span(start, stop), item))
        start = stop
    return found


def _moved(parts: Iterable[Rectangle], by: int) -> Iterator[Rectangle]:
    """The same for queries that are further down by so many rows."""
    for part in parts:
        yield part._replace(queries=_shift(part.queries, -by))


def _shift(span: Span, by: int) -> Span:
    return Span(span.start - by, span.stop - by)


def _overlap(one: Span, other: Span) -> Span:
    """What is in both; of size 0 or less where that is nothing."""
    return Span(max(one.start, other.start), min(one.stop, other.stop))


def _within(inner: Span, outer: Span) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
