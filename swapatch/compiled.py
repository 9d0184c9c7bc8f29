"""Decoder layers that are compiled one by one, which takes seconds where a whole model takes a minute.

All layers share their graphs, as long as nothing in these is asked by a layer's number. So a step has them left to
attend, and put the rows into a cache; see :class:`swapatch.step.WindowStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

COMPILED = "_compiled_call_impl"
"""Where :meth:`torch.nn.Module.compile` puts what is called in the place of a module; its copies come without."""


class CompiledLayer:
    """A layer, compiled for any length; a copy is compiled for the copied layer.

    Args:
        layer: of the model.
        options: for ``torch.compile``.
    """

    def __init__(self, layer: nn.Module, options: Mapping[str, Any]) -> None:
        self.layer = layer
        self.options = options
        self._call = torch.compile(layer._call_impl, **{"dynamic": True, **options})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLayer, (self.layer, self.options)


def is_compiled_alone(layer: nn.Module) -> bool:
    """Whether a layer is compiled by itself, by us or by anybody else."""
    return getattr(layer, COMPILED) is not None
