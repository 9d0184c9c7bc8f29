"""Calls at the edge of what swapatch handles: stock's result, or a refusal that says what to do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_logits, cache_key, forced, greedy
from transformers import Gemma3TextConfig
from zoo import BY_NAME, OLD, Model, Species, named_ids, text_model

import swapatch
from swapatch import verify

VISION = ("gemma3_vision", "gemma4_vision", "gemma4_vision_causal", "gemma4_unified")


def logits(model: Model, *args: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **options).logits


@pytest.mark.parametrize("window", (5, 64))
def test_a_causal_rule_that_is_switched_off(model_kind: Species, window: int) -> None:
    model = model_kind.build(window)
    ids = named_ids(model, 1, 17)
    want = logits(model, ids, is_causal=False)
    if not torch.equal(want, logits(model, ids)):  # before 5.17 the argument is not known
        with swapatch.patch(model):
            assert_same_logits(logits(model, ids, is_causal=False), want)


@pytest.mark.parametrize("name", VISION)
def test_packed_positions(name: str) -> None:
    """Two sequences in a row, told apart by their positions alone."""
    model = BY_NAME[name].build(5)
    ids = named_ids(model, 1, 17)
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    want = logits(model, input_ids=ids, position_ids=positions)
    with swapatch.patch(model):
        assert_same_logits(logits(model, input_ids=ids, position_ids=positions), want)


@pytest.mark.parametrize("grad", ((True, False), (False, True)), ids=str)
def test_a_cache_half_written_with_and_without_gradients(grad: tuple[bool, bool]) -> None:
    model = BY_NAME["gemma3_text"].build(5)
    last = text_model(model).layers[-1].self_attn
    with swapatch.patch(model):
        cache = forced(model, named_ids(model, 1, 20), prompt=20).cache
        hook = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with torch.set_grad_enabled(grad[0]), pytest.raises(ZeroDivisionError):
            model(named_ids(model, 1, 3), **{cache_key(model): cache})
        hook.remove()
        with torch.set_grad_enabled(grad[1]), pytest.raises(swapatch.CacheStateError):
            model(named_ids(model, 1, 1), **{cache_key(model): cache})


@pytest.mark.parametrize("grad", (False, True), ids=str)
def test_a_cache_made_for_another_window(grad: bool) -> None:
    """Rows for one window and a model with another would compute something, and wrong."""
    other, model = (BY_NAME["gemma3_text"].build(window) for window in (64, 5))
    with swapatch.patch(model):
        cache = swapatch.CompactCache(other)
        with torch.set_grad_enabled(grad), pytest.raises(swapatch.CacheStateError, match="window of 64"):
            model(named_ids(model, 1, 9), **{cache_key(model): cache})
        assert cache.lengths_before is None
        assert cache.get_seq_length() == 0


VERBS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(1),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0, 1])),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("tokens", (1, 3))
def test_verbs_in_inference_mode_and_on_outside(verb: str, tokens: int, layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(5)
    ids = named_ids(model, 2, 30)
    with swapatch.patch(model, layout=layout):
        with torch.inference_mode():
            cache = forced(model, ids[:, :20], prompt=20).cache
            cache = VERBS[verb](cache) or cache
        rest = ids[:, 20:] if verb != "reorder" else ids.flip(0)[:, 20:]
        got = forced(model, rest, prompt=tokens, cache=cache).logits
    want = forced(model, ids, prompt=20).logits[:, 20:]
    assert_same_logits(got if verb != "reorder" else got.flip(0), want)


@pytest.mark.parametrize("chunk", (1, 3))
def test_a_wider_dtype_than_the_cached_one(chunk: int, layout: str) -> None:
    """Prefilled under autocast, continued without, as stock's joining of rows allows."""
    model = BY_NAME["gemma3_text"].build(5)
    ids = named_ids(model, 1, 100)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            cache = forced(model, ids[:, :20], prompt=20).cache
        return forced(model, ids[:, 20:], prompt=chunk, cache=cache).logits

    want = run()
    with swapatch.patch(model, layout=layout):
        assert_same_logits(run(), want, tol=0.05)


def test_vision_config_without_a_cache() -> None:
    model = BY_NAME["gemma4_vision"].build(5)
    model.config.use_cache = False
    ids = named_ids(model, 1, 9)
    with torch.no_grad():
        want = model(ids)
        with swapatch.patch(model):
            got = model(ids)
    assert (cache_key(model) in got) == (cache_key(model) in want)
    assert_same_logits(got.logits, want.logits)


def test_masks_by_position() -> None:
    model = BY_NAME["gemma3_vision"].build(5)
    embeds = model.get_input_embeddings()(named_ids(model, 1, 12))
    call = (model.config, embeds, torch.ones(1, 12).long(), None, torch.arange(12)[None])
    if OLD:
        pytest.skip("transformers before 5.24 takes other arguments here")
    want = model.create_masks_for_generate(*call)
    with swapatch.patch(model):
        got = model.create_masks_for_generate(*call)
    for kind, mask in want.items():
        assert mask is got[kind] is None or torch.equal(mask, got[kind])


def test_patched_from_inside() -> None:
    model = BY_NAME["gemma3_text"].build(8)
    with (
        swapatch.patch(text_model(model)),
        pytest.raises(swapatch.AlreadyPatchedError, match=r"swapatch\.unpatch"),
    ):
        swapatch.patch(model)
    with swapatch.patch(model) as handle:
        assert swapatch.patch(text_model(model)) is handle


@pytest.mark.parametrize("shared", (False, True))
def test_layers_that_are_not_those_of_the_config(shared: bool) -> None:
    model = BY_NAME["gemma3_text"].build(8)
    layers = text_model(model).layers
    if shared:
        layers[1] = layers[0]
    else:
        text_model(model).layers = layers[:2]
    with pytest.raises(swapatch.UnsupportedModelError, match="set num_hidden_layers"):
        swapatch.patch(model)


def test_static_cache_refuses_drafts_as_stock() -> None:
    model = BY_NAME["gemma3_text"].build(5)
    ids = named_ids(model, 1, 65)
    options = {"cache_implementation": "static", "disable_compile": True, "prompt_lookup_num_tokens": 3}

    def outcome() -> type[Exception] | None:
        try:
            greedy(model, ids, 70, **options)
        except Exception as error:
            return type(error)
        return None

    want = outcome()
    with swapatch.patch(model):
        assert outcome() is want


def test_batch_verbs_with_static_global_layers() -> None:
    model = BY_NAME["gemma3_text"].build(5)
    cache = swapatch.CompactCache(model, max_cache_len=64)
    forced(model, named_ids(model, 2, 20), prompt=20, cache=cache)
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(swapatch.CacheStateError, match="max_cache_len"):
            call()
    assert {layer.keys.shape[0] for layer in cache.layers} == {2}


@pytest.mark.parametrize("length", (0, -1, 3.5, True, "a"))
def test_length_of_a_static_cache(length: Any) -> None:
    with pytest.raises(ValueError, match="max_cache_len="):
        swapatch.CompactCache(BY_NAME["gemma3_text"].make_config(5), max_cache_len=length)


def test_things_of_the_wrong_type() -> None:
    model = BY_NAME["gemma3_text"].build(5)
    for layout in ([], ["ring"], None):
        with pytest.raises(ValueError, match="'anchored' or 'ring'"):
            swapatch.patch(model, layout=layout)  # type: ignore[arg-type]
    with pytest.raises(swapatch.UnsupportedModelError, match="pass a loaded"):
        swapatch.CompactCache(Gemma3TextConfig)
    ids = named_ids(model, 1, 5)
    for wrong in ([1, 2, 3], "text", ids[0], ids[:, :0]):
        with pytest.raises(ValueError, match="return_tensors"):
            verify.compare(model, wrong)  # type: ignore[arg-type]
