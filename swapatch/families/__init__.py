"""The families of Gemma, a module each: its classes, the forward that replaces its sliding attention, and its masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from ..masks import MaskMaker
from ..plan import MODEL_TYPES


@dataclass(frozen=True)
class Family:
    """The classes of a model family.

    Attributes:
        text_model: the module that calls the layers.
        attention: the module whose forward is replaced.
        forward: the replacement.
        vision_model: the module around the text model that makes the masks when there are images.
        types_name: its argument for token types.
        masks: makes masks as it does.
    """

    text_model: type[nn.Module]
    attention: type[nn.Module]
    forward: Callable[..., Any]
    vision_model: type[nn.Module]
    types_name: str
    masks: MaskMaker


def family_of(model_type: str) -> Family:
    """The family of a text config, by its ``model_type``; imported now, for each takes long to import.

    >>> family_of("gemma3_text").attention.__name__
    'Gemma3Attention'
    """
    family: Family = import_module(f".{MODEL_TYPES[model_type]}", __name__).FAMILY
    return family
