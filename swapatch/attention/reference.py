"""The definition of masked attention, in float32 at least and in few words. Slow; for tests and debugging."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Softmax of the scaled, masked scores, times the values; a query that sees nothing gets zeros.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key, value: ``[batch, kv_heads, keys, head_dim]``, ``heads`` a whole multiple of ``kv_heads``.
        mask: additive, ``[batch or 1, 1, queries, some]`` over the last keys, or None.
        causal: the last query sees all keys, each one before it one key less; only without a mask.
        scale: multiplies the scores.

    Returns:
        ``[batch, heads, queries, head_dim]`` in the query's dtype.

    >>> ones = torch.ones(1, 1, 2, 4)
    >>> attend(ones, ones, ones, None, True, 1.0).flatten().unique()
    tensor([1.])
    """
    groups = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(wide).repeat_interleave(groups, dim=1)
    values = value.to(wide).repeat_interleave(groups, dim=1)
    scores = query.to(wide) @ keys.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(1 + scores.shape[3] - scores.shape[2]), -torch.inf
        )
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (key.shape[2] - mask.shape[-1], 0))
        blind = (mask == -torch.inf).all(-1, keepdim=True)  # sees nothing: no weights, and no gradient that is none
        weights = torch.softmax((scores + mask).masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ values).to(query.dtype)
