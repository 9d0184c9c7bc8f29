"""The errors swapatch raises.

::

    Exception
    └── SwapatchError
        ├── UnsupportedModelError      (also a TypeError)     this model cannot be patched
        ├── UnsupportedVersionError    (also an ImportError)  this transformers does not fit
        ├── AlreadyPatchedError        (also a RuntimeError)  patched before, with other options
        ├── PatchConflictError         (also a RuntimeError)  somebody else's patch is in the way
        ├── SpyreContractError         (also a RuntimeError)  the Spyre operator is missing, or would be misused
        └── CacheStateError            (also a RuntimeError)  the cache cannot do what is asked

Every message says what was found, what is supported, and what to do.
"""

from __future__ import annotations


class SwapatchError(Exception):
    """Base of all errors that swapatch raises on purpose."""


class UnsupportedModelError(SwapatchError, TypeError):
    """The model, or what was given in its place, cannot be patched. Nothing was changed."""


class UnsupportedVersionError(SwapatchError, ImportError):
    """The installed transformers does not have the functions that swapatch replaces or calls."""


class AlreadyPatchedError(SwapatchError, RuntimeError):
    """The model is patched already, with other options."""


class PatchConflictError(SwapatchError, RuntimeError):
    """Somebody else replaced the same attribute: patching or undoing over it would break theirs."""


class SpyreContractError(SwapatchError, RuntimeError):
    """torch-spyre's operator is missing, has an older form, or would be called against its contract."""


class CacheStateError(SwapatchError, RuntimeError):
    """A cache cannot do what is asked in the state it is in. It was not changed, but by an ``update`` of its own."""


def explain(found: str, supported: str, do: str) -> str:
    """One shape for every message: what was found, what is supported, what to do.

    >>> print(explain("window 0", "windows from 2", "load another model"))
    found: window 0
    supported: windows from 2
    do: load another model
    """
    return f"found: {found}\nsupported: {supported}\ndo: {do}"
