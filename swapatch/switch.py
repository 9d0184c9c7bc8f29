"""Switching swapatch off: for one block of code, or by an environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "SWAPATCH_DISABLE"
"""Name of the environment variable; 1, on, yes and true in any case disable. Read at every call."""

_disabled: ContextVar[bool] = ContextVar("swapatch_disabled", default=False)


@contextmanager
def disabled() -> Iterator[None]:
    """Within the block, in this thread: ``patch`` changes nothing, and a patched model makes stock caches.

    >>> with disabled():
    ...     is_disabled()
    True
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_disabled() -> bool:
    """Whether :func:`disabled` or the environment variable is in force."""
    return _disabled.get() or os.environ.get(VARIABLE, "").strip().lower() in ("1", "on", "yes", "true")
