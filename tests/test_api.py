"""The public surface: handles, options, refusals, the switch, and what falls back to stock code."""

import copy
import logging
import re

import pytest
import torch
import transformers
from compare import (
    assert_same_gradients,
    assert_same_logits,
    assert_unchanged,
    forced,
    greedy,
    parameter_gradients,
    snapshot,
)
from torch import nn
from transformers import DynamicCache, StaticCache
from zoo import SPECIES, Species, named_ids, text_config, text_model

import swapatch
from swapatch import _compat


@pytest.fixture
def model() -> nn.Module:
    return SPECIES[0].build(16)


def test_all_is_sorted_and_complete() -> None:
    assert swapatch.__all__ == sorted(swapatch.__all__)
    assert all(hasattr(swapatch, name) for name in swapatch.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", swapatch.__version__)


def test_handle_says_what_it_is(model: nn.Module) -> None:
    handle = swapatch.patch(model)
    assert repr(handle) == (
        "<swapatch: Gemma3ForCausalLM, 3 of 4 layers, window 16, anchored 128 rows, windowed/cpu, active>"
    ), repr(handle)
    assert handle.active
    handle.undo()
    assert repr(handle).endswith("inactive>")


def test_patching_twice(model: nn.Module) -> None:
    handle = swapatch.patch(model)
    assert swapatch.patch(model) is handle
    with pytest.raises(swapatch.AlreadyPatchedError, match="backend='reference'"):
        swapatch.patch(model, backend="reference")
    assert handle.active


def test_unpatch_and_status(model: nn.Module) -> None:
    assert not swapatch.is_patched(model)
    assert not swapatch.status(model).patched
    assert not swapatch.unpatch(model)
    handle = swapatch.patch(model)
    assert swapatch.is_patched(model)
    status = swapatch.status(model)
    assert status.patched
    assert (status.window, status.layout, status.backend) == (16, "anchored", "auto")
    assert status.sliding_layers == handle.plan.sliding
    assert not status.irregular
    assert swapatch.unpatch(model)
    assert not swapatch.is_patched(model)


def test_status_names_a_layer_that_was_changed(model: nn.Module) -> None:
    swapatch.patch(model)
    text_model(model).layers[0].self_attn.forward = lambda *args, **kwargs: None
    assert swapatch.status(model).irregular == ("model.layers.0.self_attn.forward",)


def test_base_model_without_a_head(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 90)
    text = text_model(model)
    with torch.no_grad():
        want = text(ids, use_cache=True)
        with swapatch.patch(text):
            got = text(ids, use_cache=True)  # the ids by position, not by name
    assert isinstance(got[_compat.CACHE_NAME], swapatch.CompactCache)
    assert not isinstance(want[_compat.CACHE_NAME], swapatch.CompactCache)
    assert_same_logits(got.last_hidden_state, want.last_hidden_state)


@pytest.mark.parametrize("options", ({"layout": "spiral"}, {"backend": "magic"}), ids=str)
def test_unknown_option(model: nn.Module, options: dict[str, str]) -> None:
    snap = snapshot(model)
    with pytest.raises(ValueError, match=r"found: .*\nsupported: .*\ndo: "):
        swapatch.patch(model, **options)
    assert_unchanged(model, snap)


@pytest.mark.parametrize("thing", ("google/gemma-3-270m", None, 3, nn.Linear(2, 2), transformers.Gemma3TextConfig()))
def test_not_a_model(thing: object) -> None:
    with pytest.raises(swapatch.UnsupportedModelError, match=r"found: .*\nsupported: .*\ndo: "):
        swapatch.patch(thing)
    assert issubclass(swapatch.UnsupportedModelError, TypeError)


def test_switched_off_by_a_block(model: nn.Module) -> None:
    snap = snapshot(model)
    with swapatch.disabled():
        handle = swapatch.patch(model)
        assert not handle.active
        assert "switched off" in repr(handle)
        assert_unchanged(model, snap)
        handle.undo()
    assert swapatch.patch(model).active


@pytest.mark.parametrize(
    ("value", "off"), [(v, True) for v in ("1", "on", "YES", "True")] + [("0", False), ("", False)]
)
def test_switched_off_by_the_environment(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, value: str, off: bool
) -> None:
    monkeypatch.setenv("SWAPATCH_DISABLE", value)
    assert swapatch.patch(model).active is not off


def test_switched_off_on_a_patched_model(species: Species) -> None:
    """The next new cache is a stock one; a compact one in use goes on."""
    model = species.build(16)
    ids = named_ids(model, 1, 60)
    swapatch.patch(model)
    compact = forced(model, ids[:, :50], prompt=50).cache
    with swapatch.disabled():
        assert type(forced(model, ids, prompt=50).cache) is DynamicCache
        assert type(greedy(model, ids, 2).cache) is DynamicCache
        assert_same_logits(
            forced(model, ids[:, 50:], prompt=1, cache=compact).logits, forced(model, ids, prompt=50).logits[:, 50:]
        )
    assert isinstance(greedy(model, ids, 2).cache, swapatch.CompactCache)


def test_logging(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="swapatch"):
        swapatch.patch(model).undo()
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "patched: <swapatch: Gemma3ForCausalLM" in caplog.text


def test_untested_version(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    monkeypatch.setattr(_compat, "VERSION", (5, 99))
    snap = snapshot(model)
    with pytest.raises(swapatch.UnsupportedVersionError, match=r"5\.99\.0"):
        swapatch.patch(model, strict=True)
    assert_unchanged(model, snap)
    with pytest.warns(swapatch.UntestedVersionWarning, match=r"5\.99\.0"):
        assert swapatch.patch(model).active


# -- whatever is not handled runs stock code --


@pytest.mark.parametrize("kind", ("dynamic", "static"))
def test_a_stock_cache_stays_one(species: Species, kind: str) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 90)
    config = text_config(model)
    make = (lambda: DynamicCache(config=config)) if kind == "dynamic" else (lambda: StaticCache(config, 100))
    want = forced(model, ids, prompt=30, cache=make()).logits
    with swapatch.patch(model):
        got = forced(model, ids, prompt=30, cache=make())
    assert type(got.cache) in (DynamicCache, StaticCache)
    assert_same_logits(got.logits, want)


def test_without_a_cache(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 90)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        with swapatch.patch(model):
            assert_same_logits(model(ids, use_cache=False).logits, want)


def test_gradients_are_stock(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 40)
    for mode in (True, False):
        model.train(mode)
        want = parameter_gradients(model, model(ids, labels=ids).loss)
        with swapatch.patch(model):
            got = parameter_gradients(model, model(ids, labels=ids).loss)
        assert_same_gradients(got, want)


def test_attention_weights_are_stock(species: Species) -> None:
    model = species.build(16, attn_implementation="eager")
    ids = named_ids(model, 1, 90)
    options = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        want = model(ids, **options)
        with swapatch.patch(model):
            got = model(ids, **options)
            steps = greedy(model, ids, 3, **options)
        stock_steps = greedy(model, ids, 3, **options)
    for ours, theirs in zip(got.attentions + got.hidden_states, want.attentions + want.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert torch.equal(steps.tokens, stock_steps.tokens)


@pytest.mark.parametrize("dtype", (torch.bool, torch.float32))
def test_ready_made_masks_go_through(species: Species, dtype: torch.dtype) -> None:
    """A 4D mask goes to both kinds of layer as it is."""
    model = species.build(16)
    ids = named_ids(model, 1, 40)
    allowed = torch.ones(40, 40, dtype=torch.bool).tril() & (torch.rand(40, 40) > 0.2)
    allowed |= torch.eye(40, dtype=torch.bool)
    mask = allowed[None, None]
    if dtype is torch.float32:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        with swapatch.patch(model):
            got = model(ids, attention_mask=mask)
    assert isinstance(got[_compat.CACHE_NAME], swapatch.CompactCache)
    assert_same_logits(got.logits, want)


def test_errors_of_the_model_leave_the_cache_alone(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 41)
    with swapatch.patch(model), torch.no_grad():
        cache = forced(model, ids[:, :40], prompt=40).cache
        before = copy.deepcopy(cache)
        embeds = model.get_input_embeddings()(ids[:, 40:])
        with pytest.raises(ValueError, match="exactly one"):
            model(input_ids=ids[:, 40:], inputs_embeds=embeds, **{_compat.CACHE_NAME: cache})
        got = forced(model, ids[:, 40:], prompt=1, cache=cache).logits
        assert torch.equal(got, forced(model, ids[:, 40:], prompt=1, cache=before).logits)


def test_inputs_embeds(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 90)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        want = model(inputs_embeds=embeds).logits
        with swapatch.patch(model):
            got = model(inputs_embeds=embeds)
    assert isinstance(got[_compat.CACHE_NAME], swapatch.CompactCache)
    assert_same_logits(got.logits, want)
