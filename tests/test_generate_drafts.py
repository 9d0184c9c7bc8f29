"""Drafts that are taken back: assisted generation, and all else that crops a compact cache. See `generation.py`."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from compare import TOL, assert_same_logits, cache_key, cache_of, forced
from generation import (
    NEW,
    NO_END,
    PROMPT,
    SOME,
    WINDOWS,
    assert_bounded,
    assert_same,
    assert_same_outcome,
    draft,
    generate,
    outcome,
    patched,
    prompt,
    run,
    skip_if_stock_cannot,
    some_species,
    spoken,
    watched,
)
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import utils as generation_utils
from zoo import FULL, OLD, PAD, SLIDING, SPECIES, Model, Species, named_ids, text_config, text_model

import swapatch

GEMMA4 = [species for species in SPECIES if species.name.startswith("gemma4") and "unified" not in species.name]


def relative(species: Species, model: Model) -> Model:
    """An assistant that is right now and then: the same weights with a longer window."""
    return species.with_window(model, 2 * text_config(model).sliding_window)


def stranger(species: Species, model: Model) -> Model:
    """An assistant that is hardly ever right."""
    return species.build(text_config(model).sliding_window, seed=5)


def assisted(model: Model, assistant: Model, tokens: int, inputs: dict[str, Any], **options: Any) -> Any:
    return generate(model, tokens, **inputs, assistant_model=assistant, **options)


OWN = [(species, 8, tokens, 2 * NEW) for species in SOME for tokens in (1, 20)]
OWN += [(SOME[0], window, 66, 150) for window in WINDOWS]


@pytest.mark.parametrize(("species", "window", "tokens", "new"), OWN, ids=str)
def test_own_assistant(
    species: Species, window: int, tokens: int, new: int, layout: str, made: list[swapatch.CompactCache]
) -> None:
    """Every draft is right, so bursts of it are kept: past the window, and over the end of the buffers."""
    model = draft(species.build(window), tokens)
    inputs = prompt(species, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, model, new, inputs))
    want = generate(model, new, **inputs)
    got = run(model, layout, lambda model: assisted(model, model, new, inputs))
    assert_same(got.output, want)
    assert_bounded(cache_of(got.output), model, layout, tokens + 1)
    assert len(made) == 2
    assert got.stock == 0


ASSISTANTS = [(species, relative, 5, "both") for species in SPECIES]
ASSISTANTS += [(species, relative, 5, who) for species in SOME for who in ("target", "assistant")]
ASSISTANTS += [(species, stranger, 2, "both") for species in SOME]


@pytest.mark.parametrize(
    ("species", "helper", "tokens", "who"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].__name__}-{case[3]}") for case in ASSISTANTS],
)
def test_assistant(
    species: Species,
    helper: Callable[[Species, Model], Model],
    tokens: int,
    who: str,
    layout: str,
    made: list[swapatch.CompactCache],
) -> None:
    """Some or all of a draft is taken back in each round, on either side of the roll. Equals greedy without drafts."""
    new = 16  # the buffers roll after 12
    model = species.build(8)
    assistant = draft(helper(species, model), tokens)
    inputs = prompt(species, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, new, inputs))
    want = generate(model, new, **inputs)
    with watched(assistant) as drafts, patched(assistant, layout if who != "target" else None):
        got = run(model, layout if who != "assistant" else None, lambda model: assisted(model, assistant, new, inputs))
    assert_same(got.output, want)
    if who == "assistant":
        assert type(cache_of(got.output)) is DynamicCache
    else:
        assert_bounded(cache_of(got.output), model, layout, tokens + 1)
    assert len(made) == (2 if who == "both" else 1)
    assert bool(got.stock) == (who == "assistant")
    assert set(drafts) == {who != "target"}
    assert len(drafts) > new  # some were in vain


@some_species
def test_assistant_of_a_longer_window(species: Species, layout: str) -> None:
    """The second window, and a target whose buffers roll while it takes drafts back."""
    model = species.build(65)
    assistant = draft(relative(species, model), 20)
    inputs = prompt(species, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, NEW, inputs))
    want = generate(model, NEW, **inputs)
    with swapatch.patch(assistant, layout=layout):
        got = run(model, layout, lambda model: assisted(model, assistant, NEW, inputs))
    assert_same(got.output, want)
    assert_bounded(cache_of(got.output), model, layout, 21)
    assert got.stock == 0


@some_species
def test_turn_after_drafts(species: Species, layout: str) -> None:
    """The cache that drafts leave behind takes more turns, with drafts and without."""
    model = draft(species.build(8), 4)
    inputs = species.inputs(model, (PROMPT,))

    def call(model: Model) -> list[Any]:
        outputs = [assisted(model, model, 20, inputs)]
        for size, options in ((3, {"prompt_lookup_num_tokens": 4}), (40, {})):
            cache = cache_of(outputs[-1])
            turn = spoken(model, outputs[-1].sequences, inputs["attention_mask"], size) | {cache_key(model): cache}
            outputs.append(generate(model, 20, **turn, **options))
        return outputs

    skip_if_stock_cannot(model, call)
    want = run(model, None, call)
    got = run(model, layout, call)
    for ours, theirs in zip(got.output, want.output, strict=True):
        assert_same(ours, theirs)
    assert isinstance(cache_of(got.output[-1]), swapatch.CompactCache)
    assert (got.compact, got.stock) == (want.stock, 0)


@some_species
def test_sampled_drafts(species: Species, layout: str) -> None:
    """Speculative sampling: seeded, the same tokens as stock with the same assistant."""
    model = species.build(8)
    assistant = draft(relative(species, model), 3)
    inputs = prompt(species, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, NEW, inputs, do_sample=True))
    want = assisted(model, assistant, NEW, inputs, do_sample=True)
    with swapatch.patch(assistant, layout=layout):
        got = run(model, layout, lambda model: assisted(model, assistant, NEW, inputs, do_sample=True))
    assert_same(got.output, want)
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert got.stock == 0


@pytest.mark.parametrize("species", GEMMA4, ids=str)
def test_drafter_that_reads_shared_states(species: Species, layout: str) -> None:
    """Gemma 4's own kind of assistant attends the keys and values that the target returns: the same drafts as stock."""
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no such assistant")
    model = species.build(8)
    try:
        drafter = draft(shared_state_drafter(model), 3)
    except ValueError as error:
        if not OLD:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build one: {error}")
    inputs = prompt(species, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, drafter, NEW, inputs))

    def drafts(layout: str | None) -> tuple[Any, list[Tensor]]:
        logits: list[Tensor] = []
        hook = drafter.register_forward_hook(lambda module, args, output: logits.append(output.logits))
        got = run(model, layout, lambda model: assisted(model, drafter, NEW, inputs))
        hook.remove()
        assert (got.compact > 0, got.stock > 0) == (layout is not None, layout is None)
        return got.output, logits

    greedy = generate(model, NEW, **inputs)
    (want, their_drafts), (got, my_drafts) = drafts(None), drafts(layout)
    assert_same(want, greedy)
    assert_same(got, greedy)
    assert isinstance(cache_of(got), swapatch.CompactCache)
    torch.testing.assert_close(my_drafts, their_drafts, atol=TOL, rtol=0)


def shared_state_drafter(target: Model) -> Model:
    attentions = [layer.self_attn for layer in text_model(target).layers]
    near, far = (next(x for x in attentions if x.is_sliding == sliding) for sliding in (True, False))
    text = transformers.Gemma4TextConfig(
        layer_types=[SLIDING, FULL],
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        vocab_size=NO_END,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=near.k_proj.out_features // near.head_dim,
        num_global_key_value_heads=far.k_proj.out_features // far.head_dim,
        attention_k_eq_v=True,  # so that the number above counts
        head_dim=near.head_dim,
        global_head_dim=far.head_dim,
        sliding_window=text_config(target).sliding_window,
        pad_token_id=PAD,
    )
    torch.manual_seed(3)
    whole = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=text_config(target).hidden_size)
    return transformers.Gemma4AssistantForCausalLM(whole).eval()


@pytest.mark.parametrize("layers", (1, 3))
def test_leaving_early_to_draft(species: Species, layout: str, layers: int) -> None:
    """The first layers of the model draft: meanwhile its config says that it has no others, perhaps no sliding one."""

    def call(model: Model) -> Any:
        return generate(draft(model, 3), NEW, **prompt(species, model, PROMPT), assistant_early_exit=layers)

    # Each on a model of its own: where stock cannot do it, the config stays as it was at the failure.
    want = outcome(species.build(8), None, call)
    got = outcome(species.build(8), layout, call)
    if isinstance(want, Exception):
        assert isinstance(got, Exception)
    else:
        assert_same_outcome(got, want)
        assert isinstance(cache_of(got.output), swapatch.CompactCache)
        assert got.stock == 0 or layers == 1


@some_species
def test_one_step_is_undone_at_the_end(species: Species, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the end is noticed one step late (on a Mac), that step is taken back from the cache that is returned."""
    if not hasattr(generation_utils, "DeferredStopCheck"):
        pytest.skip("this transformers does not defer")
    monkeypatch.setattr(generation_utils.DeferredStopCheck, "is_supported", staticmethod(lambda *args, **kwargs: True))
    monkeypatch.setattr(torch, "Event", lambda **options: Mock())  # a CPU has none, and nothing to wait for
    model = species.build(8)
    inputs = prompt(species, model, PROMPT)
    end = generate(model, NEW, **inputs).sequences[0, PROMPT + 16].item()
    want = run(model, None, lambda model: generate(model, NEW, **inputs, eos_token_id=end))
    got = run(model, layout, lambda model: generate(model, NEW, **inputs, eos_token_id=end))
    assert_same(got.output, want.output)
    assert got.output.sequences.shape[1] < PROMPT + NEW
    ids = named_ids(model, 1, 20)
    after = [forced(model, ids, prompt=1, cache=cache_of(want.output))]
    with swapatch.patch(model, layout=layout):
        after.append(forced(model, ids, prompt=1, cache=cache_of(got.output)))
    assert_same_logits(after[1].logits, after[0].logits)


@some_species
def test_counts_of_drafts_are_tensors(species: Species, layout: str) -> None:
    """As older versions of transformers count the tokens to take back; a cache must not keep such a tensor."""
    model = species.build(8)
    ids = named_ids(model, 1, PROMPT + 40)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=PROMPT).logits[:, PROMPT:]
        cache = forced(model, ids[:, :PROMPT], prompt=PROMPT).cache
        cache.activate_past_recording()
        forced(model, ids[:, PROMPT : PROMPT + 5], prompt=5, cache=cache)
        cache.crop(-torch.tensor(5))
        assert type(cache.get_seq_length(next(iter(cache.plan.owners)))) is int
        assert_same_logits(forced(model, ids[:, PROMPT:], prompt=1, cache=cache).logits, want)
