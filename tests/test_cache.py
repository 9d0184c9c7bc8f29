"""The compact cache: bounded, finite, an ordinary transformers cache, and all or nothing."""

import copy
from typing import Any

import pytest
import torch
from compare import assert_same_logits, forced, greedy, sliding_rows, storage_bytes, unwritten_rows
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from zoo import Species, named_ids, text_config, text_model

import swapatch
from swapatch.geometry import ceil64
from swapatch.layers import LAYOUTS


def test_rows_of_each_layout() -> None:
    """The bounds that the README states."""
    assert {name: LAYOUTS[name].base_rows(512) for name in LAYOUTS} == {"anchored": 576, "ring": 512}
    assert {name: LAYOUTS[name].base_rows(1024) for name in LAYOUTS} == {"anchored": 1088, "ring": 1024}


WINDOWS = (2, 8, 64, 65, 100)


@pytest.mark.parametrize("window", (8, 65))
@pytest.mark.parametrize("length", (1, 400))
def test_storage_is_bounded_for_any_prompt(model_kind: Species, window: int, length: int, layout: str) -> None:
    """Counted as storage, right after the prefill already, so nothing keeps the prompt's keys alive."""
    model = model_kind.build(window)
    ids = named_ids(model, 1, length + 70)
    with swapatch.patch(model, layout=layout):
        after_prefill = forced(model, ids[:, :length], prompt=length).cache
        after_steps = forced(model, ids, prompt=length).cache
    for cache in (after_prefill, after_steps):
        assert set(sliding_rows(cache)) == {LAYOUTS[layout].base_rows(window)}
    assert storage_bytes(after_steps) == swapatch.report(after_steps).total_bytes


def test_stock_keeps_the_prompt_alive(model_kind: Species) -> None:
    """What the test above would see if a view were kept: stock's layers do."""
    model = model_kind.build(8)
    assert max(sliding_rows(forced(model, named_ids(model, 1, 400), prompt=400).cache)) >= 400


@pytest.mark.parametrize("window", WINDOWS)
def test_rows_are_the_last_positions_once_each(window: int, layout: str) -> None:
    """After every append of any size the visible rows are exactly the last positions, in order."""
    layer = LAYOUTS[layout](window)
    written = 0
    for tokens in (1, 2, 3, 5, 62, 63, 64, 65, 66, 130, 1, 1, *[1] * 200):
        positions = torch.arange(written, written + tokens, dtype=torch.float32).view(1, 1, tokens, 1) + 1
        keys, values = layer.update(positions, -positions)
        first = max(0, written - window + 1)
        written += tokens
        assert torch.equal(keys.flatten(), torch.arange(first, written) + 1.0)
        assert torch.equal(values, -keys)
        assert torch.equal(layer.past()[0].flatten(), torch.arange(max(0, written - window + 1), written) + 1.0)
        assert layer.rows == LAYOUTS[layout].base_rows(window)
        assert not layer.key_rows[:, :, unwritten_rows(layer)].any()
        assert layer.get_seq_length() == written


def test_used_by_an_unpatched_model(species: Species, layout: str) -> None:
    """The cache keeps transformers' contract, so stock code gets stock results with it."""
    model = species.build(16)
    ids = named_ids(model, 2, 150)
    want = forced(model, ids, prompt=40, chunks=[3, 30]).logits
    got = forced(model, ids, prompt=40, chunks=[3, 30], cache=swapatch.CompactCache(model, layout=layout))
    assert_same_logits(got.logits, want)


def test_mask_sizes_and_lengths_as_stock(model_kind: Species, layout: str) -> None:
    """At every length: the sizes that stock code makes masks from."""
    model = model_kind.build(16)
    ids = named_ids(model, 1, 100)
    ours = forced(model, ids[:, :1], prompt=1, cache=swapatch.CompactCache(model, layout=layout)).cache
    stock = forced(model, ids[:, :1], prompt=1).cache
    for step in range(1, 100):
        for index in ours.plan.owners:
            assert ours.get_seq_length(index) == stock.get_seq_length(index)
            for queries in (1, 5):
                assert ours.get_mask_sizes(queries, index) == stock.get_mask_sizes(queries, index)
        assert ours.is_sliding == stock.is_sliding
        assert ours.get_max_length() == stock.get_max_length()
        for cache in (ours, stock):
            forced(model, ids[:, step : step + 1], prompt=1, cache=cache)


def test_made_by_hand_with_static_global_layers(species: Species, layout: str) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 150)
    want = forced(model, ids, prompt=40).logits
    cache = swapatch.CompactCache(model, max_cache_len=200, layout=layout)
    with swapatch.patch(model, layout=layout):
        assert_same_logits(forced(model, ids, prompt=40, cache=cache).logits, want)
    assert set(sliding_rows(cache)) == {LAYOUTS[layout].base_rows(16)}


def test_a_deep_copy_goes_its_own_way(model_kind: Species, layout: str) -> None:
    model = model_kind.build(16)
    ids = named_ids(model, 1, 300)
    with swapatch.patch(model, layout=layout):
        cache = forced(model, ids[:, :200], prompt=200).cache
        twin = copy.deepcopy(cache)
        assert set(sliding_rows(twin)) == {LAYOUTS[layout].base_rows(16)}
        want = forced(model, ids[:, 200:], prompt=1, cache=cache).logits
        got = forced(model, ids[:, 200:], prompt=1, cache=twin).logits
    assert torch.equal(got, want)


def test_reset_is_a_new_cache(model_kind: Species, layout: str) -> None:
    model = model_kind.build(16)
    long, short = named_ids(model, 1, 200), named_ids(model, 3, 90, seed=7)
    with swapatch.patch(model, layout=layout):
        want = forced(model, short, prompt=5).logits
        cache = forced(model, long, prompt=100).cache
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(forced(model, short, prompt=5, cache=cache).logits, want)


def test_batch_sizes_on_one_model(model_kind: Species, layout: str) -> None:
    model = model_kind.build(16)
    for batch in (2, 1, 3):
        ids = named_ids(model, batch, 90)
        want = forced(model, ids, prompt=20).logits
        with swapatch.patch(model, layout=layout):
            assert_same_logits(forced(model, ids, prompt=20).logits, want)


def test_inference_mode_and_back(model_kind: Species, layout: str) -> None:
    """A cache filled in inference mode goes on without it, and the other way round."""
    model = model_kind.build(16)
    ids = named_ids(model, 1, 120)
    want = forced(model, ids, prompt=50).logits
    with swapatch.patch(model, layout=layout):
        with torch.inference_mode():
            first = forced(model, ids[:, :50], prompt=50)
        second = forced(model, ids[:, 50:100], prompt=1, cache=first.cache)
        with torch.inference_mode():
            third = forced(model, ids[:, 100:], prompt=1, cache=first.cache)
    assert_same_logits(torch.cat([first.logits, second.logits, third.logits], 1), want)


def test_another_batch_is_refused(model_kind: Species) -> None:
    """A key of one sequence must not be broadcast over the rows of two."""
    model = model_kind.build(16)
    ids = named_ids(model, 2, 21)
    with swapatch.patch(model), torch.no_grad():
        cache = forced(model, ids[:, :20], prompt=20).cache
        with pytest.raises(swapatch.CacheStateError, match="1 sequences for a cache that holds 2"):
            forced(model, ids[:1, 20:], prompt=1, cache=cache)
        assert cache.get_seq_length() == 20


def test_half_written_cache_is_refused(model_kind: Species) -> None:
    model = model_kind.build(16)
    ids = named_ids(model, 1, 21)
    with swapatch.patch(model):
        cache = forced(model, ids[:, :20], prompt=20).cache
        cache.lengths_before = cache.lengths()
        cache.sliding[0].seen += 1
        with pytest.raises(swapatch.CacheStateError, match="half written"):
            forced(model, ids[:, 20:], prompt=1, cache=cache)


def test_an_interrupted_step_can_be_repeated(model_kind: Species, layout: str) -> None:
    """The counters move only when the whole text model has run: a step that failed on the way is as if not begun."""
    model = model_kind.build(16)
    ids = named_ids(model, 1, 101)
    with swapatch.patch(model, layout=layout):
        cache = forced(model, ids[:, :100], prompt=100).cache
        want = forced(model, ids[:, 100:], prompt=1, cache=copy.deepcopy(cache)).logits
        first = cache.sliding[0]

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        hook = text_model(model).layers[0].mlp.register_forward_pre_hook(interrupt)
        seen = first.seen
        with pytest.raises(KeyboardInterrupt):
            forced(model, ids[:, 100:], prompt=1, cache=cache)
        hook.remove()
        assert first.seen == seen
        if 0 in cache.plan.owners:  # a global layer that has run has grown, as stock's does
            assert_same_logits(forced(model, ids[:, 100:], prompt=1, cache=cache).logits, want)


def test_crop_within_the_window(model_kind: Species, layout: str) -> None:
    model = model_kind.build(100)
    ids = named_ids(model, 1, 90)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=60).logits[:, 60:]
        cache = forced(model, ids[:, :80], prompt=50).cache
        cache.crop(-20)
        assert cache.get_seq_length() == 60
        assert_same_logits(forced(model, ids[:, 60:], prompt=1, cache=cache).logits, want)


@pytest.mark.parametrize("window", (8, 64))
@pytest.mark.parametrize("taken", (0, 1, 5, 64, 70))
def test_crop_of_recorded_tokens(model_kind: Species, window: int, taken: int, layout: str) -> None:
    """Past the window too, and the rows that recording added are given back."""
    model = model_kind.build(window)
    ids = named_ids(model, 1, 300)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=200).logits
        cache = forced(model, ids[:, :200], prompt=200).cache
        cache.activate_past_recording()
        forced(model, ids[:, 200:275], prompt=3, chunks=[70], cache=cache)
        assert set(sliding_rows(cache)) <= {
            LAYOUTS[layout].base_rows(window),
            LAYOUTS[layout].base_rows(window) + ceil64(75),
        }
        cache.crop(-taken)
        assert set(sliding_rows(cache)) == {LAYOUTS[layout].base_rows(window)}
        assert cache.get_seq_length() == 275 - taken
        rest = forced(model, ids[:, 275 - taken :], prompt=1, cache=cache).logits
    assert_same_logits(rest, want[:, 275 - taken :])


@pytest.mark.parametrize("tokens", (3, -1, -80, -500))
def test_refused_crop_changes_nothing(model_kind: Species, tokens: int, layout: str) -> None:
    model = model_kind.build(8)
    ids = named_ids(model, 1, 110)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=100).logits[:, 100:]
        cache = forced(model, ids[:, :100], prompt=100).cache
        with pytest.raises((ValueError, RuntimeError), match="crop"):
            cache.crop(tokens)
        assert {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")} == {100}
        assert_same_logits(forced(model, ids[:, 100:], prompt=1, cache=cache).logits, want)


def test_batch_verbs(model_kind: Species, layout: str) -> None:
    model = model_kind.build(16)
    ids = named_ids(model, 2, 120)
    order = torch.tensor([1, 1, 0])
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids[order], prompt=50).logits[:, 50:]
        cache = forced(model, ids[:, :50], prompt=50).cache
        cache.batch_select_indices(order)
        assert_same_logits(forced(model, ids[order][:, 50:], prompt=1, cache=cache).logits, want)
        cache = forced(model, ids[:, :50], prompt=50).cache
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 3, 0]))
        assert_same_logits(forced(model, ids[order][:, 50:], prompt=1, cache=cache).logits, want)


def test_iterating_gives_what_a_dynamic_cache_is_built_from(model_kind: Species, layout: str) -> None:
    model = model_kind.build(16)
    ids = named_ids(model, 1, 120)
    with swapatch.patch(model, layout=layout):
        cache = forced(model, ids[:, :100], prompt=100).cache
    rebuilt = DynamicCache(cache, config=text_config(model))
    for ours, stock in zip(cache, rebuilt, strict=True):
        for mine, theirs in zip(ours[:2], stock[:2], strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)


def test_unused_layers_take_every_verb(layout: str) -> None:
    layer = LAYOUTS[layout](8)
    layer.crop(0)
    layer.reset()
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0]))
    layer.reorder_cache(torch.tensor([0]))
    assert layer.get_mask_sizes(3) == (3, 0)
    assert layer.rows == 0
    assert "window=8" in repr(layer)


def test_report_prints_rows_and_bytes(species: Species) -> None:
    model = species.build(16)
    with swapatch.patch(model):
        cache = greedy(model, named_ids(model, 1, 40), 3).cache
    report = swapatch.report(cache)
    sliding = [layer for layer in report.layers if layer.kind == "sliding"]
    assert [layer.index for layer in sliding] == list(cache.plan.owners)
    assert {layer.rows for layer in sliding} == {128}
    assert report.sliding_bytes == sum(layer.bytes for layer in sliding) < report.total_bytes
    assert f"{report.total_bytes:,}" in str(report)


# -- found by changing single lines of the code: scripts/mutation.sh --


def numbered(layer: Any, tokens: int) -> None:
    """Rows whose keys are their positions, counted from one."""
    positions = torch.arange(layer.seen, layer.seen + tokens, dtype=torch.float32).view(1, 1, tokens, 1) + 1
    layer.update(positions, -positions)


def test_rows_that_were_taken_back_are_zero(layout: str) -> None:
    """Within the window, and after recording, when the buffer shrinks."""
    layer = LAYOUTS[layout](64)
    numbered(layer, 60)
    layer.crop(-25)
    for rows in (layer.key_rows, layer.value_rows):
        assert not rows[:, :, unwritten_rows(layer)].any()
    numbered(layer, 90)
    layer.activate_past_recording()
    numbered(layer, 30)
    layer.crop(-20)
    for rows in (layer.key_rows, layer.value_rows):
        assert not rows[:, :, unwritten_rows(layer)].any()
    assert torch.equal(layer.past()[0].flatten(), torch.arange(135 - 63, 135) + 1.0)


@pytest.mark.parametrize("seen", (63, 64, 65))
def test_crop_at_the_edge_of_the_window(seen: int, layout: str) -> None:
    """Stock takes tokens back while it has seen fewer than the window."""
    layer, stock = LAYOUTS[layout](64), DynamicSlidingWindowLayer(64)
    for each in (layer, stock):
        rows = torch.ones(1, 1, seen, 1)
        each.update(rows, rows)
    if seen < 64:
        layer.crop(-1)
        stock.crop(-1)
        assert layer.get_seq_length() == stock.get_seq_length() == seen - 1
        return
    for each in (layer, stock):
        with pytest.raises((RuntimeError, ValueError)):
            each.crop(-1)
    assert layer.get_seq_length() == seen


def test_crop_past_what_was_recorded(layout: str) -> None:
    """A position whose window is gone is refused by name, all of the tokens are not."""
    layer = LAYOUTS[layout](64)
    numbered(layer, 300)
    layer.activate_past_recording()
    numbered(layer, 10)
    with pytest.raises(swapatch.CacheStateError, match=r"position 160 needs them"):
        layer.crop(-150)
    assert layer.get_seq_length() == 310
    layer.crop(-310)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("verb", ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop"))
def test_a_layer_that_was_given_other_rows_takes_every_verb(verb: str, layout: str) -> None:
    """It goes on as transformers' own, with what it was given."""
    argument: Any = {"batch_repeat_interleave": 2, "crop": -1}.get(verb, torch.tensor([1, 0]))
    found = []
    for layer in (LAYOUTS[layout](64), DynamicSlidingWindowLayer(64)):
        rows = torch.arange(20.0).view(2, 1, 10, 1)
        layer.update(rows, -rows)
        layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
        getattr(layer, verb)(argument)
        found.append((layer.keys, layer.values))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_offload_and_back(layout: str) -> None:
    layer = LAYOUTS[layout](64)
    numbered(layer, 30)
    keys, values = layer.keys.clone(), layer.values.clone()
    layer.offload()
    assert layer.key_rows.device.type == "cpu"
    layer.prefetch()
    assert torch.equal(layer.keys, keys)
    assert torch.equal(layer.values, values)
