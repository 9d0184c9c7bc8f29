"""Switching swapatch off: for one block of code, or by an environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

VARIABLE = "SWAPATCH_DISABLE"
"""Name of the environment variable; 1, on, yes and true in any case disable. Read at every call."""

_disabled: ContextVar[bool] = ContextVar("swapatch_disabled", default=False)
_blocks = 0  # of all threads together: a compiler can read a number, but no context variable


@contextmanager
def disabled() -> Iterator[None]:
    """Within the block, in this thread: ``patch`` changes nothing, and a patched model makes stock caches.

    >>> with disabled():
    ...     is_disabled()
    True
    """
    global _blocks
    token = _disabled.set(True)
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        _disabled.reset(token)


def is_disabled() -> bool:
    """Whether :func:`disabled` or the environment variable is in force."""
    block = _blocks > 0 if torch.compiler.is_compiling() else _disabled.get()
    return block or os.environ.get(VARIABLE, "").strip().lower() in ("1", "on", "yes", "true")
