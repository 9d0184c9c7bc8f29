"""Attention on CPU and CUDA: each rectangle by one call of torch's fused kernel, keys never repeated for a group."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PREFILL_BLOCK = 256
"""Queries in one block of a prefill: each block reads ``window - 1`` old keys and its own."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Masked attention; arguments and result as of :func:`swapatch.attention.reference.attend`."""
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    if queries == 1 and groups > 1:
        # The heads of a group become the rows of one query: the keys of the group are read once.
        folded = query.reshape(batch, key.shape[1], groups, dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, dim)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )
