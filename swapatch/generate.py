"""Stock ``generate`` on a patched model: where it would make a dynamic cache, it gets a compact one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt
from transformers.cache_utils import DynamicCache

from ._compat import CACHE_NAME, cache_in
from .cache import CompactCache
from .switch import is_disabled

PREPARE_CACHE = "_prepare_cache_for_generation"
"""The method of ``GenerationMixin`` that makes the cache of a ``generate`` call."""


@dataclass
class CacheMaker:
    """Lets stock make its cache, and puts a compact one in the place of a plain dynamic one.

    A cache that the caller passed, a static, quantized or offloaded one, or none at all, stays what it is.
    """

    layout: str

    def __call__(self, wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
        model_kwargs = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model_kwargs"]
        passed = cache_in(model_kwargs)
        result = wrapped(*args, **kwargs)
        made = model_kwargs.get(CACHE_NAME)
        if passed is None and type(made) is DynamicCache and not made.offloading and not is_disabled():
            compact = CompactCache(instance.config, layout=self.layout)
            if any(made.is_recording_past(index) for index in range(len(made.layers))):
                compact.activate_past_recording()
            model_kwargs[CACHE_NAME] = compact
        return result


class MethodWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # not generic at run time
    """A wrapt wrapper around a bound method that deep copies: the copy wraps the same method of the copied model."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodWrapper:
        from copy import deepcopy

        return MethodWrapper(deepcopy(self.__wrapped__, memo), deepcopy(self._self_wrapper, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return MethodWrapper, (self.__wrapped__, self._self_wrapper)
