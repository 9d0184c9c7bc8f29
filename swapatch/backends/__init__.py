"""Who computes the sliding layers: torch-spyre's operator on a Spyre device, our own attention elsewhere."""

from __future__ import annotations

import torch

from .backend import Backend, ModelCall
from .spyre import ADAPTED
from .spyre_step import Spyre
from .windows import Reference, Windowed

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Windowed(), Reference(), Spyre())}

NAMES = ("auto", *BACKENDS)
"""Backends to choose from; ``"auto"`` is the one made for the device, ``"windowed"`` where there is none."""


def choose(name: str, device: torch.device) -> Backend:
    """The backend that ``"auto"`` stands for on this device; any other stands for itself.

    >>> choose("auto", torch.device("cpu")).name, choose("reference", torch.device("cpu")).name
    ('windowed', 'reference')
    """
    if name != "auto":
        return BACKENDS[name]
    made_for = (backend for backend in BACKENDS.values() if backend.device == device.type)
    return next(made_for, BACKENDS["windowed"])


__all__ = ["ADAPTED", "BACKENDS", "NAMES", "Backend", "ModelCall", "choose"]
