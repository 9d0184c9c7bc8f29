"""Hidden states of a whole text and nothing else, as for perplexities, embeddings or a reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import ROUNDING, TOLERANCES
from .models import patched_if, subject
from .rows import Row, name_of
from .sizes import Options
from .timing import Way, compare, timed


def scoring(options: Options) -> Iterator[Row]:
    """The text model without its head; stock keeps no cache, swapatch is measured without and with one."""
    for dtype, lengths in options.sizes.scoring.items():
        model = subject(options.quick, dtype)
        # The sizes have float32 first: what is found equal there may round in bfloat16 as a whole model does.
        tolerance = TOLERANCES[dtype] if dtype == torch.float32 else ROUNDING
        for tokens in lengths:
            about = {"case": "scoring", "model": model.name, "setting": "text model without its head"}
            about.update(tokens=tokens, dtype=name_of(dtype))
            result = compare(scoring_ways(model.model, model.prompt(tokens)), dtype, options, tolerance)
            for patched in ("swapatch", "swapatch, with a cache"):
                yield result.row("stock sdpa", patched, **about)


def scoring_ways(model: Any, ids: Tensor) -> dict[str, Way]:
    return {
        "stock sdpa": scoring_way(model, ids),
        "swapatch": scoring_way(model, ids, patched=True),
        "swapatch, with a cache": scoring_way(model, ids, patched=True, cached=True),
    }


def scoring_way(model: Any, ids: Tensor, *, patched: bool = False, cached: bool = False) -> Way:
    def run() -> tuple[float, Tensor]:
        with patched_if(patched, model):
            return timed(lambda: model.model(ids, use_cache=cached).last_hidden_state)

    return run
