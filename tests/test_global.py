"""Global layers: by rectangles where stock makes a mask over everything, and otherwise left to transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compare import (
    assert_same_gradients,
    assert_same_logits,
    cache_key,
    cache_of,
    forced,
    parameter_gradients,
    stock_or_patched,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache, StaticCache
from zoo import BY_NAME, OLD, SPECIES, Model, Species, named_ids, text_model, token_type_key, token_types

import swapatch

WINDOW = 16
LENGTH = 400

NAMED = pytest.mark.parametrize("species", SPECIES, ids=str)
LAYOUTS = pytest.mark.parametrize("layout", ("anchored", "ring"))


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(out) if _real(leaf)]
        self.elements = max([self.elements, *sizes])
        return out


def _real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


def padded(*widths: tuple[int, int], length: int = LENGTH) -> Tensor:
    """A 2D mask, [batch, length], with so many hidden tokens on the left and on the right of each sequence."""
    mask = torch.ones(len(widths), length, dtype=torch.long)
    for row, (left, right) in enumerate(widths):
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    return mask


def with_holes() -> Tensor:
    mask = padded((3, 0), (0, 9))
    mask[0, 50:60] = 0
    mask[1, 300] = 0
    return mask


MASKS: dict[str, Callable[[], Tensor]] = {
    "left": lambda: padded((250, 0), (0, 0), (3, 0), (3, 0)),
    "right": lambda: padded((0, 250), (0, 1), (0, 0)),
    "both": lambda: padded((100, 100), (1, 299), (399, 0)),
    "one sequence": lambda: padded((130, 0)),
    "nothing of one": lambda: padded((400, 0), (200, 0)),
    "holes": with_holes,
}


@NAMED
@LAYOUTS
@pytest.mark.parametrize("how", MASKS)
def test_a_batch_with_padding(species: Species, layout: str, how: str) -> None:
    """All positions, of hidden tokens as well, and the steps behind them."""
    model = species.build(WINDOW)
    mask = MASKS[how]()
    ids = named_ids(model, *mask.shape)
    more = torch.cat([mask, torch.ones(len(mask), 3, dtype=torch.long)], dim=1)
    longer = torch.cat([ids, named_ids(model, len(mask), 3, seed=1)], dim=1)
    want = forced(model, longer, prompt=LENGTH, attention_mask=more).logits
    with swapatch.patch(model, layout=layout):
        got = forced(model, longer, prompt=LENGTH, attention_mask=more).logits
        assert not swapatch.status(model).calls.stock
    assert_same_logits(got, want)


@NAMED
@LAYOUTS
@pytest.mark.parametrize("chunks", ((300, 90), (2, 131, 257), (390,)), ids=str)
def test_a_second_turn(species: Species, layout: str, chunks: tuple[int, ...]) -> None:
    """Behind a first prompt of ten tokens; with padding and without."""
    model = species.build(WINDOW)
    ids = named_ids(model, 2, LENGTH)
    for mask in (None, padded((4, 0), (0, 0))):
        want = forced(model, ids, prompt=10, chunks=chunks, attention_mask=mask).logits
        with swapatch.patch(model, layout=layout):
            got = forced(model, ids, prompt=10, chunks=chunks, attention_mask=mask).logits
        assert_same_logits(got, want)


@pytest.mark.parametrize("species", [species for species in SPECIES if species.vision], ids=str)
@pytest.mark.parametrize("chunk", (0, 150))
def test_images_in_a_long_prompt(species: Species, chunk: int) -> None:
    model = species.build(WINDOW)
    images = [[(0, 6), (130, 40)], [(20, 3), (23, 30), (280, 20)]]
    lengths = [LENGTH, LENGTH - 100]
    batch = species.inputs(model, lengths, images=images)
    options: dict[str, Any] = {
        "prompt": LENGTH - chunk,
        "chunks": (chunk,) if chunk else (),
        "attention_mask": batch["attention_mask"],
        "token_types": token_types(lengths, images),
    }
    try:
        want = forced(model, batch["input_ids"], **options).logits
    except RuntimeError as error:
        if not OLD:
            raise
        pytest.skip(f"this transformers cannot continue a long prompt with images: {error}")
    with swapatch.patch(model):
        got = forced(model, batch["input_ids"], **options).logits
    assert_same_logits(got, want)


def prefill(model: Model, ids: Tensor, mask: Tensor) -> Any:
    return model(ids, attention_mask=mask, logits_to_keep=1)


def scored(model: Model, ids: Tensor, mask: Tensor) -> Any:
    return model(ids, attention_mask=mask, logits_to_keep=1, use_cache=False)


def behind(model: Model, ids: Tensor, mask: Tensor) -> Any:
    first = model(ids[:, :100], attention_mask=mask[:, :100], logits_to_keep=1)
    return model(ids[:, 100:], attention_mask=mask, logits_to_keep=1, **{cache_key(model): cache_of(first)})


def static(model: Model, ids: Tensor, mask: Tensor) -> Any:
    cache = StaticCache(model.config, max_cache_len=LENGTH + 50)
    return model(ids, attention_mask=mask, logits_to_keep=1, **{cache_key(model): cache})


def dynamic(model: Model, ids: Tensor, mask: Tensor) -> Any:
    return model(ids, attention_mask=mask, logits_to_keep=1, **{cache_key(model): DynamicCache()})


def fixed(model: Model, ids: Tensor, mask: Tensor) -> Any:
    cache = swapatch.CompactCache(model, max_cache_len=LENGTH + 50)
    return model(ids, attention_mask=mask, logits_to_keep=1, **{cache_key(model): cache})


def packed(model: Model, ids: Tensor, mask: Tensor) -> Any:
    positions = torch.cat([torch.arange(size) for size in (150, 7, LENGTH - 157)])[None]
    return model(ids, position_ids=positions, logits_to_keep=1, use_cache=False)


def with_images(model: Model, ids: Tensor, mask: Tensor) -> Any:
    types = token_types([LENGTH] * len(ids), [[(30, 100), (200, 60)]] * len(ids))
    return model(ids, attention_mask=mask, logits_to_keep=1, **{token_type_key(model): types})


def training(model: Model, ids: Tensor, mask: Tensor) -> Any:
    with torch.enable_grad():
        output = model(ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
        output.logits.sum().backward()
    return output


WAYS = {call.__name__: call for call in (prefill, scored, behind, static, dynamic, fixed, packed, training)}
WAYS["with images"] = with_images


@pytest.mark.parametrize("attention", ("sdpa", "eager"))
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ("gemma3_text", "gemma4_ple_shared", "gemma3_vision"))
def test_nothing_is_as_large_as_all_tokens_squared(name: str, how: str, attention: str) -> None:
    """Neither a mask nor scores nor keys that were repeated for each head, in any layer; in stock something is."""
    if how == "with images" and name != "gemma3_vision":
        return
    model = BY_NAME[name].build(WINDOW, attn_implementation=attention)
    ids, mask = named_ids(model, 1, LENGTH), padded((20, 0))
    found = {}
    for patched in stock_or_patched(model):
        with Largest() as largest, torch.no_grad():
            WAYS[how](model, ids, mask)
        found[patched] = largest.elements
    assert found[False] >= LENGTH * LENGTH * 3 // 4
    assert found[True] < LENGTH * LENGTH * 3 // 5


@NAMED
@pytest.mark.parametrize("how", ("left", "both"))
def test_gradients_of_a_batch_with_padding(species: Species, how: str) -> None:
    model = species.build(WINDOW)
    mask = MASKS[how]()[:, 100:]
    ids = named_ids(model, *mask.shape)
    found = []
    for _ in stock_or_patched(model):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        found.append(parameter_gradients(model, (logits * mask[..., None]).square().mean()))
    assert_same_gradients(found[1], found[0])


@contextmanager
def global_masks(model: Model) -> Iterator[list[Any]]:
    """What the global layers get for a mask."""
    seen: list[Any] = []
    layer = next(layer for layer in text_model(model).layers if not layer.self_attn.is_sliding)
    handle = layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


def test_who_looks_at_the_mask_of_a_global_layer_finds_stock_s() -> None:
    """And only there: sliding layers go on in windows."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    mask = padded((30, 0), (0, 0))
    ids = named_ids(model, *mask.shape)
    with global_masks(model) as seen, torch.no_grad():
        for _ in stock_or_patched(model):
            model(ids, attention_mask=mask)
            calls = swapatch.status(model).calls
    assert torch.equal(*seen)
    assert calls.windowed == {"prefill": 1}
    assert not calls.stock


def test_a_replaced_forward_of_a_global_layer_counts() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    attention = next(layer.self_attn for layer in text_model(model).layers if not layer.self_attn.is_sliding)
    mask = padded((30, 0), (0, 0))
    ids = named_ids(model, *mask.shape)
    found = []
    for patched in stock_or_patched(model):
        before = attention.forward
        attention.forward = lambda *args, **kwargs: (before(*args, **kwargs)[0] * 0.5, None)  # noqa: B023
        with torch.no_grad():
            found.append(model(ids, attention_mask=mask).logits)
        if patched:
            attention.forward = before
        else:
            del attention.forward
    assert_same_logits(found[1], found[0])


def test_without_a_mask_it_is_transformers_own_choice() -> None:
    """Bit for bit: a prompt, and the steps behind it."""
    model = BY_NAME["gemma3_text"].build(LENGTH + 100)
    ids = named_ids(model, 1, 60)
    want, got = [
        forced(model, ids, prompt=50, attention_mask=mask).logits
        for _ in stock_or_patched(model)
        for mask in (torch.ones_like(ids),)
    ]
    assert torch.equal(got[:, :50], want[:, :50])
    assert_same_logits(got, want)
