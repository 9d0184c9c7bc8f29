"""The compact cache: an ordinary transformers ``Cache`` whose sliding layers hold a bounded buffer.

Global layers are transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from ._compat import reset_layer
from ._errors import CacheStateError, UnsupportedModelError, explain
from .families import plan_model
from .layers import LAYOUTS, SlidingLayer, check_crop, check_layout
from .plan import ModelPlan, text_config


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
        self._owners = self.plan.owners
        for index in self._owners:
            self.layers[index] = LAYOUTS[layout](self.plan.window, fixed=self.fixed)
        # The tokens seen when a forward began, until it ends: one that was interrupted leaves it behind.
        self.begun: int | None = None

    @property
    def sliding(self) -> list[SlidingLayer]:
        """The layers with a bounded buffer."""
        return [cast(SlidingLayer, self.layers[index]) for index in self._owners]

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
