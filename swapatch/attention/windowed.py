"""Attention on CPU and CUDA: each rectangle by one call of torch's fused kernel, keys never repeated for a group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PREFILL_BLOCK = 256
"""Queries in one block of a prefill: each block reads ``window - 1`` old keys and its own."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Masked attention; arguments and result as of :func:`swapatch.attention.reference.attend`."""
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    if queries == 1 and groups >= _fold_from(query):
        # The heads of a group become the rows of one query: the keys of the group are read once.
        folded = query.reshape(batch, key.shape[1], groups, dim)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, dim)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )


def _fold_from(query: Tensor) -> int:
    """How many heads a group must have for folding to be faster, by measurement.

    On a CPU torch computes a single bfloat16 row without a matrix product, which takes two heads a call each in little
    more than half the time of both folded, and four in about the same.
    """
    return 3 if query.dtype == torch.bfloat16 and query.device.type == "cpu" else 2
