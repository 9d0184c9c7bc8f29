"""A cache that `generate` returned goes on: by `generate` again, and by hand. See `generation.py`."""

from typing import Any

import pytest
from compare import assert_same_logits, cache_key, cache_of, forced, sliding_rows
from generation import PROMPT, assert_same, generate, run, skip_if_stock_cannot, some_species, spoken, watched
from torch import Tensor
from zoo import Model, Species

import swapatch


def turns(species: Species, model: Model, lengths: tuple[int, ...], **second: Any) -> list[Any]:
    """A prompt; then all ids so far and new ones; then only ids that the cache has not seen, with the whole mask."""
    inputs = species.inputs(model, lengths)
    outputs = [generate(model, 20, **inputs)]
    cache = cache_of(outputs[0])
    call = spoken(model, outputs[0].sequences, inputs["attention_mask"], 9) | {cache_key(model): cache}
    outputs.append(generate(model, 20, **call, **second))
    call = spoken(model, outputs[1].sequences, inputs["attention_mask"], 70) | {cache_key(model): cache}
    call["input_ids"] = call["input_ids"][:, cache.get_seq_length() :]
    outputs.append(generate(model, 20, **call))
    assert all(cache_of(output) is cache for output in outputs)
    return outputs


@pytest.mark.parametrize("second", ({}, {"prefill_chunk_size": 5}), ids=str)
@pytest.mark.parametrize("lengths", ((PROMPT,), (PROMPT, 3)), ids=str)
@some_species
def test_more_turns_on_a_returned_cache(
    species: Species, lengths: tuple[int, ...], second: dict[str, Any], layout: str, made: list[swapatch.CompactCache]
) -> None:
    model = species.build(8)
    skip_if_stock_cannot(model, lambda model: turns(species, model, lengths, **second))
    want = turns(species, model, lengths, **second)
    with watched(model) as seen, swapatch.patch(model, layout=layout):
        got = turns(species, model, lengths, **second)
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    assert all(seen)
    assert len(made) == 1
    assert max(sliding_rows(made[0])) < made[0].get_seq_length()


@some_species
def test_returned_cache_goes_on_by_hand(species: Species, layout: str) -> None:
    model = species.build(8)
    inputs = species.inputs(model, (PROMPT, 3))
    more = 45

    def by_hand(model: Model) -> Tensor:
        output = generate(model, 20, **inputs)
        cache = cache_of(output)
        call = spoken(model, output.sequences, inputs["attention_mask"], more)
        ids, mask = call["input_ids"][:, cache.get_seq_length() :], call["attention_mask"]
        return forced(model, ids, prompt=5, chunks=[1, 9], attention_mask=mask, cache=cache).logits

    want = run(model, None, by_hand)
    got = run(model, layout, by_hand)
    assert_same_logits(got.output, want.output)
    assert (got.compact, got.stock) == (want.stock, 0)
