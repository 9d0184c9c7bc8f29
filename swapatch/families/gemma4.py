"""Gemma 4: the forward of a sliding attention layer, and the masks of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as modeling

from ..step import Step
from . import Family


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step | Tensor | None,
    shared_kv_states: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``Gemma4TextAttention.forward`` on a sliding layer; without a step for a mask it is stock's.

    Args:
        hidden_states: ``[batch, tokens, hidden]``.
        position_embeddings: cosines and sines, ``[batch, tokens, head_dim]`` each.
        attention_mask: the step that this forward is part of.
        shared_kv_states: keys and values that layers share in this forward, by layer type.

    Returns:
        ``[batch, tokens, hidden]``, and None in the place of attention weights.
    """
    if not isinstance(attention_mask, Step):
        stock: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, shared_kv_states, *args, **kwargs
        )
        return stock
    shared = shared_kv_states[self.layer_type] if self.is_kv_shared_layer else None
    out, keys, values = attention_mask.run(project, self, hidden_states, position_embeddings, shared)
    if self.store_full_length_kv:
        shared_kv_states[self.layer_type] = keys, values
    return out, None


def project(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Query, key and value, ``[batch, heads, tokens, head_dim]`` each, of new tokens, ``[batch, tokens, hidden]``.

    A layer that shares another's keys and values has a query only.
    """
    heads = (*hidden.shape[:2], -1, attention.head_dim)
    # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
    query = attention.q_norm(attention.q_proj(hidden).view(heads))
    query = modeling.apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2).transpose(1, 2)
    if attention.is_kv_shared_layer:
        return query, None, None
    key = attention.k_norm(attention.k_proj(hidden).view(heads))
    key = modeling.apply_rotary_pos_emb(key, cos, sin, unsqueeze_dim=2).transpose(1, 2)
    value = attention.v_norm(attention.v_proj(hidden).view(heads)).transpose(1, 2)
    return query, key, value


def masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma4Model`` makes, by its own function."""
    maker = modeling.Gemma4ForConditionalGeneration.create_masks_for_generate
    made: dict[str, Tensor | None] = maker(config=config, mm_token_type_ids=types, position_ids=None, **call)
    return made


FAMILY = Family(
    modeling.Gemma4TextModel, modeling.Gemma4TextAttention, forward, modeling.Gemma4Model, "mm_token_type_ids", masks
)
