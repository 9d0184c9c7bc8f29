"""One sliding layer's attention, by stock and by swapatch, without a model around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import Gemma3TextConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate

from swapatch._compat import CACHE_NAME
from swapatch.attention import window_attention
from swapatch.geometry import Span
from swapatch.rules import Rule

from .sizes import Shape

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value, ``[1, heads, tokens, dim]``, to ``[1, tokens, heads, dim]``."""


def layer_config(shape: Shape) -> Gemma3TextConfig:
    """A model of one sliding layer; nobody builds it, but caches and masks are made from it."""
    return Gemma3TextConfig(
        hidden_size=shape.heads * shape.dim,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        sliding_window=shape.window,
        attn_implementation="sdpa",
    )


def random_rows(shape: Shape, tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, ``[1, heads, tokens, dim]``, strided as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, tokens, heads, shape.dim, generator=generator).to(dtype).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return query, key, value


def stock_mask(shape: Shape, tokens: int, dtype: torch.dtype, layer: Any = None) -> Tensor | None:
    """The mask that transformers hands to a sliding layer, made once a forward for all layers: never timed here."""
    cache = None if layer is None else Cache(layers=[layer])
    stub = torch.empty(1, tokens, 0, dtype=dtype)
    masks = create_masks_for_generate(layer_config(shape), stub, None, **{CACHE_NAME: cache})
    return masks["sliding_attention"]


def stock_attention(shape: Shape) -> Callable[..., Tensor]:
    """transformers' own SDPA path, as a sliding layer calls it."""
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=shape.dim**-0.5)[0]

    return attend


def stock_prompt(shape: Shape, tokens: int, dtype: torch.dtype) -> Attend:
    """Stock's attention over a whole prompt, behind the band mask."""
    return partial(stock_attention(shape), mask=stock_mask(shape, tokens, dtype))


def windowed_prompt(shape: Shape, tokens: int) -> Attend:
    """The same in windows; the small masks of its blocks are made at the first call."""
    rule, prompt = Rule(shape.window), Span(0, tokens)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return window_attention(query, key, value, rule, prompt, prompt, shape.dim**-0.5)

    return attend
