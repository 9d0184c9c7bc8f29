"""Gemma 3: text, and images that are always attended both ways."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as modeling

from .family import Family, Masks, Norm, Projected, Rotate, run


class Gemma3(Family):
    """See :class:`.Family`."""

    modeling = modeling
    model_type = "gemma3_text"
    outer_type = "gemma3"
    config = modeling.Gemma3TextConfig
    text_model = modeling.Gemma3TextModel
    attention = modeling.Gemma3Attention
    outer_model = modeling.Gemma3Model
    types_name = "token_type_ids"

    def sees_images(self, config: Any, text: Any) -> bool:
        return config is not text

    def project(
        self,
        attention: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Norm = run,
        rotate: Rotate | None = None,
    ) -> Projected:
        heads = (*hidden.shape[:2], -1, attention.head_dim)
        # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
        query = attention.q_proj(hidden).view(heads).transpose(1, 2)
        key = attention.k_proj(hidden).view(heads).transpose(1, 2)
        value = attention.v_proj(hidden).view(heads).transpose(1, 2)
        query, key = norm(attention.q_norm, query), norm(attention.k_norm, key)
        if rotate is None:
            query, key = self.modeling.apply_rotary_pos_emb(query, key, cos, sin)
            return query, key, value
        cos, sin = cos[:, None], sin[:, None]
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def norm_weight(self, norm: Any) -> Tensor:
        weight: Tensor = 1.0 + norm.weight.float()
        return weight

    def masks(self, config: Any, types: Tensor | None, *, ahead: bool, **call: Any) -> Masks:
        maker = modeling.Gemma3ForConditionalGeneration.create_masks_for_generate
        made: Masks = maker(config=config, token_type_ids=types, position_ids=None, **call)
        return made


FAMILY = Gemma3()
