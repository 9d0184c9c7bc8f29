"""Gemma 4: text, per-layer embeddings, shared keys and values, and images both ways if the checkpoint says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as modeling

from .family import Family, Masks, Norm, Projected, Rotate, run


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
        query = norm(attention.q_norm, attention.q_proj(hidden).view(heads))
        query = self._rotated(query, cos, sin, rotate).transpose(1, 2)
        if attention.is_kv_shared_layer:
            return query, None, None
        key = attention.k_proj(hidden).view(heads)
        # A global layer may have none for values, which then are the keys before their norm.
        value = key if attention.v_proj is None else attention.v_proj(hidden).view(heads)
        key = self._rotated(norm(attention.k_norm, key), cos, sin, rotate).transpose(1, 2)
        value = norm(attention.v_norm, value).transpose(1, 2)
        return query, key, value

    def _rotated(self, states: Tensor, cos: Tensor, sin: Tensor, rotate: Rotate | None) -> Tensor:
        if rotate is not None:
            return rotate(states, cos[:, :, None], sin[:, :, None])
        rotated: Tensor = self.modeling.apply_rotary_pos_emb(states, cos, sin, unsqueeze_dim=2)
        return rotated

    def norm_weight(self, norm: Any) -> Tensor | None:
        weight: Tensor | None = norm.weight.float() if norm.with_scale else None
        return weight

    def masks(self, config: Any, types: Tensor | None, *, ahead: bool, **call: Any) -> Masks:
        maker = modeling.Gemma4ForConditionalGeneration.create_masks_for_generate
        made: Masks = maker(config=config, mm_token_type_ids=types, position_ids=None, **call)
        return made

    def example(self, window: int) -> Any:
        config = super().example(window)
        config.use_bidirectional_attention = "vision"
        return config


FAMILY = Gemma4()
