"""One entry for each kind of Gemma: its classes, the forward that replaces its sliding attention, and its masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4_unified import modeling_gemma4_unified

from ..masks import MaskMaker
from . import gemma3, gemma4


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


FAMILIES: dict[str, Family] = {
    "gemma3_text": Family(
        modeling_gemma3.Gemma3TextModel,
        modeling_gemma3.Gemma3Attention,
        gemma3.forward,
        modeling_gemma3.Gemma3Model,
        "token_type_ids",
        gemma3.masks,
    ),
    "gemma4_text": Family(
        modeling_gemma4.Gemma4TextModel,
        modeling_gemma4.Gemma4TextAttention,
        gemma4.forward,
        modeling_gemma4.Gemma4Model,
        "mm_token_type_ids",
        gemma4.masks,
    ),
    "gemma4_unified_text": Family(
        modeling_gemma4_unified.Gemma4UnifiedTextModel,
        modeling_gemma4_unified.Gemma4UnifiedTextAttention,
        gemma4.forward,
        modeling_gemma4_unified.Gemma4UnifiedModel,
        "mm_token_type_ids",
        gemma4.unified_masks,
    ),
}
"""By ``model_type`` of the text config."""
