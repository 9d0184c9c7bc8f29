"""Images: masks equal to those that the installed transformers makes, element by element, and logits as stock's."""

from typing import Any

import pytest
import torch
from compare import assert_same_logits, assert_sensitive, cache_key, forced, greedy, unseen
from torch import Tensor, nn
from zoo import SPECIES, Species, named_ids, text_model, token_type_key, token_types

import swapatch
from swapatch.geometry import ALIGN
from swapatch.step import Step

WINDOW = 16
LENGTH = 70
# Images as (start, length), in a prompt of 70 tokens and a window of 16.
LAYOUTS = {
    "at the start": [(0, 6)],
    "crosses the window's edge": [(10, 12)],
    "wider than the window": [(20, 25)],
    "two that touch": [(10, 7), (17, 7)],
    "two apart": [(3, 6), (40, 9)],
    "at the end": [(62, 8)],
    "a single token": [(33, 1)],
    "everything": [(0, 70)],
}
VISION = [species for species in SPECIES if species.vision]


@pytest.fixture(params=VISION, ids=str)
def species(request: pytest.FixtureRequest) -> Species:
    return request.param


def sliding_mask(model: nn.Module, call: dict[str, Any]) -> Any:
    """What the first sliding layer gets for a mask in this call."""
    layer = next(layer for layer in text_model(model).layers if layer.self_attn.is_sliding)
    caught = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(kwargs["attention_mask"])

    with torch.no_grad(), unseen(layer.self_attn, catch):
        model(**call)
    return caught[0]


def dense(mask: Any, batch: int, queries: int, block: int) -> Tensor:
    """Bool [batch, 1, queries, keys], from a stock mask (None is causal) or from all rectangles of a step."""
    if isinstance(mask, Tensor):
        return mask.bool().expand(batch, 1, queries, -1)
    if mask is None:
        return torch.ones(batch, 1, queries, queries, dtype=torch.bool).tril()
    assert isinstance(mask, Step)
    held = mask.keys
    whole = torch.zeros(batch, 1, queries, held.size, dtype=torch.bool)
    for rectangle in mask.rule.rectangles(mask.queries, held, torch.zeros(1), block):
        for rows, keys, part, _, sequences in rectangle.blocks(block, torch.zeros(1)):
            seen = whole[slice(*(sequences or (0, batch))), :, slice(*rows)]
            seen[..., slice(*keys)] = True
            if part is not None:
                seen[..., keys.stop - part.shape[-1] : keys.stop] = part == 0
    return whole


def assert_same_masks(model: nn.Module, calls: list[dict[str, Any]], block: int = 8) -> None:
    """The calls follow each other on one cache; each makes the masks that it makes in a stock model."""
    masks = []
    for patched in (False, True):
        cache = swapatch.CompactCache(model)
        handle = swapatch.patch(model) if patched else None
        masks.append([sliding_mask(model, {**call, cache_key(model): cache, "use_cache": True}) for call in calls])
        if handle:
            handle.undo()
    for call, stock, ours in zip(calls, *masks, strict=True):
        batch, queries = call["input_ids"].shape
        assert isinstance(ours, Step)
        assert not isinstance(stock, Step)
        assert torch.equal(dense(ours, batch, queries, block), dense(stock, batch, queries, block))


@pytest.mark.parametrize("images", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("window", (2, WINDOW, 65, 100))
def test_masks_are_stock_s(species: Species, window: int, images: list[tuple[int, int]]) -> None:
    model = species.build(window)
    assert_same_masks(model, [species.inputs(model, [LENGTH], images=[images])])


@pytest.mark.parametrize("block", (1, 7, 256))
def test_masks_of_a_padded_batch(species: Species, block: int) -> None:
    """Images at different places in rows of different lengths, one of them all padding for a window and more."""
    model = species.build(WINDOW)
    images = [[(0, 30)], [(2, 5), (40, 20)], []]
    assert_same_masks(model, [species.inputs(model, [31, 70, 4], images=images)], block)


def test_masks_of_chunks_and_steps(species: Species) -> None:
    """A border within an image, one at its edge, then a single token, with types that end with the chunk."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, LENGTH)
    types = token_types([LENGTH], [[(5, 20), (40, 10)]])
    calls = []
    for start, stop in ((0, 12), (12, 25), (25, 45), (45, 46), (46, 69)):
        calls.append({"input_ids": ids[:, start:stop], token_type_key(model): types[:, :stop]})
    calls.append({"input_ids": ids[:, 69:]})
    try:
        assert_same_masks(model, calls)
    except RuntimeError as error:  # transformers 5.15 and 5.16 cannot do this themselves
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            forced(model, ids, prompt=12, chunks=[13, 20], token_types=types)


@pytest.mark.parametrize("images", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_logits_of_every_position(species: Species, images: list[tuple[int, int]]) -> None:
    model = species.build(WINDOW)
    ids = named_ids(model, 1, LENGTH + 80)
    types = token_types([LENGTH], [images])
    want = forced(model, ids, prompt=LENGTH, token_types=types).logits
    with swapatch.patch(model):
        got = forced(model, ids, prompt=LENGTH, token_types=types)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert_same_logits(got.logits, want)


def test_comparison_sees_the_images(species: Species) -> None:
    """The logits depend on the token types where images attend both ways, and on the window everywhere."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, LENGTH)
    with_image = forced(model, ids, prompt=LENGTH, token_types=token_types([LENGTH], [[(20, 25)]])).logits
    without = forced(model, ids, prompt=LENGTH, token_types=token_types([LENGTH], [[]])).logits
    assert ((with_image - without).abs().max() > 1e-2) == species.bidirectional
    assert_sensitive(species, WINDOW, tol=1e-3)


def test_padded_batch_generates_as_stock(species: Species) -> None:
    model = species.build(WINDOW)
    inputs = species.inputs(model, [31, 70, 4], images=[[(0, 30)], [(2, 5), (40, 20)], [(1, 2)]])
    ids = inputs.pop("input_ids")
    want = greedy(model, ids, 80, **inputs)
    with swapatch.patch(model):
        got = greedy(model, ids, 80, **inputs)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)


def test_raw_pixels(species: Species) -> None:
    model = species.build(WINDOW)
    inputs = species.inputs(model, [30, 50], images=[[(3, 9)], [(0, 9), (20, 18)]], pixels=True)
    ids = inputs.pop("input_ids")
    want = greedy(model, ids, 70, **inputs)
    with swapatch.patch(model):
        got = greedy(model, ids, 70, **inputs)
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)


def test_text_turn_after_an_image(species: Species) -> None:
    """A second turn without an image on a cache that has seen one, in one call and by generate."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, 130)
    types = token_types([60], [[(30, 25)]])

    def turns() -> Tensor:
        first = forced(model, ids[:, :60], prompt=60, token_types=types)
        second = forced(model, ids[:, 60:110], prompt=50, cache=first.cache)
        return torch.cat(
            [first.logits, second.logits, greedy(model, ids, 5, **{cache_key(model): first.cache}).logits], 1
        )

    want = turns()
    with swapatch.patch(model):
        got = turns()
    assert_same_logits(got, want)


def test_text_only_call(species: Species) -> None:
    model = species.build(WINDOW)
    ids = named_ids(model, 1, LENGTH + 20)
    want = forced(model, ids, prompt=LENGTH).logits
    with swapatch.patch(model):
        assert_same_logits(forced(model, ids, prompt=LENGTH).logits, want)


@pytest.mark.parametrize("chunk", (1, 7, 20, 100))
def test_prefill_chunks_cut_images_as_stock(species: Species, chunk: int) -> None:
    model = species.build(WINDOW)
    inputs = species.inputs(model, [LENGTH], images=[[(5, 20), (40, 10)]])
    ids = inputs.pop("input_ids")
    options = {**inputs, "prefill_chunk_size": chunk}
    try:
        want = greedy(model, ids, 5, **options)
    except RuntimeError:  # transformers 5.15 and 5.16 cannot do this themselves
        return
    with swapatch.patch(model):
        got = greedy(model, ids, 5, **options)
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)


def test_no_square_mask_for_a_sliding_layer(species: Species) -> None:
    """A rectangle is never wider than the window, its queries and the images that they touch."""
    model = species.build(WINDOW)
    length = 1000
    types = token_types([length], [[(500, 20)]])
    with swapatch.patch(model):
        call = {"input_ids": named_ids(model, 1, length), token_type_key(model): types, "use_cache": True}
        step = sliding_mask(model, call)
    block = 128
    parts = step.rule.rectangles(step.queries, step.queries, torch.zeros(1), block)
    assert max(part.keys.size for part in parts) <= WINDOW + ALIGN + block + 20
    assert sum(part.mask.numel() for part in parts if part.mask is not None) < length * length / 2


def test_access_mode_is_static(species: Species) -> None:
    with swapatch.patch(species.build(WINDOW)) as handle:
        assert handle.plan.bidirectional == species.bidirectional
