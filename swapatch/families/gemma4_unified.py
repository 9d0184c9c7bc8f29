"""Gemma 4 unified, without an encoder: the attention is Gemma 4's, the masks of images are its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

from .family import Family, Masks
from .gemma4 import Gemma4


class Gemma4Unified(Gemma4):
    """See :class:`.Family`."""

    modeling = modeling
    model_type = "gemma4_unified_text"
    outer_type = "gemma4_unified"
    config = modeling.Gemma4UnifiedTextConfig
    text_model = modeling.Gemma4UnifiedTextModel
    attention = modeling.Gemma4UnifiedTextAttention
    outer_model = modeling.Gemma4UnifiedModel

    def masks(self, config: Any, types: Tensor | None, *, ahead: bool, **call: Any) -> Masks:
        """As the model makes them in its forward, or ahead of it, which with images is not the same."""
        if ahead:
            maker = modeling.Gemma4UnifiedForConditionalGeneration.create_masks_for_generate
            made: Masks = maker(config=config, mm_token_type_ids=types, position_ids=None, **call)
            return made
        if types is not None:
            device = call["inputs_embeds"].device
            call["block_sequence_ids"] = modeling.get_block_sequence_ids_for_mask(types, device=device)
        return Family.masks(self, config, None, ahead=False, **call)


FAMILY = Gemma4Unified()
