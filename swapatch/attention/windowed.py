"""Attention block by block on CPU and CUDA, forward and backward; no keys are repeated for a group of heads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..geometry import Span
from ..rules import Rectangle, Rule

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""``(query, key, value, mask, causal, scale) -> output``, all ``[batch, heads, rows, head_dim]``."""


def is_replaced() -> bool:
    """Whether somebody has put a function of his own in the place of torch's attention, whose derivative it then is.

    For good, or by a mode that all functions of torch go through.
    """
    if functional.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:
        return True
    modes = range(torch._C._len_torch_function_stack())
    return any(not type(torch._C._get_function_stack_at(mode)).__module__.startswith("torch.") for mode in modes)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """One rectangle by one call of torch's fused kernel; as :func:`swapatch.attention.reference.attend`."""
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    if is_replaced():  # the call that transformers would make, of which only the size is another
        layer = SimpleNamespace(num_key_value_groups=groups, is_causal=causal)
        seen = None if mask is None else mask == 0
        out: Tensor = sdpa_attention_forward(layer, query, key, value, seen, scaling=scale, is_causal=causal)[0]
        return out.transpose(1, 2)
    if queries == 1 and groups >= _fold_from(query):
        # The heads of a group become the rows of one query: the keys of the group are read once.
        folded = query.reshape(batch, key.shape[1], groups, dim)
        out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, dim)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )


def explicit(mask: Tensor | None, like: Tensor, keys: int, rule: Rule) -> Tensor | None:
    """The mask of a rectangle that sees all, if transformers would make one: for a function in torch's place."""
    if mask is None and keys >= rule.window and is_replaced():
        return like.new_zeros((1, 1, like.shape[2], keys))
    return mask


def forward(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    queries: Span,
    keys: Span,
    scale: float,
    block: int,
) -> Tensor:
    """All queries, a rectangle at a time; arguments and result as of :func:`swapatch.attention.window_attention`."""
    if rule.is_causal_square(queries, keys):
        whole = Span(0, queries.size)
        parts = [Rectangle(whole, whole, causal=queries.size > 1)]
    else:
        parts = rule.rectangles(queries, keys, query, block)
    batch, heads, tokens, dim = query.shape
    if len(parts) == 1:
        _, seen, mask, causal = parts[0]
        mask = mask if causal else explicit(mask, query, seen.size, rule)
        part = attend(query, rows_of(key, seen), rows_of(value, seen), mask, causal, scale)
        return part.transpose(1, 2).contiguous()
    out = query.new_empty((batch, tokens, heads, dim))
    for rows, seen, mask, _ in parts:
        some = rows_of(query, rows)
        mask = explicit(mask, some, seen.size, rule)
        part = attend(some, rows_of(key, seen), rows_of(value, seen), mask, False, scale)
        out[:, rows.start : rows.stop] = part.transpose(1, 2)
    return out


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    queries: Span,
    keys: Span,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value for that of the output, ``[batch, queries, heads, head_dim]``.

    The weights of a block are computed again rather than kept, so memory is linear in the tokens: with weights ``P``
    and their gradient ``dP``, those of the scores are ``P * (dP - sum(P * dP))``.
    """
    (batch, heads, _, dim), kv_heads = query.shape, key.shape[1]
    compute = _backward_dtype(query)
    # From the gradient, which may be a batch of gradients that torch maps over behind our back.
    by_query = grad.new_empty(query.shape)
    by_key, by_value = (grad.new_zeros(rows.shape, dtype=compute) for rows in (key, value))
    for rows, seen, mask, _ in rule.rectangles(queries, keys, query, block):
        # [batch, heads, queries, head_dim] -> [batch, kv_heads, group * queries, head_dim]
        folded = (batch, kv_heads, heads // kv_heads * rows.size, dim)
        q = rows_of(query, rows).reshape(folded).to(compute)
        out = grad[:, rows.start : rows.stop].transpose(1, 2).reshape(folded).to(compute)
        k, v = rows_of(key, seen).to(compute), rows_of(value, seen).to(compute)
        # [batch, kv_heads, group * queries, keys]
        weights = _weights(q @ k.transpose(2, 3), scale, mask, rows.size)
        slope = (out @ v.transpose(2, 3)).to(weights.dtype)
        slope = slope.sub_((weights * slope).sum(-1, keepdim=True)).mul_(weights).mul_(scale).to(compute)
        by_query[:, :, rows.start : rows.stop] = (slope @ k).view(batch, heads, rows.size, dim)
        rows_of(by_key, seen).add_(slope.transpose(2, 3) @ q)
        rows_of(by_value, seen).add_(weights.to(compute).transpose(2, 3) @ out)
    return by_query, by_key.to(key.dtype), by_value.to(value.dtype)


def _weights(scores: Tensor, scale: float, mask: Tensor | None, queries: int) -> Tensor:
    """Softmax, in float32 at least; a query that sees nothing gets zeros."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if mask is None:
        return scores.softmax(-1)
    batch, kv_heads, _, keys = scores.shape
    # The mask is the same for all heads of a group: [batch or 1, 1, 1, queries, keys].
    scores.view(batch, kv_heads, -1, queries, keys).add_(mask[:, :, None])
    return scores.softmax(-1).nan_to_num_(0.0)


_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_EMULATED = frozenset(dtype for dtype, asked in _ASKED.items() if not getattr(torch.ops.mkldnn, asked, bool)())
"""The dtypes that the CPU has no instructions for. Found out once: a compiler could not ask."""


def _backward_dtype(query: Tensor) -> torch.dtype:
    """What the products of a backward pass are computed in: float32 where half precision is emulated.

    On a CPU without instructions for it, a backward pass in bfloat16 took 10 to 40 times as long as one in float32.
    """
    return torch.float32 if query.device.type == "cpu" and query.dtype in _EMULATED else query.dtype


def _fold_from(query: Tensor) -> int:
    """How many heads a group must have for folding to be faster, by measurement.

    On a CPU with instructions for it torch computes a single bfloat16 row without a matrix product, which takes two
    heads a call each in little more than half the time of both folded, and four in about the same. Where bfloat16 is
    emulated, two heads folded are 6 times faster than apart.
    """
    native = query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.dtype not in _EMULATED
    return 3 if native else 2


def rows_of(tensor: Tensor, rows: Span) -> Tensor:
    """A view of some rows of ``[batch, heads, rows, head_dim]``, or the tensor itself for all of them."""
    return tensor if rows == (0, tensor.shape[2]) else tensor[:, :, rows.start : rows.stop]
