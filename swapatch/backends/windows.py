"""The backends for CPU and CUDA: our own attention, by torch's fused kernel or by its definition."""

from __future__ import annotations

import torch

from ..attention import KERNELS
from ..geometry import Span
from ..layers import make_room
from ..plan import SLIDING
from ..rules import Rule
from ..step import FixedRowStep, RowStep, Step, WindowStep
from .backend import Backend, ModelCall


class Windowed(Backend):
    """Windows, with torch's fused kernel for each rectangle.

    Args:
        block: queries in one block; None for what was measured to be the fastest.
    """

    name = "windowed"

    def __init__(self, block: int | None = None) -> None:
        self.block = block

    def _over(self, call: ModelCall, rule: Rule, keys: Span) -> WindowStep:
        return WindowStep(call.family, rule, call.queries, keys, self.name, self.block, call.fixed)

    def begin_global(self, call: ModelCall, keys: Span) -> Step:
        return self._over(call, call.rule.endless(), keys)

    def begin(self, call: ModelCall) -> dict[str, Step] | str:
        layers = call.writable
        if layers is None or not call.is_row:
            return {SLIDING: self._over(call, call.rule, call.keys)}
        make_room(layers, 1)
        how = call.family, call.rule, call.queries, layers[0], KERNELS[self.name]
        if not (call.cache.fixed or call.fixed):
            return {SLIDING: RowStep(*how)}
        step = FixedRowStep(*how)
        if call.fixed:
            place = layers[0].workspace.tensor("place", (1, 1), torch.long, call.device)
            step.place = place.fill_(call.queries.start)
        return {SLIDING: step}


class Reference(Windowed):
    """The same steps, with the slow definition of attention; for debugging."""

    name = "reference"
