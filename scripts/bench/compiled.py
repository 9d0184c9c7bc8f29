"""A decode step under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers.cache_utils import StaticCache

import swapatch

from .decode import DECODE_PATIENCE, decode_way, fill, one_step, room_for
from .models import random_model, random_name
from .rows import Row, failed, name_of
from .sizes import Options
from .timing import Way, compare


def compiled(options: Options) -> Iterator[Row]:
    """A decode step under torch.compile, static global layers on both sides."""
    dtype, sizes = torch.float32, options.sizes
    torch.manual_seed(0)
    stock = random_model(sizes.gemma3, dtype)
    patched = deepcopy(stock)
    swapatch.patch(patched)
    about = {"case": "compiled", "model": random_name(stock.config), "dtype": name_of(dtype)}
    for batch in (1, sizes.batch):
        about.update(setting=one_step(batch), tokens=sizes.compiled_tokens)
        try:
            result = compare(
                compiled_ways(stock, patched, batch, dtype, options), dtype, options, patience=DECODE_PATIENCE
            )
        except Exception as error:  # whatever a compiler finds to say
            yield failed(error, stock="stock static, compiled", **about)
            continue
        for name in ("swapatch anchored, compiled", "swapatch ring, compiled"):
            yield result.row("stock static, compiled", name, **about)


def compiled_ways(stock: Any, patched: Any, batch: int, dtype: torch.dtype, options: Options) -> dict[str, Way]:
    torch._dynamo.reset()  # else a second batch would compile for any
    config, tokens, steps = stock.config, options.sizes.compiled_tokens, options.sizes.decode_steps
    room = room_for(tokens, options)
    caches = {
        "stock static, compiled": (stock, StaticCache(config, room)),
        "swapatch anchored, compiled": (patched, swapatch.CompactCache(config, max_cache_len=room)),
        "swapatch ring, compiled": (patched, swapatch.CompactCache(config, max_cache_len=room, layout="ring")),
    }
    ways = {}
    for name, (model, cache) in caches.items():
        fill(cache, config, tokens, dtype, batch)
        ways[name] = decode_way(torch.compile(model), cache, steps, patched=False, batch=batch)
        ways[name]()  # compiles
    return ways
