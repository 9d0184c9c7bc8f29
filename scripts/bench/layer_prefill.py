"""The attention of one sliding layer over a whole prompt, and what the size of its blocks makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from swapatch.attention import BLOCK

from .checks import TOLERANCES
from .layer import Attend, random_rows, stock_prompt, windowed_prompt
from .rows import Row, name_of
from .sizes import Options, Shape
from .timing import Way, compare, timed


def layer_prefill(options: Options) -> Iterator[Row]:
    """The attention of one sliding layer over a whole prompt. Masks are made before the clock starts, on both sides."""
    sizes = options.sizes
    for shape, dtype, tokens in product(sizes.layer_prefill, TOLERANCES, sizes.layer_lengths):
        about = {"model": "one sliding layer", "setting": str(shape), "tokens": tokens, "dtype": name_of(dtype)}
        result = compare(prefill_layer_ways(shape, tokens, dtype), dtype, options)
        yield result.row("sdpa", "swapatch", case="layer-prefill", **about)


def prefill_layer_ways(shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, Way]:
    return {
        "sdpa": prompt_way(stock_prompt(shape, tokens, dtype), shape, tokens, dtype),
        "swapatch": windowed_way(shape, tokens, dtype),
    }


def windowed_way(shape: Shape, tokens: int, dtype: torch.dtype, block: int = BLOCK) -> Way:
    way = prompt_way(windowed_prompt(shape, tokens, block), shape, tokens, dtype)
    way()  # makes its masks
    return way


def prompt_way(attend: Attend, shape: Shape, tokens: int, dtype: torch.dtype) -> Way:
    rows = random_rows(shape, tokens, dtype)
    return lambda: timed(lambda: attend(*rows))


def blocks(options: Options) -> Iterator[Row]:
    """The same with other numbers of queries in a block; the ratio is over the block that swapatch takes."""
    sizes, tokens = options.sizes, options.sizes.layer_lengths[-2]
    for shape, dtype in product(sizes.layer_prefill, TOLERANCES):
        about = {"case": "blocks", "model": "one sliding layer", "tokens": tokens, "dtype": name_of(dtype)}
        tried = (BLOCK, *(size for size in sizes.blocks if size != BLOCK))
        ways = {f"block of {size}": windowed_way(shape, tokens, dtype, size) for size in tried}
        result = compare(ways, dtype, options)
        for name in list(ways)[1:]:
            yield result.row(name, f"block of {BLOCK}", setting=str(shape), **about)
