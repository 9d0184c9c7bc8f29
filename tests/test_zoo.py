"""The tools check themselves, on stock models: a parity test is worth as much as its power to fail."""

from __future__ import annotations

import math
import types
from collections.abc import Callable

import pytest
import torch
import transformers
from compare import (
    TOL,
    assert_same_logits,
    assert_sensitive,
    assert_unchanged,
    cache_key,
    forced,
    greedy,
    sliding_rows,
    snapshot,
    storage_bytes,
    teacher_forced,
)
from torch import Tensor
from zoo import (
    BY_NAME,
    EOS,
    FIRST_SPECIAL,
    IMAGE_TOKEN,
    PAD,
    SPECIES,
    Species,
    named_ids,
    text_config,
    text_model,
    token_type_key,
)

WINDOWS = [8, 16, 64, 65, 100]
VISION = [species for species in SPECIES if species.vision]

every_species = pytest.mark.parametrize("species", SPECIES, ids=str)
vision_species = pytest.mark.parametrize("species", VISION, ids=str)


@every_species
def test_weights_depend_on_the_seed_alone(species: Species) -> None:
    before = torch.get_rng_state()
    model = species.build(8, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    half = species.build(64, seed=3, dtype=torch.bfloat16, attn_implementation="eager")
    other = species.build(8, seed=4).state_dict()
    assert half.dtype == torch.bfloat16
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, half.state_dict()[name].float()), name
    assert any(not torch.equal(weight, other[name]) for name, weight in model.state_dict().items())


@every_species
def test_flags_and_windows_are_those_of_the_config(species: Species) -> None:
    model = species.with_window(species.build(8), 16)
    config = text_config(model)
    assert config.sliding_window == 16
    assert [layer.self_attn.sliding_window for layer in text_model(model).layers] == [
        16 if kind == "sliding_attention" else None for kind in config.layer_types
    ]
    assert species.shared_kv == bool(getattr(config, "num_kv_shared_layers", 0))
    assert species.ple == bool(getattr(config, "hidden_size_per_layer_input", 0))
    assert species.moe == bool(getattr(config, "enable_moe_block", False))
    assert species.vision == hasattr(model.config, "vision_config")


@every_species
def test_with_window_keeps_the_weights(species: Species) -> None:
    model = species.build(8, seed=5)
    other = species.with_window(model, 16).state_dict()
    assert all(torch.equal(weight, other[name]) for name, weight in model.state_dict().items())


@every_species
def test_greedy_text_is_finite_and_varied(species: Species) -> None:
    model = species.build(64)
    out = greedy(model, named_ids(model, 1, 80), 80)
    assert out.tokens.shape == (1, 160)
    assert out.logits.shape == (1, 80, text_config(model).vocab_size)
    assert out.logits.isfinite().all()
    assert out.logits.std() > 0.3
    assert len(set(out.tokens[0, -64:].tolist())) > 8


def test_insensitive_comparison_is_reported() -> None:
    # Everything fits into either window: nothing can differ, and the proof must say so.
    with pytest.raises(AssertionError, match="gemma3_text, window 64: logits do not move"):
        assert_sensitive(BY_NAME["gemma3_text"], 64, prompt=8)


@every_species
def test_rounding_stays_below_the_tolerance(species: Species) -> None:
    model = species.build(64)
    ids = named_ids(model, 1, 320)
    want = teacher_forced(model, ids, prompt=320)
    got = teacher_forced(species.build(64, attn_implementation="eager"), ids, prompt=300)
    assert_same_logits(got, want, tol=TOL / 2)


@every_species
def test_each_row_of_a_padded_batch_equals_its_own_run(species: Species) -> None:
    model = species.build(8)
    lengths = [1, 15, 40]
    batch = species.inputs(model, lengths)
    ids, mask = _continued(batch["input_ids"], batch["attention_mask"], 6)
    got = teacher_forced(model, ids, prompt=40, attention_mask=mask)
    assert got.isfinite().all()
    for row, length in enumerate(lengths):
        start = 40 - length
        want = teacher_forced(model, ids[row : row + 1, start:], prompt=length)
        assert_same_logits(got[row : row + 1, start:], want)


@every_species
def test_chunks_equal_one_prefill(species: Species) -> None:
    model = species.build(8)
    batch = species.inputs(model, [20, 33])
    want = teacher_forced(model, batch["input_ids"], prompt=33, attention_mask=batch["attention_mask"])
    got = teacher_forced(model, batch["input_ids"], prompt=5, chunks=[7, 1, 16], attention_mask=batch["attention_mask"])
    assert_same_logits(got, want, batch["attention_mask"])


@every_species
def test_a_second_turn_continues_the_first(species: Species) -> None:
    model = species.build(8)
    batch = species.inputs(model, [20, 33])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    want = teacher_forced(model, ids, prompt=33, attention_mask=mask)
    first = forced(model, ids[:, :18], prompt=15, attention_mask=mask)
    second = forced(model, ids[:, 18:], prompt=10, attention_mask=mask, cache=first.cache)
    assert second.cache is first.cache
    assert_same_logits(torch.cat((first.logits, second.logits), dim=1), want, mask)


@every_species
def test_greedy_logits_are_the_teacher_forced_ones(species: Species) -> None:
    model = species.build(8)
    batch = species.inputs(model, [6, 20])
    out = greedy(model, batch["input_ids"], 7, attention_mask=batch["attention_mask"])
    mask = _continued(batch["input_ids"], batch["attention_mask"], 7)[1]
    want = teacher_forced(model, out.tokens, prompt=20, attention_mask=mask)
    assert_same_logits(out.logits, want[:, 19:-1])
    assert torch.equal(out.tokens[:, 20:], want[:, 19:-1].argmax(-1))
    assert out.cache.get_seq_length() == 26


@vision_species
def test_token_types_open_the_mask_where_the_species_does(species: Species) -> None:
    model = species.build(16)
    batch = species.inputs(model, [40, 25], images=[[(0, 9), (20, 9)], [(3, 9), (12, 9)]])
    mask, kinds = batch["attention_mask"], batch[token_type_key(model)]
    with_types = teacher_forced(model, batch["input_ids"], prompt=40, attention_mask=mask, token_types=kinds)
    without = teacher_forced(model, batch["input_ids"], prompt=40, attention_mask=mask)
    moved = ((with_types - without).abs().amax(-1) * mask).amax()
    assert (moved > 0.1) == species.bidirectional
    out = greedy(model, batch.pop("input_ids"), 3, **batch)
    assert_same_logits(out.logits[:, :1], with_types[:, -1:])


@vision_species
def test_pixels_reach_the_logits(species: Species) -> None:
    model = species.build(8)
    batch = species.inputs(model, [30, 21], images=[[(0, 18)], [(5, 9)]], pixels=True)
    first = greedy(model, batch["input_ids"], 3, **_without_ids(batch))
    batch["pixel_values"] = 1 - batch["pixel_values"]
    second = greedy(model, batch["input_ids"], 3, **_without_ids(batch))
    assert first.logits.isfinite().all()
    assert (first.logits - second.logits).abs().amax() > 0.1


@pytest.mark.parametrize("species", [species for species in VISION if species.name.startswith("gemma4")], ids=str)
def test_images_of_several_sizes_fit_into_one_batch(species: Species) -> None:
    model = species.build(8)
    batch = species.inputs(model, [30, 30], images=[[(2, 5), (7, 3)], [(4, 12)]], pixels=True)
    both = greedy(model, batch["input_ids"], 2, **_without_ids(batch))
    alone = species.inputs(model, [30], images=[[(2, 5), (7, 3)]], pixels=True)
    used = alone["pixel_values"].shape[1]
    assert both.logits.isfinite().all()
    assert (batch["image_position_ids"][2] >= 0).all()
    assert (batch["image_position_ids"][0, -1] == -1).all()
    assert used < batch["pixel_values"].shape[1]


def test_inputs_are_left_padded_with_ordinary_ids() -> None:
    species = BY_NAME["gemma3_vision"]
    model = species.build(8)
    batch = species.inputs(model, [2, 12], images=[[], [(0, 4), (4, 3)]])
    assert batch["input_ids"].shape == (2, 12)
    assert batch["attention_mask"].tolist() == [[0] * 10 + [1] * 2, [1] * 12]
    assert batch["token_type_ids"].tolist() == [[0] * 12, [1] * 7 + [0] * 5]
    assert (batch["input_ids"][0, :10] == PAD).all()
    real = batch["input_ids"][batch["attention_mask"].bool()]
    assert ((real > EOS) & (real < FIRST_SPECIAL)).all()
    assert torch.equal(batch["input_ids"], species.inputs(model, [2, 12])["input_ids"])
    with_pixels = species.inputs(model, [12, 20], images=[[], [(1, 18)]], pixels=True)
    assert (with_pixels["input_ids"][1, 1:19] == IMAGE_TOKEN).all()
    assert with_pixels["pixel_values"].shape == (2, 3, 12, 12)
    with pytest.raises(ValueError, match="multiples of 9"):
        species.inputs(model, [12], images=[[(0, 4)]], pixels=True)
    with pytest.raises(ValueError, match="ends after the row's 12 tokens"):
        species.inputs(model, [12], images=[[(9, 4)]])


def test_a_difference_is_named() -> None:
    want = torch.zeros(2, 5, 4)
    got = want.clone()
    got[1, 2, 3] = 0.5
    got[0, 4, 1] = 2.0
    assert_same_logits(want, want)
    with pytest.raises(
        AssertionError, match=r"first at row 1, position 2 of 5: by 0.5 .*most at row 0, position 4: by 2"
    ):
        assert_same_logits(got, want)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 2] = mask[0, 4] = 0
    assert_same_logits(got, want, mask)
    assert_same_logits(got, want, tol=2.0)
    with pytest.raises(AssertionError, match=r"shape \(2, 5, 4\). Got \(2, 4, 4\)"):
        assert_same_logits(got[:, 1:], want)


@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_not_finite_is_never_the_same(value: float) -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = value
    with pytest.raises(AssertionError, match="row 0, position 1"):
        assert_same_logits(logits, logits)


def test_rows_and_bytes_count_storage_and_not_views() -> None:
    model = BY_NAME["gemma3_text"].build(8)
    ids = named_ids(model, 2, 31)
    after_prefill = forced(model, ids[:, :30], prompt=30).cache
    # Stock keeps window - 1 rows as a view, and the whole prompt alive with it.
    assert {layer.keys.shape[-2] for layer in after_prefill.layers if layer.is_sliding} == {7}
    assert sliding_rows(after_prefill) == [30, 30, 30]
    row = 2 * 2 * 16 * 4 * 2  # batch, key heads, head size, bytes, keys and values
    assert storage_bytes(after_prefill) == 4 * 30 * row
    after_step = forced(model, ids, prompt=30).cache
    assert sliding_rows(after_step) == [8, 8, 8]
    assert storage_bytes(after_step) == (3 * 8 + 31) * row


@every_species
def test_running_a_stock_model_changes_nothing(species: Species) -> None:
    model = species.build(8)
    before = snapshot(model)
    batch = species.inputs(model, [4, 12])
    greedy(model, batch["input_ids"], 3, attention_mask=batch["attention_mask"])
    teacher_forced(model, batch["input_ids"], prompt=10)
    assert_unchanged(model, before)


def _replace_forward(model: torch.nn.Module) -> None:
    attention = text_model(model).layers[1].self_attn
    attention.forward = types.MethodType(type(attention).forward, attention)


def _add_hook(model: torch.nn.Module) -> None:
    text_model(model).register_forward_pre_hook(lambda module, args: None)


def _replace_parameter(model: torch.nn.Module) -> None:
    norm = text_model(model).norm
    norm.weight = torch.nn.Parameter(norm.weight.clone())


def _change_config(model: torch.nn.Module) -> None:
    text_config(model).sliding_window += 1


def _change_class(model: torch.nn.Module) -> None:
    text_model(model).layers[0].self_attn.__class__ = type("Other", (type(text_model(model).layers[0].self_attn),), {})


@pytest.mark.parametrize(
    ("change", "place"),
    (
        (_replace_forward, "model.layers.1.self_attn: 'forward' was missing"),
        (_add_hook, "model._forward_pre_hooks"),
        (_replace_parameter, "model.norm._parameters: 'weight'"),
        (_change_config, "'sliding_window' was 8, is 9"),
        (_change_class, "model.layers.0.self_attn: '__class__'"),
    ),
)
def test_a_change_of_the_model_is_named(change: Callable[[torch.nn.Module], None], place: str) -> None:
    model = BY_NAME["gemma3_text"].build(8)
    before = snapshot(model)
    assert_unchanged(model, before)
    change(model)
    with pytest.raises(AssertionError) as failure:
        assert_unchanged(model, before)
    assert place in str(failure.value)


def test_a_change_of_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils, masking_utils
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.gemma3 import modeling_gemma3

    model = BY_NAME["gemma3_text"].build(8)
    before = snapshot(model)
    changes = {
        "transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING: 'other'": lambda patch: patch.setitem(
            cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "other", cache_utils.DynamicLayer
        ),
        "transformers.masking_utils: 'sdpa_mask'": lambda patch: patch.setattr(masking_utils, "sdpa_mask", print),
        "ALL_ATTENTION_FUNCTIONS: 'other'": lambda patch: patch.setitem(
            AttentionInterface._global_mapping, "other", print
        ),
        "modeling_gemma3.Gemma3Attention: 'forward'": lambda patch: patch.setattr(
            modeling_gemma3.Gemma3Attention, "forward", print
        ),
        "cache_utils.DynamicCache: 'other'": lambda patch: patch.setattr(
            cache_utils.DynamicCache, "other", 1, raising=False
        ),
    }
    for place, change in changes.items():
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(AssertionError) as failure:
                assert_unchanged(model, before)
            assert place in str(failure.value)
        assert_unchanged(model, before)


def test_keyword_of_the_cache_is_the_installed_one() -> None:
    model = BY_NAME["gemma3_text"].build(8)
    ids = named_ids(model, 1, 6)
    first = forced(model, ids[:, :5], prompt=5)
    model(input_ids=ids[:, 5:], **{cache_key(model): first.cache})
    assert first.cache.get_seq_length() == 6
    assert isinstance(first.cache, transformers.DynamicCache)


def _continued(ids: Tensor, mask: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    more = named_ids(None, len(ids), steps, seed=99)
    return torch.cat((ids, more), dim=1), torch.cat((mask, torch.ones_like(more)), dim=1)


def _without_ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "input_ids"}
