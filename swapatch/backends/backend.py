"""What a backend is: given a call of the model, it says how its sliding layers are computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cache import CompactCache
from ..families import Family
from ..geometry import Span
from ..layers import SlidingLayer
from ..plan import SLIDING
from ..rules import Rule
from ..step import Step


@dataclass(frozen=True)
class ModelCall:
    """A call of the text model.

    Attributes:
        family: of the model.
        config: of the text model.
        cache: of the call, or None.
        queries: positions of its tokens.
        keys: positions of the rows that a sliding layer of the cache will return.
        like: stands for the embeddings, ``[batch, tokens, any]``: shape, dtype, and the device where masks are made.
        device: where the model is.
        rule: who sees whom on a sliding layer; its tensors are where masks are made.
        causal: whether no token ever sees a later one, in any call of this model.
        fixed: whether the call is compiled, so that a decode step must not hold numbers that change.
        whole: whether the attention of global layers is replaced as well.
    """

    family: Family
    config: Any
    cache: Any
    queries: Span
    keys: Span
    like: Tensor
    device: torch.device
    rule: Rule
    causal: bool
    fixed: bool = False
    whole: bool = False

    @property
    def writable(self) -> list[SlidingLayer] | None:
        """The sliding layers of the cache, if a decode step may write its row in place; else all goes through
        ``update``, or there is none.

        They are ours, nobody will go backward through them, and nobody has put an ``update`` of his own in its place.
        """
        if not isinstance(self.cache, CompactCache) or torch.is_grad_enabled() or self.cache.has_own_update:
            return None
        return self.cache.bounded

    @property
    def is_row(self) -> bool:
        """Whether it is one more token of text."""
        return self.queries.size == 1 and self.queries.start > 0 and self.rule.types is None


class Backend(ABC):
    """One way to compute sliding layers.

    Attributes:
        name: what a user asks for it by.
        device: the type of device that it is the choice for; None for all others.
        host_masks: whether masks are made on the CPU, wherever the model is.
        whole: whether it computes global layers as well.
    """

    name: ClassVar[str]
    device: ClassVar[str | None] = None
    host_masks: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def check(self) -> None:  # noqa: B027  # most work everywhere
        """Raise a :class:`~swapatch.SwapatchError` if it cannot work here at all."""

    def kinds(self, call: ModelCall) -> tuple[str, ...]:
        """The types of layer that it computes in a call."""
        return (SLIDING,)

    def begin_global(self, call: ModelCall, keys: Span) -> Step | None:
        """The step for global layers, whose cache will return rows of these positions, or None for stock's mask."""
        return None

    @abstractmethod
    def begin(self, call: ModelCall) -> dict[str, Step] | str:
        """The step for each of these types; or in words, why this backend leaves the call to stock."""
