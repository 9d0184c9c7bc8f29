"""Attention over rectangles: ours (:mod:`.windowed`), its definition (:mod:`.reference`), and the Spyre operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import reference, spyre, windowed

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""``(query, key, value, mask, causal, scale) -> output``, all ``[batch, heads, rows, head_dim]``."""

BACKENDS: dict[str, Attention] = {"windowed": windowed.attend, "reference": reference.attend}
"""Backends that compute a rectangle at a time. The Spyre operator computes a whole layer."""

NAMES = ("auto", *BACKENDS, "spyre")
"""Backends to choose from; ``"auto"`` is the operator on a Spyre device and ``"windowed"`` elsewhere."""


def choose(backend: str, device: torch.device) -> str:
    """The backend that ``"auto"`` stands for on this device; any other stands for itself.

    >>> choose("auto", torch.device("cpu")), choose("reference", torch.device("cpu"))
    ('windowed', 'reference')
    """
    if backend != "auto":
        return backend
    return "spyre" if device.type == spyre.DEVICE else "windowed"


__all__ = ["BACKENDS", "NAMES", "Attention", "choose"]
