"""Who sees whom on a sliding layer, answered for one rectangle of queries and keys at a time.

A rule is tensors and integers, nothing else: it knows neither where the keys are stored nor how they are attended. A
mask over a whole prompt would be ``L x L``. Nobody here builds one: the attention asks for each block of queries and
the few keys it can reach, a decode step for one query.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Span, query_blocks, visible
from .masks import image_rectangle
from .plan import SLIDING


class Rectangle(NamedTuple):
    """Some queries and the keys they look at, both counted from the first of those given to the attention.

    Attributes:
        queries: rows of the query tensor.
        keys: rows of the key tensor.
        mask: additive, ``[batch or 1, 1, queries, keys]``, in the query's dtype; None hides nothing.
        causal: query ``i`` of the rectangle sees keys up to ``i``; used instead of a mask, on a square.
    """

    queries: Span
    keys: Span
    mask: Tensor | None = None
    causal: bool = False


class Rule:
    """The rule of text: ``0 <= query - key < window``, and never a key that the 2D mask hides.

    Args:
        window: keys that a query sees, itself included.
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
        # Answers are kept: all layers of a call ask the same, and some answers need a look into a tensor.
        self._hidden: dict[Span, Tensor | None] = {}
        self._rectangles: dict[tuple[object, ...], list[Rectangle]] = {}

    def reach(self, queries: Span) -> Span:
        """The range of keys that these queries can see at all."""
        return Span(visible(queries.start, self.window).start, queries.stop)

    def hidden(self, keys: Span) -> Tensor | None:
        """Which of these keys the 2D mask hides, ``[batch, keys]`` bool; None when it hides none of them."""
        if self.padding is None:
            return None
        if keys not in self._hidden:
            shown = _shown(self.padding, keys)
            self._hidden[keys] = None if bool(shown.all()) else ~shown
        return self._hidden[keys]

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

        None when all of it is seen. Rectangles that are only shifted against each other share one tensor.
        """
        if self.shifts_alike(queries, keys):
            return _additive_band(
                queries.start - keys.start, queries.size, keys.size, self.window, like.dtype, like.device
            )
        return _additive(self.allowed(queries, keys, like.device), like.dtype)

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
            of_part = True if shown is None else shown[:, None, None, done : done + part.size]
            allowed[..., part.start : part.stop] = of_part
            done += part.size
        return allowed

    def row_mask(self, keys: Span, rows: list[Span], size: int, like: Tensor) -> Tensor:
        """The same as an additive mask in the dtype and on the device of ``like``."""
        return _filled(self.rows_allowed(keys, rows, size, like.device), like.dtype)

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        """Whether this rectangle looks like any other of its size, shifted along the diagonal."""
        return self._packed is None and self.hidden(keys) is None

    def rectangles(self, queries: Span, keys: Span, like: Tensor, block: int) -> list[Rectangle]:
        """Cover these queries, over the keys at hand, by rectangles of at most ``block`` queries each."""
        name = (queries, keys, like.dtype, like.device, block)
        if name not in self._rectangles:
            self._rectangles[name] = list(self._cover(queries, keys, like, block))
        return self._rectangles[name]

    def _cover(self, queries: Span, keys: Span, like: Tensor, block: int) -> Iterator[Rectangle]:
        for part in query_blocks(queries, block):
            reach = self.reach(part)
            reach = Span(max(reach.start, keys.start), min(reach.stop, keys.stop))
            mask = self.additive(part, reach, like)
            yield Rectangle(_shift(part, queries.start), _shift(reach, keys.start), mask)

    def is_causal_square(self, queries: Span, keys: Span) -> bool:
        """Whether the window leaves out nothing, so that one causal square says it all.

        Not for a whole window: transformers makes a mask for it.
        """
        square = queries.start == keys.start and queries.size <= min(self.window - 1, keys.size)
        return square and self.shifts_alike(queries, queries)

    @cached_property
    def _packed(self) -> Tensor | None:
        return None if self.segments is None or not bool((self.segments != 0).any()) else self.segments


class ImageRule(Rule):
    """The rule of a vision model, where tokens of one image may see each other both ways.

    How images and window combine differs between the families, and may change: transformers' own functions are asked,
    for one rectangle at a time.

    Args:
        window, padding, segments: as for :class:`Rule`.
        images: whose functions, as of :func:`swapatch.masks.rule_name`.
        types: token types of all positions so far, ``[batch, positions]``; nonzero within an image.
        kind: of the layer: a global one has a window that is longer than all there is.
    """

    types: Tensor

    def __init__(
        self,
        window: int,
        padding: Tensor | None,
        segments: Tensor | None,
        images: str,
        types: Tensor,
        kind: str = SLIDING,
    ) -> None:
        super().__init__(window, padding, segments)
        self.images = images
        self.types = types
        self.kind = kind

    def reach(self, queries: Span) -> Span:
        """Also all of each image that the queries touch."""
        text = super().reach(queries)
        touched = self._touched(queries)
        starts, stops = [image.start for image in touched], [image.stop for image in touched]
        return Span(min([text.start, *starts]), max([text.stop, *stops]))

    def allowed(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        if not self._touched(queries):
            return super().allowed(queries, keys, device)
        mask = image_rectangle(self.images, self.window, self.padding, self.types, queries, keys, device, self.kind)
        return super().allowed(queries, keys, device) if mask is None else mask

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        return not self._touched(queries) and super().shifts_alike(queries, keys)

    def _touched(self, queries: Span) -> list[Span]:
        return [image for image in self._blocks if image.start < queries.stop and queries.start < image.stop]

    @cached_property
    def _blocks(self) -> list[Span]:
        return _runs((self.types != 0).any(dim=0).tolist())


def rule_of(
    window: int,
    padding: Tensor | None,
    segments: Tensor | None,
    images: str,
    types: Tensor | None,
    kind: str = SLIDING,
) -> Rule:
    """The rule that these make: of text where there are no token types."""
    if types is None:
        return Rule(window, padding, segments)
    return ImageRule(window, padding, segments, images, types, kind)


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
) -> Tensor | None:
    with torch.inference_mode(False):  # for calls outside of it as well
        return _additive(_band(offset, queries, keys, window, device), dtype)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if bool(allowed.all()) else _filled(allowed, dtype)


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


def _shift(span: Span, by: int) -> Span:
    return Span(span.start - by, span.stop - by)
