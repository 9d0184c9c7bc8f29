"""Whether two ways computed the same: asked before any of them is timed."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of two results that counts as rounding, as a part of the largest number in them."""

ROUNDING = 0.3
"""The same for what was found equal in float32 already: bfloat16 in a whole model, over rows of random numbers."""

Computed: TypeAlias = Tensor | tuple[Tensor, ...]
"""What a way computed: one tensor, or several, each of which is compared by itself."""


def check(found: dict[str, Computed], tolerance: float) -> dict[str, float]:
    """How far every way is from the first; an AssertionError if it is too far."""
    want = tensors(next(iter(found.values())))
    errors = {}
    for name, computed in found.items():
        got = tensors(computed)
        errors[name] = max(distance(name, one, other) for one, other in zip(got, want, strict=True))
        allowed = f"{tolerance:.0e} allowed in {got[0].dtype}"
        assert errors[name] <= tolerance, f"{name}: off by {errors[name]:.1e} of the largest number, {allowed}"
    return errors


def tensors(computed: Computed) -> tuple[Tensor, ...]:
    return computed if isinstance(computed, tuple) else (computed,)


def distance(name: str, got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    got, want = got.float(), want.float()
    return float((got - want).abs().max() / want.abs().max())
