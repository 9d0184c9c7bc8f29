"""Compact sliding-window attention for Hugging Face Gemma 3 and 4: patch a loaded model in place, undo in one call.

>>> import swapatch
>>> sorted(swapatch.__all__) == swapatch.__all__
True
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._compat import UntestedVersionWarning
from ._errors import (
    AlreadyPatchedError,
    CacheStateError,
    PatchConflictError,
    SpyreContractError,
    SwapatchError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from .api import PatchHandle, Status, is_patched, patch, status, unpatch
from .cache import CompactCache
from .calls import CallCounts
from .sizes import LayerReport, Report, report
from .switch import disabled

if TYPE_CHECKING:
    from . import verify

__version__ = "0.1.0"

__all__ = [
    "AlreadyPatchedError",
    "CacheStateError",
    "CallCounts",
    "CompactCache",
    "LayerReport",
    "PatchConflictError",
    "PatchHandle",
    "Report",
    "SpyreContractError",
    "Status",
    "SwapatchError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "UntestedVersionWarning",
    "disabled",
    "is_patched",
    "patch",
    "report",
    "status",
    "unpatch",
    "verify",
]

logging.getLogger("swapatch").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "verify":  # imported when it is asked for: a model that only generates does without
        return import_module(".verify", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
