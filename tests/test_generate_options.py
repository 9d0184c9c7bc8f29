"""Modes of generation that are a matter of options, over prompts of every shape. See `generation.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_sensitive, cache_of, sliding_rows
from generation import (
    BEAMS,
    NEW,
    PROMPT,
    SOME,
    WINDOWS,
    assert_compact,
    assert_same,
    generate,
    prompt,
    run,
    some_species,
)
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from zoo import SPECIES, Model, Species, named_ids

import swapatch


def _padded(species: Species, model: Model) -> dict[str, Any]:
    return prompt(species, model, PROMPT, 3)


def _single(species: Species, model: Model) -> dict[str, Any]:
    return prompt(species, model, PROMPT)


def _embeddings(species: Species, model: Model) -> dict[str, Any]:
    inputs = species.inputs(model, (PROMPT, 30))
    with torch.no_grad():
        return {
            "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
            "attention_mask": inputs["attention_mask"],
        }


def _guided(species: Species, model: Model) -> dict[str, Any]:
    return _single(species, model) | {"guidance_scale": 1.5, "negative_prompt_ids": named_ids(model, 1, 40, 5)}


@dataclass(frozen=True)
class Mode:
    """A way to generate that is chosen by options."""

    name: str
    inputs: Callable[[Species, Model], dict[str, Any]]
    options: dict[str, Any]
    main: bool = False  # run with every species, and some with the second window
    tokens: int = NEW
    text_only: bool = False  # stock refuses it for models that take images
    recorded: int = 0  # tokens at most that the cache remembers beyond the window, to take them back

    def __str__(self) -> str:
        return self.name

    def species(self) -> list[Species]:
        species = SPECIES if self.main else SOME
        return [species for species in species if not (self.text_only and species.vision)]

    def call(self, species: Species, model: Model, tokens: int = 0) -> Any:
        options = self.inputs(species, model) | self.options
        return generate(model, tokens or self.tokens, **options)


MODES = [
    Mode("greedy", _padded, {"output_scores": True}, main=True),
    Mode("greedy over two rolls", _padded, {}, tokens=80),
    Mode("sampling", _padded, {"do_sample": True, "num_return_sequences": 3, "top_k": 20}, main=True),
    Mode("beams", _padded, BEAMS, main=True),
    Mode("sampled beams", _single, {**BEAMS, "do_sample": True}),
    Mode("prompt lookup", _single, {"prompt_lookup_num_tokens": 6}, main=True, recorded=64),
    Mode("embeddings", _embeddings, {}, text_only=True),
    Mode("hidden states", _padded, {"output_hidden_states": True}),
    Mode("guidance", _guided, {}),
    Mode("dynamic by name", _single, {"cache_implementation": "dynamic"}),
    Mode("chunks and beams", _padded, {**BEAMS, "prefill_chunk_size": 33}),
]


@pytest.mark.parametrize(
    ("species", "window", "mode"),
    [
        pytest.param(species, window, mode, id=f"{mode}-{species}-{window}")
        for mode in MODES
        for species in mode.species()
        for window in (WINDOWS if mode.main and species in SOME[:2] else WINDOWS[:1])
    ],
)
def test_mode(species: Species, window: int, mode: Mode, layout: str) -> None:
    model = species.build(window)
    want = run(model, None, lambda model: mode.call(species, model))
    got = run(model, layout, lambda model: mode.call(species, model))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout, mode.recorded)


@pytest.mark.parametrize(
    ("species", "mode"),
    [
        pytest.param(species, mode, id=f"{mode}-{species}")
        for mode in MODES
        for species in mode.species()
        if species in SOME
    ],
)
def test_mode_notices_a_wrong_window(species: Species, mode: Mode) -> None:
    """The comparison above can fail, for every mode: a window that is one off gives another output."""
    model = species.build(8)
    want = mode.call(species, model, 4)
    for window in (7, 9):
        got = mode.call(species, species.with_window(model, window), 4)
        with pytest.raises(AssertionError):
            assert_same(got, want)


@pytest.mark.parametrize("window", WINDOWS)
def test_logits_notice_a_wrong_window(species: Species, window: int) -> None:
    assert_sensitive(species, window, tol=1e-3)


@pytest.mark.parametrize("options", ({}, BEAMS), ids=("greedy", "beams"))
@some_species
def test_sequences_that_end_early(species: Species, options: dict[str, Any], layout: str) -> None:
    """Rows of a batch end at different steps; finished ones go on as padding."""
    model = species.build(8)
    inputs = prompt(species, model, PROMPT, 30, 3)
    ends = generate(model, 20, **inputs, **options).sequences[0, PROMPT + 10 : PROMPT + 15]
    call = {**inputs, **options, "eos_token_id": ends.tolist()}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert (got.compact, got.stock) == (want.stock, 0)
    assert torch.isin(got.output.sequences[:, PROMPT:-1], ends).any()


CHUNKS = [(species, 8, chunk, (PROMPT, 3)) for species in SOME for chunk in (7, 50)]
CHUNKS += [(SOME[0], 65, chunk, lengths) for chunk in (1, 2, 64, 65, 1000) for lengths in ((PROMPT,), (PROMPT, 3))]


@pytest.mark.parametrize(("species", "window", "chunk", "lengths"), CHUNKS, ids=str)
def test_prefill_in_chunks(species: Species, window: int, chunk: int, lengths: tuple[int, ...], layout: str) -> None:
    """With and without left padding. Images that a chunk cuts in two are in `test_images.py`."""
    model = species.build(window)
    call = {**species.inputs(model, lengths), "prefill_chunk_size": chunk}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout)
    assert (got.compact > NEW) == (chunk < PROMPT)


@some_species
def test_batch_sizes_on_one_model(species: Species, layout: str) -> None:
    model = species.build(8)
    for lengths in ((PROMPT, 40), (PROMPT,), (3, PROMPT, 20)):
        inputs = prompt(species, model, *lengths)
        want = run(model, None, lambda model: generate(model, NEW, **inputs))  # noqa: B023
        got = run(model, layout, lambda model: generate(model, NEW, **inputs))  # noqa: B023
        assert_same(got.output, want.output)
        assert_compact(got, want, model, layout)


class Collector(BaseStreamer):
    """Keeps what a streamer is given, and how often it was told the end."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("options", ({}, {"do_sample": True}, {"prompt_lookup_num_tokens": 6}), ids=str)
@some_species
def test_streamers(species: Species, options: dict[str, Any], layout: str) -> None:
    """The same tokens in the same portions."""
    model = species.build(8)
    call = {**prompt(species, model, PROMPT), **options}
    theirs, mine = Collector(), Collector()
    want = run(model, None, lambda model: generate(model, NEW, **call, streamer=theirs))
    got = run(model, layout, lambda model: generate(model, NEW, **call, streamer=mine))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout, recorded=64 if "prompt_lookup_num_tokens" in options else 0)
    assert mine.parts == theirs.parts
    assert [token for part in mine.parts for token in part] == got.output.sequences[0].tolist()
    assert mine.ends == theirs.ends == 1


@some_species
def test_attention_weights(species: Species, layout: str) -> None:
    """Shapes and values are stock's: stock code computes them, from the compact rows."""
    model = species.build(8, attn_implementation="eager")
    call = {**prompt(species, model, PROMPT, 3), "output_attentions": True, "output_hidden_states": True}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert len(got.output.attentions) == NEW
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert max(sliding_rows(cache_of(got.output))) < PROMPT + NEW - 1
    assert (got.compact, got.stock) == (0, want.stock)
