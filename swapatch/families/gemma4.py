"""Gemma 4, and Gemma 4 unified with the same attention: the forward of a sliding layer, and the masks of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4 as modeling
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from ..masks import text_masks
from ..step import Step


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
    step = attention_mask
    if not isinstance(step, Step):
        stock: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, shared_kv_states, *args, **kwargs
        )
        return stock
    batch, tokens = hidden_states.shape[:2]
    heads = (batch, tokens, -1, self.head_dim)
    # [batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim]
    query = self.q_norm(self.q_proj(hidden_states).view(heads))
    query = modeling.apply_rotary_pos_emb(query, *position_embeddings, unsqueeze_dim=2).transpose(1, 2)
    if self.is_kv_shared_layer:
        keys, values = shared_kv_states[self.layer_type]
    else:
        key = self.k_norm(self.k_proj(hidden_states).view(heads))
        key = modeling.apply_rotary_pos_emb(key, *position_embeddings, unsqueeze_dim=2).transpose(1, 2)
        value = self.v_norm(self.v_proj(hidden_states).view(heads)).transpose(1, 2)
        keys, values = step.write(self.layer_idx, key, value)
        if self.store_full_length_kv:
            shared_kv_states[self.layer_type] = keys, values

    out = step.attend(query, keys, values, self.scaling)
    # [batch, tokens, heads, head_dim] -> [batch, tokens, hidden]
    return self.o_proj(out.reshape(batch, tokens, -1)), None


def masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma4Model`` makes, by its own function."""
    maker = modeling.Gemma4ForConditionalGeneration.create_masks_for_generate
    made: dict[str, Tensor | None] = maker(config=config, mm_token_type_ids=types, position_ids=None, **call)
    return made


def unified_masks(config: Any, types: Tensor | None, **call: Any) -> dict[str, Tensor | None]:
    """The masks that ``Gemma4UnifiedModel`` makes in its forward; what it makes for ``generate`` is something else."""
    if types is not None:
        device = call["inputs_embeds"].device
        call["block_sequence_ids"] = unified.get_block_sequence_ids_for_mask(types, device=device)
    return text_masks(config, **call)
