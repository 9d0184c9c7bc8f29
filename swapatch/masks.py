"""Who sees whom on a sliding layer, answered for one rectangle of queries and keys at a time.

A mask over a whole prompt would be ``L x L``. Nobody here builds one: a prefill asks for each block of queries and the
few keys it can reach, a decode step for one query.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import create_masks_for_generate

from ._compat import CACHE_NAME
from .geometry import Span, query_blocks, visible
from .plan import GLOBAL, SLIDING


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


class CausalWindow:
    """The rule of a text model: ``0 <= query - key < window``, and never a key that the 2D mask hides.

    Args:
        window: keys that a query sees, itself included.
        padding: the 2D attention mask, ``[batch, positions]``, nonzero where a token counts; keys past its end are
            hidden, as transformers pads it. None when every token counts.
    """

    def __init__(self, window: int, padding: Tensor | None = None) -> None:
        self.window = window
        self.padding = None if padding is None else padding.bool()
        self._additive: dict[tuple[object, ...], Tensor | None] = {}

    def reach(self, queries: Span) -> Span:
        """The range of keys that these queries can see at all."""
        return Span(visible(queries.start, self.window).start, queries.stop)

    def hidden(self, keys: Span) -> Tensor | None:
        """Which of these keys the 2D mask hides, ``[batch, keys]`` bool; None when it hides none of them."""
        if self.padding is None:
            return None
        shown = self.padding[:, keys.start : keys.stop]
        if shown.shape[1] < keys.size:
            shown = torch.nn.functional.pad(shown, (0, keys.size - shown.shape[1]))
        return None if bool(shown.all()) else ~shown

    def allowed(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        """Bool ``[batch or 1, 1, queries, keys]``: True where the query sees the key."""
        query = torch.arange(*queries, device=device)[:, None]
        key = torch.arange(*keys, device=device)
        seen = (key <= query) & (key > query - self.window)
        hidden = self.hidden(keys)
        return seen[None, None] if hidden is None else seen & ~hidden.to(device)[:, None, None]

    def additive(self, queries: Span, keys: Span, like: Tensor) -> Tensor | None:
        """The mask of a rectangle: 0 where seen, -inf elsewhere, in the dtype and on the device of ``like``.

        None when all of it is seen. Rectangles that are only shifted against each other share one tensor.
        """
        alike = self.shifts_alike(queries, keys)
        if alike and queries.size == 1 and keys == self.reach(queries):
            return None
        shape = (queries.start - keys.start, queries.size, keys.size, like.dtype, like.device)
        name = shape if alike else (*shape, keys.start)
        if name not in self._additive:
            allowed = self.allowed(queries, keys, like.device)
            mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
            self._additive[name] = None if bool(allowed.all()) else mask.masked_fill_(~allowed, -torch.inf)
        return self._additive[name]

    def rows_allowed(self, position: int, positions: Tensor) -> Tensor:
        """Which rows of a buffer the query at ``position`` sees, given the position that each row holds, ``[rows]``.

        Bool, ``[rows]`` or ``[batch, rows]``.
        """
        seen = (positions >= 0) & (positions <= position) & (positions > position - self.window)
        if self.padding is not None:
            shown = torch.nn.functional.pad(self.padding, (0, max(0, position + 1 - self.padding.shape[1])))
            seen = seen & shown.to(positions.device)[:, positions.clamp(0, position)]
        return seen

    def row_mask(self, position: int, positions: Tensor, like: Tensor) -> Tensor:
        """The same as an additive mask, ``[batch or 1, 1, 1, rows]``, in the dtype and on the device of ``like``."""
        seen = self.rows_allowed(position, positions)
        mask = torch.where(seen, 0.0, -torch.inf).to(like.dtype)
        return mask.view(-1, 1, 1, positions.shape[0]).to(like.device)

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        """Whether this rectangle looks like any other of its size, shifted along the diagonal."""
        return self.hidden(keys) is None

    def rectangles(self, queries: Span, keys: Span, like: Tensor, size: int) -> list[Rectangle]:
        """Cover these queries, over the keys at hand, by rectangles of at most ``size`` queries each."""
        if queries == keys and keys.size <= self.window and self.shifts_alike(queries, keys):
            whole = Span(0, keys.size)
            return [Rectangle(whole, whole, causal=keys.size > 1)]
        found = []
        for block in query_blocks(queries, size):
            reach = self.reach(block)
            reach = Span(max(reach.start, keys.start), min(reach.stop, keys.stop))
            mask = self.additive(block, reach, like)
            found.append(Rectangle(_shift(block, queries.start), _shift(reach, keys.start), mask))
        return found


class ImageWindow(CausalWindow):
    """The rule of a vision model, where tokens of one image may see each other both ways.

    How images and window combine differs between the families, and may change: transformers' own functions are asked,
    for one rectangle at a time.

    Args:
        window, padding: as for :class:`CausalWindow`.
        maker: makes the masks of a call, as the model does.
        types: token types of all positions so far, ``[batch, positions]``; nonzero within an image.
    """

    def __init__(self, window: int, padding: Tensor | None, maker: MaskMaker, types: Tensor) -> None:
        super().__init__(window, padding)
        self.padding_mask = padding
        self.maker = maker
        self.types = types
        self.images = _runs((types != 0).any(dim=0).tolist())

    def reach(self, queries: Span) -> Span:
        """Also all of each image that the queries touch."""
        text = super().reach(queries)
        touched = self._touched(queries)
        starts, stops = [image.start for image in touched], [image.stop for image in touched]
        return Span(min([text.start, *starts]), max([text.stop, *stops]))

    def allowed(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        if not self._touched(queries):
            return super().allowed(queries, keys, device)
        stub = torch.empty((self.types.shape[0], queries.size, 0), device=device)
        # Both kinds of layer alike: transformers before 5.17 sizes the sliding mask by the global ones.
        ranges = Cache(layers=[_Range(queries.start, keys, is_sliding=kind) for kind in (False, True)])
        masks = self.maker(
            types=self.types, inputs_embeds=stub, attention_mask=self.padding_mask, **{CACHE_NAME: ranges}
        )
        mask = masks[SLIDING]
        assert mask is not None, "transformers leaves out no mask with images"
        return mask if mask.dtype == torch.bool else mask == 0

    def shifts_alike(self, queries: Span, keys: Span) -> bool:
        return not self._touched(queries) and super().shifts_alike(queries, keys)

    def _touched(self, queries: Span) -> list[Span]:
        return [image for image in self.images if image.start < queries.stop and queries.start < image.stop]


MaskMaker = Callable[..., dict[str, Tensor | None]]
"""Makes the masks of a call by layer type: ``(types=..., inputs_embeds=..., attention_mask=..., cache=...)``."""


def text_masks(config: Any, types: Tensor | None = None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that a text model makes, by transformers' own function."""
    masks: dict[str, Tensor | None] = create_masks_for_generate(config=config, **call)
    return masks


def global_mask(
    maker: MaskMaker, cache: Cache, like: Tensor, attention_mask: Tensor | None, types: Tensor | None
) -> Tensor | None:
    """What stock hands to its global layers for this call, made by transformers itself.

    transformers makes the masks of both kinds of layer at once. So it is shown the cache with the sliding layers
    narrowed down to one key, and the sliding mask it makes on the side is thrown away.

    ``like`` stands for the embeddings, ``[batch, tokens, any]``; only its shape, dtype and device are read.
    """
    globals_ = [layer for layer in cache.layers if getattr(layer, "is_sliding", None) is False]
    if not globals_:
        return None
    # A sliding layer counts in numbers; a static global one in a tensor, which is where that layer is.
    seen = next(layer.get_seq_length() for layer in cache.layers if getattr(layer, "is_sliding", False))
    last = seen + like.shape[1] - 1
    ranges = Cache(layers=[globals_[0], _Range(seen, Span(last, last + 1), is_sliding=True)])
    masks = maker(types=types, inputs_embeds=like, attention_mask=attention_mask, **{CACHE_NAME: ranges})
    return masks[GLOBAL]


class _Range(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """A layer that holds nothing, but says for which queries (from ``seen`` on) and keys a mask is wanted."""

    # Whether a mask may be left out depends on all layers of a cache: let the others decide.
    is_compileable = True

    def __init__(self, seen: int, keys: Span, *, is_sliding: bool) -> None:
        super().__init__()
        self.seen = seen
        self.range = keys
        self.is_sliding = is_sliding

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.range.size, self.range.start

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a range holds no rows")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a range holds no rows")


def _runs(flags: list[bool]) -> list[Span]:
    """The stretches of True.

    >>> _runs([True, True, False, True])
    [Span(start=0, stop=2), Span(start=3, stop=4)]
    """
    edges = [i for i, (a, b) in enumerate(pairwise([False, *flags, False])) if a != b]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _shift(span: Span, by: int) -> Span:
    return Span(span.start - by, span.stop - by)
