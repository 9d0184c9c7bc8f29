"""The attention of one sliding layer over a whole prompt, and which way to compute its rectangles is the fastest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import product, starmap
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from swapatch.attention import windowed
from swapatch.attention.choice import Choice, choose, key

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


def windowed_way(shape: Shape, tokens: int, dtype: torch.dtype) -> Way:
    way = prompt_way(windowed_prompt(shape, tokens), shape, tokens, dtype)
    way()  # makes its masks
    return way


def prompt_way(attend: Attend, shape: Shape, tokens: int, dtype: torch.dtype) -> Way:
    rows = random_rows(shape, tokens, dtype)
    return lambda: timed(lambda: attend(*rows))


def choices(options: Options) -> Iterator[Row]:
    """The same computed in all ways there are; the ratio is over the way that swapatch takes.

    :func:`chosen` makes a table of these rows.
    """
    sizes, tokens = options.sizes, options.sizes.layer_lengths[-2]
    for shape, dtype in product(sizes.layer_prefill, TOLERANCES):
        about = {"case": "choices", "model": "one sliding layer", "tokens": tokens, "dtype": name_of(dtype)}
        taken = choose(torch.empty((0,), dtype=dtype))
        tried = product(sizes.blocks, (False, True) if dtype.itemsize == 2 else (False,), (False, True))
        ways = {str(choice): chosen_way(shape, tokens, dtype, choice) for choice in (taken, *starmap(Choice, tried))}
        result = compare(ways, dtype, options)
        for name in ways:
            yield result.row(name, str(taken), setting=str(shape), **about)


def chosen_way(shape: Shape, tokens: int, dtype: torch.dtype, choice: Choice) -> Way:
    way = windowed_way(shape, tokens, dtype)

    def run() -> tuple[float, Tensor]:
        with mock.patch.object(windowed, "choose", return_value=choice):
            return way()

    return run


def chosen(rows: Iterable[Row]) -> dict[str, Any]:
    """What ``swapatch/attention/table.json`` holds: for each dtype the way that was the fastest over all shapes."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    about = {}
    for row in rows:
        if row.case == "choices" and row.ratio is not None:
            about = {"cpu": row.cpu, "threads": row.threads, "torch": row.torch}
            found[key("cpu", getattr(torch, row.dtype))][row.stock] += math.log(row.ratio)
    fastest = {name: min(ways, key=lambda way: ways[way]) for name, ways in found.items()}  # called now
    return {**about, "choices": {name: Choice.named(way)._asdict() for name, way in sorted(fastest.items())}}
