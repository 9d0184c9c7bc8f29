"""Everything that depends on a version of transformers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

from ._errors import UnsupportedVersionError, explain

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache in calls and outputs: the first from transformers 5.24 on, the second before."""

CACHE_NAME = next(name for name in CACHE_NAMES if name in inspect.signature(create_causal_mask).parameters)
"""The name that the installed transformers uses."""


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among these keyword arguments, under either name, or None."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
"""Major and minor version of the installed transformers."""

CROPS_TO_LENGTH = VERSION < (5, 20)
"""Whether ``crop`` takes positive numbers as well, which are lengths: deprecated, and gone from 5.20 on."""


def kv_shape(config: Any, layer: int) -> tuple[int, int]:
    """Key-value heads and head size of one layer of a text config.

    Gemma 4 has other values on its global layers, which its config keeps apart.
    """
    own = config.per_layer_config[layer]
    return int(own.num_key_value_heads), int(own.head_dim)


def reset_layer(layer: Any) -> None:
    """Reset one layer of a cache; a dynamic one keeps its rows, as zeros, in transformers 5.15."""
    layer.reset()
    if isinstance(layer, DynamicLayer) and layer.get_seq_length():
        layer.keys = layer.values = None
        layer.is_initialized = False


OLDEST, NEWEST = (5, 15), (5, 24)
"""Minor versions of transformers between which the test suite was run."""


class UntestedVersionWarning(UserWarning):
    """The installed transformers fits, as far as can be seen, but the test suite was not run with it."""


def check_signatures(expected: dict[Callable[..., Any], tuple[str, ...]]) -> None:
    """Make sure that the functions swapatch replaces or wraps take the arguments it relies on.

    Raises:
        UnsupportedVersionError: names the function and what it lacks.
    """
    for function, names in expected.items():
        lacking = [name for name in names if name not in inspect.signature(function).parameters]
        if lacking:
            raise UnsupportedVersionError(
                explain(
                    f"{function.__qualname__} without {', '.join(lacking)} in transformers {transformers.__version__}",
                    f"{function.__qualname__} with {', '.join(names)}",
                    f"install transformers {_dotted(OLDEST)} to {_dotted(NEWEST)}",
                )
            )


def check_version(strict: bool) -> None:
    """Warn of a version that was not tested, or raise with ``strict``.

    Raises:
        UnsupportedVersionError: with ``strict``, for an untested version.
    """
    if OLDEST <= VERSION <= NEWEST:
        return
    message = explain(
        f"transformers {transformers.__version__}",
        f"tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}",
        "compare a few outputs with and without the patch, or install a tested version",
    )
    if strict:
        raise UnsupportedVersionError(message)
    warnings.warn(message, UntestedVersionWarning, stacklevel=3)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
