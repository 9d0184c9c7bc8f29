"""``patch(model, compile_layers=...)``: a few graphs for all layers and all lengths, and results as ever."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import assert_same_logits, assert_unchanged, forced, greedy, snapshot
from torch._dynamo.utils import counters
from transformers import Gemma3ForCausalLM
from zoo import BY_NAME, SPECIES, Species, named_ids, text_config, text_model

import swapatch

EAGER = {"backend": "eager"}  # what is compiled is not the question here, and that takes seconds
WINDOW = 16


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("species", SPECIES, ids=str)
@pytest.mark.parametrize("layout", ("anchored", "ring"))
def test_same_logits(species: Species, layout: str) -> None:
    """A prompt, a chunk behind it and single tokens; with padding and without."""
    model = species.build(WINDOW)
    ids = named_ids(model, 2, 60)
    padding = torch.ones_like(ids)
    padding[0, :20] = 0
    for mask in (None, padding):
        want = forced(model, ids, prompt=40, chunks=(17,), attention_mask=mask).logits
        with swapatch.patch(model, layout=layout, compile_layers=EAGER):
            got = forced(model, ids, prompt=40, chunks=(17,), attention_mask=mask).logits
            assert not swapatch.status(model).calls.stock
        assert_same_logits(got, want)


def test_generate() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 40)
    want = greedy(model, ids, 30)
    with swapatch.patch(model, compile_layers=EAGER):
        got = greedy(model, ids, 30)
    assert torch.equal(got.tokens, want.tokens)


def layers(number: int) -> Any:
    """Two global layers among three, or ten among fifteen: more than torch compiles of one function."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    config = copy.deepcopy(text_config(model))
    config.layer_types = ["sliding_attention", "full_attention", "full_attention"] * (number // 3)
    config.num_hidden_layers = number
    return Gemma3ForCausalLM._from_config(config).eval()


def test_as_many_graphs_for_more_layers_and_other_lengths() -> None:
    found = []
    for number in (3, 15):
        model = layers(number)
        torch._dynamo.reset()
        counters.clear()
        with swapatch.patch(model, compile_layers=EAGER), torch.no_grad():
            model(named_ids(model, 1, 40))
            first = graphs()
            for length in (41, 300, 17, 129, 64):
                model(named_ids(model, 1, length))
            found.append((first, graphs()))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1] > 0


def test_layers_that_somebody_compiled() -> None:
    """The same without our option, by torch's own method."""
    model = layers(15)
    ids = named_ids(model, 1, 50)
    with torch.no_grad():
        want = model(ids).logits
    with swapatch.patch(model), torch.no_grad():
        for layer in model.model.layers:
            layer.compile(dynamic=True, **EAGER)
        got = model(ids).logits
    assert_same_logits(got, want)
    assert 0 < graphs() <= 4


def test_undo_and_copies() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 50)
    with torch.no_grad():
        want = model(ids).logits
    before = snapshot(model)  # without a call in between: torch leaves names of its own in transformers' files
    swapatch.patch(model, compile_layers=EAGER).undo()
    assert_unchanged(model, before)
    handle = swapatch.patch(model, compile_layers=EAGER)
    assert "compiled layers" in repr(handle)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ours = [layer._compiled_call_impl for layer in text_model(copied).layers]
        assert [call.layer for call in ours] == list(text_model(copied).layers)
        with torch.no_grad():
            assert_same_logits(copied(ids).logits, want)
        assert not swapatch.status(copied).irregular
        assert swapatch.unpatch(copied)
        assert all(layer._compiled_call_impl is None for layer in text_model(copied).layers)
    handle.undo()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)


def test_another_patch_without_it_is_refused() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    with swapatch.patch(model, compile_layers=EAGER) as handle:
        assert swapatch.patch(model, compile_layers=EAGER) is handle
        with pytest.raises(swapatch.AlreadyPatchedError, match="compile_layers=False"):
            swapatch.patch(model)
