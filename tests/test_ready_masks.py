"""Masks that the caller has made. The calls are of forwards; how they are run and watched is in `generation.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_logits, cache_key, forced
from generation import PROMPT, assert_same_outcome, outcome, run, some_species
from transformers import DynamicCache
from zoo import FULL, SLIDING, Model, Species, named_ids, text_config

import swapatch


def ready_masks(cache: Any, model: Model, queries: int, kind: str) -> Any:
    """Masks for the next tokens: 4D for both kinds of layer, or one for each; random holes, the token itself seen."""
    seen = cache.get_seq_length()
    window = text_config(model).sliding_window
    query = torch.arange(seen, seen + queries)[:, None]
    key = torch.arange(seen + queries)
    holes = torch.rand(seen + queries, generator=torch.Generator().manual_seed(1)) < 0.2
    allowed = (key <= query) & (~holes | (key == query))
    if kind == "one for both":
        return allowed[None, None]
    first = max(0, seen - window + 1)
    near = allowed & (key > query - window)
    return {FULL: allowed[None, None], SLIDING: near[None, None, :, first:]}


def additive(mask: Any) -> Any:
    if isinstance(mask, dict):
        return {name: additive(part) for name, part in mask.items()}
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("convert", (lambda mask: mask, additive), ids=("bool", "additive"))
@pytest.mark.parametrize("kind", ("one for both", "one for each"))
@some_species
def test_ready_made_masks(species: Species, kind: str, convert: Callable[[Any], Any], layout: str) -> None:
    """They reach the layers as they are, over a prompt, several tokens and single ones."""
    model = species.build(8)
    ids = named_ids(model, 1, PROMPT + 15)
    # One mask for both can only fit where both kinds of layer have the same keys: within the window, or in a prefill.
    sizes = [PROMPT] if kind == "one for both" else [PROMPT, 5, *[1] * 10]

    @torch.no_grad()
    def call(model: Model) -> Any:
        cache = DynamicCache(config=text_config(model))
        if swapatch.is_patched(model):
            cache = swapatch.CompactCache(model, layout=layout)
        logits = []
        for part in ids[:, : sum(sizes)].split(sizes, dim=1):
            mask = convert(ready_masks(cache, model, part.shape[1], kind))
            logits.append(model(part, attention_mask=mask, **{cache_key(model): cache}).logits)
        return torch.cat(logits, dim=1)

    want = run(model, None, call)
    got = run(model, layout, call)
    assert_same_logits(got.output, want.output)
    assert (got.compact, got.stock) == (0, len(sizes))


@pytest.mark.parametrize("convert", (lambda mask: mask, additive), ids=("bool", "additive"))
@some_species
def test_ready_made_mask_that_does_not_fit(species: Species, convert: Callable[[Any], Any], layout: str) -> None:
    """Past the window one mask cannot serve both kinds of layer: the same error as stock's."""
    model = species.build(8)
    ids = named_ids(model, 1, PROMPT + 1)

    def call(model: Model) -> Any:
        cache = forced(model, ids[:, :PROMPT], prompt=PROMPT).cache
        mask = convert(ready_masks(cache, model, 1, "one for both"))
        with torch.no_grad():
            return model(ids[:, PROMPT:], attention_mask=mask, **{cache_key(model): cache})

    want = outcome(model, None, call)
    assert isinstance(want, RuntimeError)
    assert_same_outcome(outcome(model, layout, call), want)
