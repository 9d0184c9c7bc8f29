"""The compact cache: an ordinary transformers ``Cache`` whose sliding layers hold a bounded buffer.

Global layers are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticSlidingWindowLayer,
)

from ._compat import reset_layer
from ._errors import CacheStateError, UnsupportedModelError, explain
from .families import plan_model
from .foreign import is_known
from .layers import LAYOUTS, OURS, SlidingLayer, Workspace, check_layout, to_remove
from .plan import ModelPlan, text_config


class CompactCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A transformers ``Cache`` for a Gemma 3 or Gemma 4 model, with bounded buffers on its sliding layers.

    A patched model makes one by itself. By hand it is used like any other cache, and holds all state there is: two
    conversations with a cache each can take turns on one model. It is a ``DynamicCache`` to whoever asks, and with
    ``max_cache_len`` a ``StaticCache``.

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
    >>> isinstance(cache, DynamicCache)
    True
    """

    def __new__(cls, *args: Any, max_cache_len: int | None = None, **kwargs: Any) -> CompactCache:
        """One of the two kinds."""
        if cls is CompactCache:
            cls = DynamicCompactCache if max_cache_len is None else StaticCompactCache
        return cast(CompactCache, super().__new__(cls))

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
        Cache.__init__(self, layers=stock.layers)  # not what transformers' own two kinds make of a config
        self._owners = self.plan.owners
        self._storing = tuple(layer.index for layer in self.plan.layers if not layer.shared)
        workspace = Workspace()
        for index in self._owners:
            self.layers[index] = LAYOUTS[layout](self.plan.window, max_cache_len, workspace)
        self.expected = 0  # tokens that are going to be put in, as far as whoever has made it knows
        # What the layers had seen when a forward began, until it ends: one that was interrupted leaves it behind.
        self.lengths_before: list[int] | None = None

    @property
    def sliding(self) -> list[SlidingLayer]:
        """The layers with a bounded buffer: all that slide and hold rows, unless somebody has put in others."""
        layers = self.layers
        return [layers[index] for index in self._owners if type(layers[index]) in OURS]

    @property
    def own(self) -> list[SlidingLayer]:
        """All layers that are ours: these, and global ones where a backend computes them."""
        return [self.layers[index] for index in self._storing if type(self.layers[index]) in OURS]

    @property
    def bounded(self) -> list[SlidingLayer] | None:
        """The same, if every sliding layer still is one of ours; else None, and it is a cache like any other."""
        sliding = self.sliding
        return sliding if len(sliding) == len(self._owners) else None

    @property
    def has_own_update(self) -> bool:
        """Whether somebody has put something else in the place of ``update``, here or on a sliding layer."""
        replaced = "update" in vars(self) or not is_known(type(self).update)
        return replaced or any("update" in vars(layer) for layer in self.sliding)

    def lengths(self) -> list[int]:
        """How many tokens each layer has seen that stores any.

        One that counts on the device is asked only after an interrupted forward, since that means waiting; else it is
        taken to have seen what the first sliding layer has.
        """
        first = self.layers[self._owners[0]].seen
        own = [self.layers[index].get_seq_length() for index in self._storing]
        return [first if isinstance(length, Tensor) and self.lengths_before is None else int(length) for length in own]

    def reset(self) -> None:
        """Forget everything: as good as new."""
        for layer in self.layers:
            reset_layer(layer)
        self.lengths_before = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` tokens on every layer, or raise and leave every layer as it is.

        All of them, if it were fewer.

        Raises:
            ValueError: for a positive number, unless the installed transformers takes it for a length.
            CacheStateError: when a sliding layer has evicted rows that would be visible again.
        """
        for layer in self.sliding:
            layer.settle()
        super().crop(-to_remove(self.sliding, tokens_to_remove, int(self.get_seq_length())))

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
            yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)


class DynamicCompactCache(CompactCache, DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A compact cache that grows on its global layers."""


class StaticCompactCache(CompactCache, StaticCache):  # type: ignore[misc]  # transformers is untyped
    """A compact cache of fixed size."""


def make_cache(config: Any, **options: Any) -> CompactCache | None:
    """A compact cache in the place of one of stock's, or None where it would not do.

    That is when the config has no sliding layer by now, as while a model drafts with few layers, or when somebody has
    changed what stock's layers do with their rows.
    """
    stock = StaticSlidingWindowLayer if options.get("max_cache_len") else DynamicSlidingWindowLayer
    if not all(is_known(getattr(stock, name)) for name in ("update", "get_mask_sizes", "lazy_initialization")):
        return None
    try:
        return CompactCache(config, **options)
    except UnsupportedModelError:
        return None
