"""The attention of one sliding layer in training: forward and backward over a whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from .checks import TOLERANCES
from .layer import Attend, random_rows, stock_prompt, windowed_prompt
from .rows import Row, name_of
from .sizes import Options, Shape
from .timing import Way, compare, timed


def layer_training(options: Options) -> Iterator[Row]:
    """One sliding layer's attention, forward and backward; outputs and all three gradients must be equal."""
    shape = options.sizes.layer_training
    about = {"case": "layer-training", "model": "one sliding layer", "setting": f"{shape}, forward and backward"}
    for dtype, tokens in product(TOLERANCES, options.sizes.layer_training_lengths):
        result = compare(training_layer_ways(shape, tokens, dtype), dtype, options)
        yield result.row("sdpa", "swapatch", tokens=tokens, dtype=name_of(dtype), **about)


def training_layer_ways(shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, Way]:
    rows = [row.requires_grad_() for row in random_rows(shape, tokens, dtype)]
    # What comes back from the loss is laid out as the output is, [1, tokens, heads, dim]; any random numbers will do.
    upstream = random_rows(shape, tokens, dtype, seed=1)[0].transpose(1, 2)

    def way(attend: Attend) -> Way:
        def forward_and_backward() -> tuple[Tensor, ...]:
            out = attend(*rows)
            return out.detach(), *torch.autograd.grad(out, rows, upstream)

        def run() -> tuple[float, tuple[Tensor, ...]]:
            with torch.enable_grad():
                return timed(forward_and_backward)

        return run

    ways = {"sdpa": way(stock_prompt(shape, tokens, dtype)), "swapatch": way(windowed_prompt(shape, tokens))}
    ways["swapatch"]()  # makes its masks, which stock was given
    return ways
