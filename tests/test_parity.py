"""A patched model gives what the stock one gives: the logits of every position and every step, and the same tokens."""

import pytest
import torch
from compare import assert_same_logits, assert_sensitive, forced, greedy, unwritten_rows
from torch import Tensor
from zoo import Species, named_ids

import swapatch

WINDOWS = (8, 16, 64, 65, 100)
STEPS = 140  # more than two rolls of 64

pytestmark = pytest.mark.usefixtures("device")


def lengths_around(window: int) -> list[int]:
    """Prompt lengths where something changes: the window is full, a buffer is full, or either is one off."""
    return [1, window - 1, window, window + 1, window + 63, window + 64, window + 65, 3 * window + 7]


@pytest.mark.parametrize("window", WINDOWS)
def test_comparison_can_fail(species: Species, window: int) -> None:
    assert_sensitive(species, window, tol=1e-3)


@pytest.mark.parametrize("window", WINDOWS)
def test_every_position_and_step(species: Species, window: int, layout: str) -> None:
    """Each length with a few steps, and the longest of the short ones with enough steps for two rolls."""
    model = species.build(window)
    for length in lengths_around(window):
        ids = named_ids(model, 1, length + (STEPS if length == window + 1 else 4), seed=length)
        want = forced(model, ids, prompt=length).logits
        with swapatch.patch(model, layout=layout):
            got = forced(model, ids, prompt=length)
        assert isinstance(got.cache, swapatch.CompactCache)
        assert_same_logits(got.logits, want)
        assert_finite_rows(got.cache)


@pytest.mark.parametrize("window", WINDOWS)
def test_generate_gives_the_same_tokens(species: Species, window: int) -> None:
    """By stock generate; the other layout and the other modes are in test_generate_*.py."""
    model = species.build(window)
    ids = named_ids(model, 1, window + 3)
    want = greedy(model, ids, STEPS)
    with swapatch.patch(model):
        got = greedy(model, ids, STEPS)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)


@pytest.mark.parametrize("window", (8, 64, 65))
def test_left_padded_batch(species: Species, window: int, layout: str) -> None:
    """Pads longer than the window included: finite everywhere, and the padded rows equal stock's."""
    model = species.build(window)
    inputs = species.inputs(model, (1, 15, 90))
    want = greedy(model, inputs["input_ids"], 70, attention_mask=inputs["attention_mask"])
    with swapatch.patch(model, layout=layout):
        got = greedy(model, inputs["input_ids"], 70, attention_mask=inputs["attention_mask"])
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)
    assert_finite_rows(got.cache)


def test_padded_rows_equal_their_own_runs(species: Species, layout: str) -> None:
    model = species.build(16)
    lengths = (1, 15, 90)
    inputs = species.inputs(model, lengths)
    with swapatch.patch(model, layout=layout):
        batch = greedy(model, inputs["input_ids"], 30, attention_mask=inputs["attention_mask"])
        for row, length in enumerate(lengths):
            alone = greedy(model, inputs["input_ids"][row : row + 1, -length:], 30)
            assert_same_logits(batch.logits[row : row + 1], alone.logits)


@pytest.mark.parametrize("window", (8, 65))
def test_holes_in_the_mask(species: Species, window: int, layout: str) -> None:
    """A 2D mask may hide any token, not only the first ones; also every position of the prompt is compared."""
    model = species.build(window)
    length, steps = 3 * window, 70
    ids = named_ids(model, 2, length + steps)
    mask = torch.rand((2, length + steps), generator=torch.Generator().manual_seed(1)) > 0.3
    mask[:, -1] = True
    mask[0, :window] = False
    want = forced(model, ids, prompt=length, attention_mask=mask.long()).logits
    with swapatch.patch(model, layout=layout):
        got = forced(model, ids, prompt=length, attention_mask=mask.long())
    assert_same_logits(got.logits, want, mask)
    assert_finite_rows(got.cache)


@pytest.mark.parametrize("chunks", ([1, 2, 3, 5], [62, 63, 64, 65, 66], [130, 1, 130]), ids=str)
@pytest.mark.parametrize("window", (8, 100))
def test_appends_of_many_tokens(species: Species, window: int, chunks: list[int], layout: str) -> None:
    model = species.build(window)
    prompt = window + 5
    ids = named_ids(model, 1, prompt + sum(chunks) + 3)
    want = forced(model, ids, prompt=prompt, chunks=chunks).logits
    with swapatch.patch(model, layout=layout):
        got = forced(model, ids, prompt=prompt, chunks=chunks)
    assert_same_logits(got.logits, want)


def test_conversations_take_turns(species: Species, layout: str) -> None:
    """Two caches on one model, a token each in turn, give what each gives alone."""
    model = species.build(16)
    ids = [named_ids(model, 1, 120, seed=seed) for seed in (1, 2)]
    with swapatch.patch(model, layout=layout), torch.no_grad():
        alone = [forced(model, one, prompt=20).logits for one in ids]
        runs = [forced(model, one[:, :20], prompt=20) for one in ids]
        logits = [[run.logits] for run in runs]
        for step in range(20, 120):
            for number, run in enumerate(runs):
                part = forced(model, ids[number][:, step : step + 1], prompt=1, cache=run.cache)
                logits[number].append(part.logits)
    for got, want in zip(logits, alone, strict=True):
        assert_same_logits(torch.cat(got, dim=1), want)


def test_eager_attention(species: Species) -> None:
    model = species.build(8, attn_implementation="eager")
    ids = named_ids(model, 1, 100)
    want = forced(model, ids, prompt=30).logits
    with swapatch.patch(model):
        assert_same_logits(forced(model, ids, prompt=30).logits, want)


def test_reference_backend(species: Species) -> None:
    model = species.build(8)
    ids = named_ids(model, 1, 100)
    want = forced(model, ids, prompt=30).logits
    with swapatch.patch(model, backend="reference"):
        assert_same_logits(forced(model, ids, prompt=30).logits, want)


def test_bfloat16_is_no_further_from_the_truth(species: Species, layout: str) -> None:
    """Against float32 stock as the truth, the error is at most 1.1 times that of bfloat16 stock."""
    window = 100
    truth_model, model = species.build(window), species.build(window, dtype=torch.bfloat16)
    ids = named_ids(model, 1, 3 * window + 107)
    truth = forced(truth_model, ids, prompt=3 * window).logits
    stock = forced(model, ids, prompt=3 * window).logits
    with swapatch.patch(model, layout=layout):
        ours = forced(model, ids, prompt=3 * window).logits
    assert root_mean_square(ours - truth) <= 1.1 * root_mean_square(stock - truth)


def root_mean_square(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def assert_finite_rows(cache: swapatch.CompactCache) -> None:
    """Every row is finite, and those not written are zero."""
    for layer in cache.sliding:
        unwritten = unwritten_rows(layer)
        for buffer in (layer.key_rows, layer.value_rows):
            assert buffer.isfinite().all()
            assert not buffer[:, :, unwritten].any()
