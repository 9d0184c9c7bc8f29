"""Gemma 3: the forward of a sliding attention layer, and the masks of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as modeling

from ..step import Step
from . import Family


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step | Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replaces ``Gemma3Attention.forward`` on a sliding layer; without a step for a mask it is stock's.

    Args:
        hidden_states: ``[batch, tokens, hidden]``.
        position_embeddings: cosines and sines, ``[batch, tokens, head_dim]`` each.
        attention_mask: the step that this forward is part of.

    Returns:
        ``[batch, tokens, hidden]``, and None in the place of attention weights.
    """
    if not isinstance(attention_mask, Step):
        stock: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, *args, **kwargs
        )
        return stock
    return attention_mask.run(project, self, hidden_states, position_embeddings)[0], None


def project(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, ``[batch, heads, tokens, head_dim]`` each, of new tokens, ``[batch, tokens, hidden]``."""
    heads = (*hidden.shape[:2], -1, attention.head_dim)
    # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
    query = attention.q_norm(attention.q_proj(hidden).view(heads).transpose(1, 2))
    key = attention.k_norm(attention.k_proj(hidden).view(heads).transpose(1, 2))
    value = attention.v_proj(hidden).view(heads).transpose(1, 2)
    query, key = modeling.apply_rotary_pos_emb(query, key, cos, sin)
    return query, key, value


def masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma3Model`` makes, by its own function."""
    maker = modeling.Gemma3ForConditionalGeneration.create_masks_for_generate
    made: dict[str, Tensor | None] = maker(config=config, token_type_ids=types, position_ids=None, **call)
    return made


FAMILY = Family(
    modeling.Gemma3TextModel, modeling.Gemma3Attention, forward, modeling.Gemma3Model, "token_type_ids", masks
)
