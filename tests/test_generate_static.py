"""Caches of a fixed length: with modes of generation, with drafts, and compiled. See `generation.py`."""

from typing import Any

import pytest
import torch
from compare import cache_key, cache_of
from generation import (
    BEAMS,
    NEW,
    PROMPT,
    STATIC,
    assert_bounded,
    assert_compact,
    assert_same,
    draft,
    generate,
    outcome,
    prompt,
    run,
    skip_if_stock_cannot,
    some_species,
)
from transformers import CompileConfig, StaticCache
from zoo import BY_NAME, SLIDING, Species

import swapatch
from swapatch.step import Step

pytestmark = pytest.mark.usefixtures("device")

FIXED_MODES = {
    "greedy": {},
    "beams": BEAMS,
    "chunks": {"prefill_chunk_size": 7},
    "longer than needed": {"max_cache_len": 400},
}


@pytest.mark.parametrize("options", FIXED_MODES.values(), ids=FIXED_MODES.keys())
@some_species
def test_static_cache(species: Species, options: dict[str, Any], layout: str) -> None:
    """Asked for by name: the global layers are static, the sliding ones are bounded all the same."""
    model = species.build(8)
    call = {**prompt(species, model, PROMPT, 3), **STATIC, **options}
    if "prefill_chunk_size" in options:
        call |= species.inputs(model, (PROMPT, 3))
        call.pop("mm_token_type_ids", None)
        call.pop("token_type_ids", None)
    skip_if_stock_cannot(model, lambda model: generate(model, NEW, **call))
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert type(cache_of(want.output)) is StaticCache
    assert_compact(got, want, model, layout)
    assert cache_of(got.output).get_max_length() == cache_of(want.output).get_max_length()


@some_species
def test_masks_made_ahead_are_made_contiguous(species: Species, layout: str) -> None:
    """From 5.18 to 5.23 `generate` asks that of each mask it made ahead, without looking what kind of thing it is."""
    model = species.build(8)
    cache = swapatch.CompactCache(model, max_cache_len=200, layout=layout)
    call = {
        "config": model.config,
        "inputs_embeds": torch.empty(1, 5, 0, device=model.device),
        "attention_mask": None,
        "position_ids": None,
    }
    with swapatch.patch(model, layout=layout):
        masks = model.create_masks_for_generate(**call, **{cache_key(model): cache})
    ready = {name: mask.contiguous() for name, mask in masks.items() if mask is not None}
    assert isinstance(ready[SLIDING], Step)


@pytest.mark.parametrize("helper", ("itself", "prompt lookup"))
@some_species
def test_static_cache_and_drafts(species: Species, helper: str, layout: str) -> None:
    """Stock refuses it past the window; who does it gives the same tokens."""
    model = draft(species.build(8), 3)
    # Room for drafts beyond the last token: stock's static layers fail at the end otherwise, whatever the window.
    inputs = {**prompt(species, model, PROMPT), "max_cache_len": 400}
    options = {"assistant_model": model} if helper == "itself" else {"prompt_lookup_num_tokens": 4}
    greedy = generate(model, NEW, **inputs, **STATIC)
    want = outcome(model, None, lambda model: generate(model, NEW, **inputs, **STATIC, **options))
    got = outcome(model, layout, lambda model: generate(model, NEW, **inputs, **STATIC, **options))
    if isinstance(got, Exception):
        assert type(got) is type(want)
    else:
        assert_same(got.output, greedy)


@pytest.mark.parametrize("name", ("gemma3_text", "gemma4_ple_shared"))
def test_static_cache_compiled(name: str, layout: str) -> None:
    """The slow one: traced for real, without generating machine code, on a CPU too."""
    if name not in BY_NAME:
        pytest.skip("this transformers has no such model")
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    species = BY_NAME[name]
    model = species.build(8)
    call = {**prompt(species, model, PROMPT), **STATIC}
    want = generate(model, NEW, **call)
    torch.compiler.reset()
    with swapatch.patch(model, layout=layout):
        got = generate(model, NEW, **call, compile_config=config)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    assert_same(got, want)
    assert_bounded(cache_of(got), model, layout)
    assert graphs > 0
