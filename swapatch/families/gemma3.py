"""Gemma 3: the forward of a sliding attention layer, and the masks of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as modeling

from ..step import Step


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
    step = attention_mask
    if not isinstance(step, Step):
        stock: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, *args, **kwargs
        )
        return stock
    batch, tokens = hidden_states.shape[:2]
    heads = (batch, tokens, -1, self.head_dim)
    # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
    query = self.q_norm(self.q_proj(hidden_states).view(heads).transpose(1, 2))
    key = self.k_norm(self.k_proj(hidden_states).view(heads).transpose(1, 2))
    value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)

    keys, values = step.write(self.layer_idx, key, value)
    out = step.attend(query, keys, values, self.scaling)
    # [batch, tokens, heads, head_dim] -> [batch, tokens, hidden]
    return self.o_proj(out.reshape(batch, tokens, -1)), None


def masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma3Model`` makes, by its own function."""
    maker = modeling.Gemma3ForConditionalGeneration.create_masks_for_generate
    made: dict[str, Tensor | None] = maker(config=config, token_type_ids=types, position_ids=None, **call)
    return made
