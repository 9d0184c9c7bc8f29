"""What stays stock's: other caches, training, continuous batching; and what a caller's own compact cache does.

See `generation.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from compare import assert_same_logits, cache_key, cache_of, sliding_rows
from generation import (
    NEW,
    NO_END,
    PROMPT,
    STATIC,
    Run,
    assert_same,
    assert_same_outcome,
    generate,
    outcome,
    prompt,
    run,
    some_species,
    watched,
)
from transformers import DynamicCache, GenerationConfig, StaticCache
from zoo import BY_NAME, OLD, PAD, Model, Species, named_ids, text_config, text_model

import swapatch


def no_cache(species: Species, model: Model) -> dict[str, Any]:
    return {"use_cache": False}


def offloaded(species: Species, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "offloaded"}


def offloaded_static(species: Species, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "offloaded_static"}


def quantized(species: Species, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "quantized"}


def own_dynamic(species: Species, model: Model) -> dict[str, Any]:
    return {cache_key(model): DynamicCache(config=text_config(model))}


def own_dynamic_without_windows(species: Species, model: Model) -> dict[str, Any]:
    return {cache_key(model): DynamicCache()}


def own_static(species: Species, model: Model) -> dict[str, Any]:
    return {cache_key(model): StaticCache(text_config(model), PROMPT + NEW)}


def both_kinds_of_cache(species: Species, model: Model) -> dict[str, Any]:
    return own_dynamic(species, model) | STATIC


# How many of the calls go through windows; None where stock cannot do it either, here.
OTHERS: dict[Callable[[Species, Model], dict[str, Any]], int | None] = {
    no_cache: NEW,
    offloaded: None,
    offloaded_static: None,
    quantized: None,
    own_dynamic: NEW,
    own_dynamic_without_windows: NEW,
    own_static: 1,  # its steps have one shape as they are
    both_kinds_of_cache: None,
}


@pytest.mark.parametrize("options", OTHERS)
@some_species
def test_other_caches(
    species: Species,
    options: Callable[[Species, Model], dict[str, Any]],
    layout: str,
    made: list[swapatch.CompactCache],
) -> None:
    """The same outcome, be it an error, with the same kind of cache and no compact one in sight."""
    model = species.build(8)
    inputs = prompt(species, model, PROMPT, 3)
    want = outcome(model, None, lambda model: generate(model, NEW, **inputs, **options(species, model)))
    got = outcome(model, layout, lambda model: generate(model, NEW, **inputs, **options(species, model)))
    if assert_same_outcome(got, want):
        windowed = OTHERS[options]
        if windowed is not None:
            assert (got.compact, got.stock) == (windowed, want.stock - windowed)
        assert_same_kind_of_cache(got, want)
    assert not made


def assert_same_kind_of_cache(got: Run, want: Run) -> None:
    caches = [cache_of(run.output) if {"cache", "past_key_values"} & set(run.output) else None for run in (got, want)]
    assert type(caches[0]) is type(caches[1])
    if caches[0] is not None:
        assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]


@pytest.mark.parametrize("fixed", (None, 400))
@pytest.mark.parametrize("used", ("patched", "not patched"))
@some_species
def test_a_compact_cache_that_is_passed(species: Species, used: str, fixed: int | None, layout: str) -> None:
    """Made by hand it is used as any other, by a model that is not patched too."""
    model = species.build(8)
    inputs = prompt(species, model, PROMPT, 3)
    # An encoder-free model attends images otherwise when its masks are made ahead, as they are for a static cache.
    want = run(model, None, lambda model: generate(model, NEW, **inputs, **(STATIC if fixed else {})))
    cache = swapatch.CompactCache(model, max_cache_len=fixed, layout=layout)
    call = {**inputs, cache_key(model): cache}
    got = run(model, layout if used == "patched" else None, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert cache_of(got.output) is cache
    assert max(sliding_rows(cache)) < cache.get_seq_length() == PROMPT + NEW - 1
    assert (got.compact if used == "patched" else got.stock) == NEW


@some_species
def test_training_mode(species: Species, layout: str) -> None:
    """All is stock's code: dropout draws the same numbers."""
    model = species.build(8)
    for layer in text_model(model).layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    inputs = prompt(species, model, PROMPT)
    want = run(model, None, lambda model: generate(model, NEW, **inputs))
    got = run(model, layout, lambda model: generate(model, NEW, **inputs))
    assert_same(got.output, want.output)
    assert got.compact == 0
    without = generate(model.eval(), NEW, **inputs)
    assert not torch.equal(torch.stack(without.logits), torch.stack(got.output.logits))


@some_species
def test_gradients(species: Species, layout: str) -> None:
    """A forward with gradients goes through windows, on rows that keep their graph."""
    model = species.build(8)
    ids = named_ids(model, 1, PROMPT)
    want = model(ids, use_cache=True).logits
    with watched(model) as seen, swapatch.patch(model, layout=layout):
        output = model(ids, use_cache=True)
    assert output.logits.requires_grad
    assert isinstance(cache_of(output), swapatch.CompactCache)
    assert seen == [True]
    assert_same_logits(output.logits.detach(), want.detach())


@pytest.mark.parametrize("name", ("gemma3_text", "gemma3_vision", "gemma4_ple_shared"))
def test_generate_batch(name: str, layout: str, made: list[swapatch.CompactCache]) -> None:
    """Continuous batching keeps pages of its own. Stock gives nothing for Gemma 4: its heads differ between layers."""
    model = BY_NAME[name].build(8)
    prompts = [named_ids(model, 1, length, seed=length)[0].tolist() for length in (PROMPT, 7)]
    # Without a size the pages take most of the memory there is.
    size = {"page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size": 32}
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, **size)
    settings = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=NO_END, pad_token_id=PAD)

    def call(model: Model) -> dict[str, Any]:
        done = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages, warmup=False)
        return {name: torch.tensor(request.generated_tokens) for name, request in done.items() if not request.error}

    want = outcome(model, None, call)
    if isinstance(want, Run):
        for one, tokens in zip(prompts, want.output.values(), strict=False):
            alone = generate(model, 20, input_ids=torch.tensor([one])).sequences[0, len(one) :]
            if OLD and not torch.equal(tokens, alone):
                pytest.skip(f"transformers {transformers.__version__} gives a batch other tokens than one prompt alone")
            assert torch.equal(tokens, alone)
    got = outcome(model, layout, call)
    if assert_same_outcome(got, want) and want.output:
        assert (got.compact, got.stock) == (0, want.stock)
        assert len(want.output) == 2
    assert bool(want.output) or OLD or not name.startswith("gemma3")
    assert not made
