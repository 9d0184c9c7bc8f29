"""Stock ``generate`` on a patched model: where it makes a cache, a compact one; where it makes masks ahead, a step."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import wrapt
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation.configuration_utils import GenerationMode

from ._compat import CACHE_NAME, cache_in
from .cache import CompactCache, make_cache
from .entry import Left, Options, Request, begin_step, by_name, kind_of, open_cache, stand_in, why_stock
from .foreign import is_known
from .plan import SLIDING, text_config
from .switch import is_disabled

PREPARE_CACHE = "_prepare_cache_for_generation"
"""The method of ``GenerationMixin`` that makes the cache of a ``generate`` call."""

MAKE_MASKS = "create_masks_for_generate"
"""The attribute where ``generate`` looks for a model's own way to make masks ahead of a call with a static cache."""


@dataclass
class CacheMaker:
    """Lets stock make its cache, and puts a compact one in the place of a plain dynamic or static one.

    A cache that the caller passed, a quantized or offloaded one, or none at all, stays what it is.
    """

    layout: str

    def __call__(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        call = by_name(wrapped, args, kwargs)
        model_kwargs = call["model_kwargs"]
        passed = cache_in(model_kwargs)
        result = wrapped(*args, **kwargs)
        made = model_kwargs.get(CACHE_NAME)
        # Stock refuses drafts with a static cache, which would have no room for those of the last tokens.
        drafts = call["generation_mode"] == GenerationMode.ASSISTED_GENERATION
        kinds = (DynamicCache,) if drafts else (DynamicCache, StaticCache)
        if passed is None and type(made) in kinds and not made.offloading and not is_disabled():
            compact = self._compact(instance.config, made)
            if compact is not None:
                compact.expected = call["max_cache_length"]
                model_kwargs[CACHE_NAME] = compact
        return result

    def _compact(self, config: Any, made: Any) -> CompactCache | None:
        fixed = type(made) is StaticCache
        longest = max(layer.get_max_length() for layer in made.layers) if fixed else None
        compact = make_cache(config, max_cache_len=longest, layout=self.layout)
        if compact is not None and any(getattr(layer, "record_past", False) for layer in made.layers):
            compact.activate_past_recording()
        return compact


@dataclass
class StepMaker:
    """Begins the step when ``generate`` makes the masks ahead of a call, as it does for a static cache.

    Attributes:
        stock: the function that would make them.
        options: of the patch.
        between: the modules that hand on the masks: the one that generates, and those within it up to the text model.
    """

    stock: Callable[..., Any]
    options: Options
    between: tuple[nn.Module, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = by_name(self.stock, args, kwargs)
        cache, config = cache_in(call), call["config"]
        if not isinstance(config, self.options.family.config):
            config = text_config(config)
        masks = self._begin(call, cache, config)
        if isinstance(masks, Left):  # counted by the text model: as a ready-made mask, if nothing else keeps it from us
            return self.stock(**call)
        masks[SLIDING].stock_masks = partial(self.stock, **call)
        self.options.calls.count("windowed", kind_of(masks[SLIDING]))
        return masks

    def _begin(self, call: dict[str, Any], cache: Any, config: Any) -> dict[str, Any] | Left:
        given = call["inputs_embeds"]
        if cache is None:
            return Left("masks asked for without a cache")
        if not (is_known(self.stock) and is_known(self.between[0].prepare_inputs_for_generation)):
            return Left("somebody's own masks or preparation of the inputs")
        if isinstance(reason := why_stock(call, config, self.options, self.between), Left):
            return reason
        if isinstance(cache, CompactCache) and isinstance(uneven := open_cache(cache, config, given.shape[0]), Left):
            return uneven
        types = None if self.options.causal else call.get(self.options.family.types_name or "")
        like = stand_in(self.options, given, given.dtype)
        asked = Request(cache, like, given.device, call.get("attention_mask"), types, ahead=True)
        return begin_step(self.options, config, asked)


class MethodWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # not generic at run time
    """A wrapt wrapper around a bound method that deep copies: the copy wraps the same method of the copied model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodWrapper:
        return MethodWrapper(deepcopy(self.__wrapped__, memo), deepcopy(self._self_wrapper, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MethodWrapper, (self.__wrapped__, self._self_wrapper)
