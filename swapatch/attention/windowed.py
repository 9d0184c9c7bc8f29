"""Attention block by block on CPU and CUDA, forward and backward; no keys are repeated for a group of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..geometry import Span
from ..rules import Rectangle, Rule
from .choice import EMULATED, Choice, choose, scores_of

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
    """One rectangle, in the way that was measured to be the fastest; as :func:`swapatch.attention.reference.attend`."""
    batch, heads, queries, dim = query.shape
    groups = heads // key.shape[1]
    if is_replaced():  # the call that transformers would make, of which only the size is another
        layer = SimpleNamespace(num_key_value_groups=groups, is_causal=causal)
        seen = None if mask is None else _over_all(mask, key.shape[2]) == 0
        out: Tensor = sdpa_attention_forward(layer, query, key, value, seen, scaling=scale, is_causal=causal)[0]
        return out.transpose(1, 2)
    if queries >= _FEW and not causal and choose(query).products and not query.requires_grad:
        return _by_products(query, key, value, mask, scale)
    if mask is not None:
        mask = _over_all(mask, key.shape[2])
    if queries == 1 and groups > 1:
        # The heads of a group become the rows of one query: the keys of the group are read once.
        folded = query.reshape(batch, key.shape[1], groups, dim)
        out = functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, heads, 1, dim)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
    )


_FEW = 16
"""Queries below which a matrix product is not worth the trouble."""


_MOST = 2**21
"""Scores that are computed at once, 8 MiB of them: larger temporary tensors are mapped anew each time, and slow."""


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scores, softmax and weighted values one after the other, in half precision with scores in float32.

    On a CPU torch's fused kernel multiplies small tiles, which is several times slower than one matrix product.
    """
    batch, kv_heads, keys, _ = key.shape
    # The heads of a group become further rows: [batch, kv_heads, group * queries, head_dim].
    rows = query.reshape(batch, kv_heads, -1, query.shape[3])
    some = max(1, _MOST // (rows.shape[2] * keys))
    if batch * kv_heads <= some:
        return _weighted(rows, key, value, mask, scale).view(query.shape)
    out = torch.empty_like(rows)
    for one in range(batch):
        of_one = mask if mask is None or mask.shape[0] == 1 else mask[one : one + 1]
        for first in range(0, kv_heads, some):
            part = slice(one, one + 1), slice(first, first + some)
            out[part] = _weighted(rows[part], key[part], value[part], of_one, scale)
    return out.view(query.shape)


def _weighted(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    (batch, kv_heads, _, dim), queries = rows.shape, 1 if mask is None else mask.shape[2]
    flat = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (rows, key, value)]
    scores = scores_of(flat[0], flat[1]).mul_(scale)
    _hide(scores.view(batch, kv_heads, -1, queries, key.shape[2]), mask)
    weights = scores.softmax(-1).to(value.dtype)
    if mask is not None:
        weights.nan_to_num_(0.0)  # of a query that sees nothing
    return torch.bmm(weights, flat[2]).view(batch, kv_heads, -1, dim)


def _hide(scores: Tensor, mask: Tensor | None) -> None:
    """Add a mask to the scores of the last keys, ``[batch, kv_heads, group, queries, keys]``: of all heads alike."""
    if mask is not None:
        scores[..., scores.shape[-1] - mask.shape[-1] :].add_(mask[:, :, None])


def _over_all(mask: Tensor, keys: int) -> Tensor:
    """A mask over the last keys as one over all of them."""
    return functional.pad(mask, (keys - mask.shape[-1], 0)) if mask.shape[-1] < keys else mask


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
    block: int | None,
) -> Tensor:
    """All queries, a rectangle at a time; arguments and result as of :func:`swapatch.attention.window_attention`."""
    choice = choose(query)
    size = block or choice.block
    if rule.is_plain(queries, keys) and keys.size < rule.window and _fuses(choice, queries):
        return attend(query, key, value, None, queries.size > 1, scale).transpose(1, 2).contiguous()
    batch, heads, tokens, dim = query.shape
    # A query that no rectangle covers sees nothing.
    out = (query.new_empty if rule.padding is None else query.new_zeros)((batch, tokens, heads, dim))
    for part, times in _alike(_cut(rule.rectangles(queries, keys, query, size), choice, size, query), choice):
        some = [part.of(tensor) for tensor in (query, key, value)]
        _attend_some(attend, some[0], some[1], some[2], part, times, rule, scale, part.of(out))
    return out


def _cut(parts: Iterable[Rectangle], choice: Choice, block: int, like: Tensor) -> Iterator[Rectangle]:
    """The same rectangles; those that are causal as torch's kernel can do it, or in blocks with a mask."""
    for part in parts:
        fused = part.queries.size == part.keys.size and _fuses(choice, part.queries)
        yield from [part] if fused else part.blocks(block, like)


def _fuses(choice: Choice, queries: Span) -> bool:
    """Whether a causal square is one for torch's fused kernel, which leaves out the half that nobody sees."""
    return not choice.products or queries.size < choice.block


def _alike(parts: Iterable[Rectangle], choice: Choice) -> Iterator[tuple[Rectangle, int]]:
    """The same, and how many of them look alike, each one block further down: those are one call."""
    first: Rectangle | None = None
    times = 0
    for part in parts:
        if first is not None and choice.together and part.is_further(first, times):
            times += 1
            continue
        if first is not None:
            yield first, times
        first, times = part, 1
    if first is not None:
        yield first, times


def _attend_some(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Rectangle,
    times: int,
    rule: Rule,
    scale: float,
    out: Tensor,
) -> None:
    """Write what the queries of some alike rectangles give into ``out``, ``[batch, queries, heads, head_dim]``."""
    size = part.queries.size
    rows = Span(part.queries.start, part.queries.start + times * size)
    seen = Span(part.keys.start, part.keys.stop + (times - 1) * size)
    some = rows_of(query, rows), rows_of(key, seen), rows_of(value, seen)
    mask = explicit(part.mask, some[0], part.keys.size, rule) if not part.causal else None
    if times == 1:
        out[:, rows.start : rows.stop] = attend(*some, mask, part.causal, scale).transpose(1, 2)
        return
    for queries, keys, values, result in zip(*some, out[:, rows.start : rows.stop], strict=True):
        # Windows that overlap are views of the same rows: [blocks, heads, rows, head_dim].
        q, k, v = (
            tensor.unfold(1, length, size).permute(1, 0, 3, 2)
            for tensor, length in ((queries, size), (keys, part.keys.size), (values, part.keys.size))
        )
        result.unflatten(0, (times, size)).copy_(attend(q, k, v, mask, False, scale).transpose(1, 2))


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    queries: Span,
    keys: Span,
    scale: float,
    block: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value for that of the output, ``[batch, queries, heads, head_dim]``.

    The weights of a block are computed again rather than kept, so memory is linear in the tokens: with weights ``P``
    and their gradient ``dP``, those of the scores are ``P * (dP - sum(P * dP))``.
    """
    compute, size = _backward_dtype(query), block or choose(query).block
    # Made from the gradient, which may be a batch of gradients that torch maps over behind our back.
    grads = (
        grad.new_zeros(query.shape),
        grad.new_zeros(key.shape, dtype=compute),
        grad.new_zeros(value.shape, dtype=compute),
    )
    for whole in rule.rectangles(queries, keys, query, size):
        for part in whole.blocks(size, query):
            _backward_block(part, scale, compute, (query, key, value, grad, *grads))
    return grads[0], grads[1].to(key.dtype), grads[2].to(value.dtype)


def _backward_block(part: Rectangle, scale: float, compute: torch.dtype, tensors: tuple[Tensor, ...]) -> None:
    """Put the gradients of one rectangle where they belong, those of keys and values onto what is there."""
    query, key, value, grad, by_query, by_key, by_value = map(part.of, tensors)
    (batch, heads, _, dim), kv_heads, rows, seen = query.shape, key.shape[1], part.queries, part.keys
    # [batch, heads, queries, head_dim] -> [batch, kv_heads, group * queries, head_dim]
    folded = (batch, kv_heads, heads // kv_heads * rows.size, dim)
    q = rows_of(query, rows).reshape(folded).to(compute)
    out = grad[:, rows.start : rows.stop].transpose(1, 2).reshape(folded).to(compute)
    k, v = rows_of(key, seen).to(compute), rows_of(value, seen).to(compute)
    # [batch, kv_heads, group * queries, keys]
    weights = _weights(q @ k.transpose(2, 3), scale, part.mask, rows.size)
    slope = (out @ v.transpose(2, 3)).to(weights.dtype)
    slope = slope.sub_((weights * slope).sum(-1, keepdim=True)).mul_(weights).mul_(scale).to(compute)
    by_query[:, :, rows.start : rows.stop] = (slope @ k).view(batch, heads, rows.size, dim)
    rows_of(by_key, seen).add_(slope.transpose(2, 3) @ q)
    rows_of(by_value, seen).add_(weights.to(compute).transpose(2, 3) @ out)


def _weights(scores: Tensor, scale: float, mask: Tensor | None, queries: int) -> Tensor:
    """Softmax, in float32 at least; a query that sees nothing gets zeros."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
    if mask is None:
        return scores.softmax(-1)
    batch, kv_heads, _, keys = scores.shape
    _hide(scores.view(batch, kv_heads, -1, queries, keys), mask)
    return scores.softmax(-1).nan_to_num_(0.0)


def _backward_dtype(query: Tensor) -> torch.dtype:
    """What the products of a backward pass are computed in: float32 where half precision is emulated.

    On a CPU without instructions for it, a backward pass in bfloat16 took 10 to 40 times as long as one in float32.
    """
    return torch.float32 if query.device.type == "cpu" and query.dtype in EMULATED else query.dtype


def rows_of(tensor: Tensor, rows: Span) -> Tensor:
    """A view of some rows of ``[batch, heads, rows, head_dim]``, or the tensor itself for all of them."""
    return tensor if rows == (0, tensor.shape[2]) else tensor[:, :, rows.start : rows.stop]
