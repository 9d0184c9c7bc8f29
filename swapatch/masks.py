"""Masks asked of transformers for a part of a call, so that nobody builds ``L x L`` for a layer that slides."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ._compat import CACHE_NAME
from .families import Family, family_of
from .geometry import Span
from .plan import GLOBAL, SLIDING


def image_rectangle(
    images: str,
    window: int,
    padding: Tensor | None,
    types: Tensor,
    queries: Span,
    keys: Span,
    device: torch.device,
    kind: str = SLIDING,
) -> Tensor | None:
    """Who sees whom on a layer with images, bool ``[batch, 1, queries, keys]``, as the family's model says.

    None where it makes no mask, as on a global layer that knows nothing of images.

    Args:
        images: whose rule, as of :func:`rule_name`.
        window: keys that a query sees, itself included.
        padding: the 2D attention mask, ``[batch, positions]``.
        types: token types of all positions so far, ``[batch, positions]``; nonzero within an image.
        queries, keys: positions.
        device: where the mask is wanted.
        kind: of the layer; the window is a sliding one's.
    """
    stub = torch.empty((types.shape[0], queries.size, 0), device=device)
    # Both kinds of layer alike: transformers before 5.17 sizes the sliding mask by the global ones.
    ranges = Cache(layers=[_Range(queries.start, keys, is_sliding=kind) for kind in (False, True)])
    call = {"inputs_embeds": stub, "attention_mask": padding, CACHE_NAME: ranges}
    ahead = images.endswith(_AHEAD)
    model_type = images.removesuffix(_AHEAD)
    return family_of(model_type).masks(_example(model_type, window), types, ahead=ahead, **call)[kind]


_AHEAD = ", ahead"


def rule_name(family: Family, ahead: bool) -> str:
    """What an operator, which takes no objects, knows a family's rule for images by."""
    return family.model_type + _AHEAD * ahead


@cache
def _example(model_type: str, window: int) -> Any:
    return family_of(model_type).example(window)


def global_mask(
    family: Family,
    config: Any,
    cache: Any,
    seen: int,
    like: Tensor,
    padding: Tensor | None,
    types: Tensor | None,
    positions: Tensor | None,
    ahead: bool,
) -> Tensor | None:
    """What stock hands to its global layers for this call, made by transformers itself.

    With images transformers makes the masks of both kinds of layer at once. So it is shown a cache whose sliding layers
    are narrowed down to one key, and the sliding mask it makes on the side is thrown away.

    Args:
        family: of the model.
        config: of its text part.
        cache: of the call, or None.
        seen: tokens that its layers have seen.
        like: stands for the embeddings, ``[batch, tokens, any]``; only its shape, dtype and device are read.
        padding: the 2D attention mask of the call.
        types: its token types, where tokens of one image see each other both ways.
        positions: its position ids; without a cache they may show packed sequences.
        ahead: whether ``generate`` makes the masks, ahead of the call.
    """
    if GLOBAL not in config.layer_types:
        return None
    call = {"inputs_embeds": like, "attention_mask": padding}
    if cache is None and types is None:
        return family.global_mask(config, position_ids=positions, **{CACHE_NAME: None}, **call)
    tokens = like.shape[1]
    full = _global_layer(cache, seen, tokens)
    if types is None:
        return family.global_mask(config, **{CACHE_NAME: Cache(layers=[full])}, **call)
    last = seen + tokens - 1
    ranges = Cache(layers=[full, _Range(seen, Span(last, last + 1), is_sliding=True)])
    return family.masks(config, types, ahead=ahead, **call, **{CACHE_NAME: ranges})[GLOBAL]


def global_keys(cache: Any, seen: int, tokens: int) -> Span:
    """Positions of the rows that the global layers of a cache will return, for so many tokens behind ``seen``."""
    rows, first = _global_layer(cache, seen, tokens).get_mask_sizes(tokens)
    return Span(first, first + rows)


def _global_layer(cache: Any, seen: int, tokens: int) -> Any:
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "is_sliding", None) is False:
            return layer
    # No layers yet, or a cache that hides them: transformers asks for the first one then.
    size, first = (tokens, 0) if cache is None else cache.get_mask_sizes(tokens, 0)
    return _Range(seen, Span(first, first + size), is_sliding=False)


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
