"""Gemma 4: text, per-layer embeddings, shared keys and values, and images both ways if the checkpoint says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as modeling

from .family import Family, Masks, Projected


class Gemma4(Family):
    """See :class:`.Family`."""

    modeling = modeling
    model_type = "gemma4_text"
    outer_type = "gemma4"
    config = modeling.Gemma4TextConfig
    text_model = modeling.Gemma4TextModel
    attention = modeling.Gemma4TextAttention
    outer_model = modeling.Gemma4Model
    types_name = "mm_token_type_ids"

    def project(self, attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        heads = (*hidden.shape[:2], -1, attention.head_dim)
        # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
        query = attention.q_norm(attention.q_proj(hidden).view(heads))
        query = self.modeling.apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2).transpose(1, 2)
        if attention.is_kv_shared_layer:
            return query, None, None
        key, value = attention.k_proj(hidden).view(heads), attention.v_proj(hidden).view(heads)
        key = attention.k_norm(key)
        key = self.modeling.apply_rotary_pos_emb(key, cos, sin, unsqueeze_dim=2).transpose(1, 2)
        value = attention.v_norm(value).transpose(1, 2)
        return query, key, value

    def masks(self, config: Any, types: Tensor | None, *, ahead: bool, **call: Any) -> Masks:
        maker = modeling.Gemma4ForConditionalGeneration.create_masks_for_generate
        made: Masks = maker(config=config, mm_token_type_ids=types, position_ids=None, **call)
        return made

    def example(self, window: int) -> Any:
        config = super().example(window)
        config.use_bidirectional_attention = "vision"
        return config


FAMILY = Gemma4()
