"""Gemma 4 unified: the attention is Gemma 4's, the masks of images are its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

from ..masks import text_masks
from . import Family
from .gemma4 import forward


def masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma4UnifiedModel`` makes in its forward; what it makes for ``generate`` is something else."""
    if types is not None:
        device = call["inputs_embeds"].device
        call["block_sequence_ids"] = modeling.get_block_sequence_ids_for_mask(types, device=device)
    return text_masks(config, **call)


FAMILY = Family(
    modeling.Gemma4UnifiedTextModel,
    modeling.Gemma4UnifiedTextAttention,
    forward,
    modeling.Gemma4UnifiedModel,
    "mm_token_type_ids",
    masks,
)
