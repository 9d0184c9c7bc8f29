"""Windows wherever a model runs: without a cache, in training, on anybody's cache; logits, gradients, and what is
computed, beside stock.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import zoo
from compare import (
    Gradients,
    assert_same_gradients,
    assert_same_logits,
    cache_key,
    cache_of,
    forced,
    gradient_error,
    parameter_gradients,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import DynamicCache, StaticCache
from zoo import BY_NAME, SLIDING, VOCAB, Model, Species, named_ids, text_config, text_model, token_type_key, token_types

import swapatch
from swapatch.backends import BACKENDS
from swapatch.backends.windows import Windowed

BLOCK = 16
WINDOWS = (8, 65)
SOME = ("gemma3_text", "gemma4_ple_shared", "gemma3_vision")
"""One of each kind: plain, with shared keys and values, with images."""

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 queries, so that short prompts take many of them."""
    monkeypatch.setitem(BACKENDS, "windowed", Windowed(BLOCK))


@pytest.fixture(params=SOME)
def some(request: pytest.FixtureRequest) -> Species:
    return BY_NAME[request.param]


def lengths(window: int) -> list[int]:
    return [window - 1, window, window + 1, window + 64, 5 * window]


def scored(model: Model, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=False, **inputs).logits
    return logits


def gradients(model: Model, ids: Tensor, keep: Tensor | None = None, **inputs: Any) -> Gradients:
    """Of a loss that hangs on every logit, or on those of the positions to `keep`."""
    logits = model(ids, **{"use_cache": False, **inputs}).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.device)
    if keep is not None:
        weights = weights * keep[..., None]
    return parameter_gradients(model, (logits * weights).sum())


def holes(rows: int, length: int) -> Tensor:
    """A left-padded batch whose last row also has tokens in its middle that nobody may see."""
    mask = torch.ones(rows, length, dtype=torch.long, device=zoo.DEVICE)
    mask[0, : length // 3] = 0
    mask[-1, length // 2 : length // 2 + 5] = 0
    return mask


def images(species: Species, model: Model, length: int) -> dict[str, Tensor]:
    if not species.vision:
        return {}
    blocks = [(length // 4, length // 4), (length // 2 + 1, length // 8)]
    return {token_type_key(model): token_types([length], [blocks])}


# -- the same logits --


@pytest.mark.parametrize("window", WINDOWS)
def test_scoring_without_a_cache(species: Species, window: int) -> None:
    model = species.build(window)
    for length in lengths(window):
        ids = named_ids(model, 1, length)
        inputs = images(species, model, length)
        want = scored(model, ids, **inputs)
        for wrong in (window - 1, window + 1) if length == 5 * window else ():
            assert (scored(species.with_window(model, wrong), ids, **inputs) - want).abs().max() > 1e-3
        with swapatch.patch(model):
            assert_same_logits(scored(model, ids, **inputs), want)
            assert swapatch.status(model).calls.windowed == {"uncached": 1}


@pytest.mark.parametrize("window", WINDOWS)
def test_padded_batches_with_holes(species: Species, window: int) -> None:
    model = species.build(window)
    length = window + 64
    ids, mask = named_ids(model, 3, length), holes(3, length)
    want = scored(model, ids, attention_mask=mask)
    with swapatch.patch(model):
        got = scored(model, ids, attention_mask=mask)
    assert got.isfinite().all()
    assert_same_logits(got, want, mask)


def test_packed_sequences(some: Species) -> None:
    """Positions that start anew keep the sequences of a row apart, as in stock."""
    model = some.build(8)
    ids = named_ids(model, 2, 100)
    positions = torch.cat([torch.arange(37), torch.arange(50), torch.arange(13)]).expand(2, -1).to(zoo.DEVICE)
    want = scored(model, ids, position_ids=positions)
    assert (want - scored(model, ids)).abs().max() > 1e-2
    with swapatch.patch(model):
        assert_same_logits(scored(model, ids, position_ids=positions), want)
        assert swapatch.status(model).calls.windowed == {"uncached": 1}


def test_a_model_that_only_slides(layout: str) -> None:
    sliding = Species(
        "sliding", "Gemma3ForCausalLM", lambda window: zoo._gemma3_text(window, layer_types=[SLIDING] * 2)
    )
    model = sliding.build(8)
    ids = named_ids(model, 1, 150)
    want = forced(model, ids, prompt=60, chunks=[40]).logits
    with swapatch.patch(model, layout=layout):
        assert_same_logits(scored(model, ids), want)
        assert_same_logits(forced(model, ids, prompt=60, chunks=[40]).logits, want)


def full_cache(model: Model) -> Any:
    return DynamicCache()


def window_cache(model: Model) -> Any:
    return DynamicCache(config=text_config(model))


def static_cache(model: Model) -> Any:
    return StaticCache(text_config(model), 200)


def wrapped_cache(model: Model) -> Any:
    """One whose `update` somebody has wrapped, and counts."""
    cache = DynamicCache(config=text_config(model))
    update = cache.update

    def counted(*args: Any, **kwargs: Any) -> Any:
        cache.updates = getattr(cache, "updates", 0) + 1
        return update(*args, **kwargs)

    cache.update = counted
    return cache


class Around:
    """No cache of transformers, but something around one that passes on what it is asked."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("get_seq_length", "get_mask_sizes", "get_query_offset"):
            return getattr(self.cache, name)
        raise AttributeError(name)


def hidden_cache(model: Model) -> Any:
    return Around(DynamicCache())


CACHES = (full_cache, window_cache, static_cache, wrapped_cache, hidden_cache)


@pytest.mark.parametrize("make", CACHES)
def test_caches_of_another_kind(some: Species, make: Callable[[Model], Any]) -> None:
    """A prompt, chunks of all sizes, and steps."""
    model = some.build(16)
    ids = named_ids(model, 1, 170)
    call = {"prompt": 60, "chunks": [40, 2, 40]}
    want = forced(model, ids, **call, cache=make(model))
    with swapatch.patch(model):
        got = forced(model, ids, **call, cache=make(model))
        calls = swapatch.status(model).calls
    assert_same_logits(got.logits, want.logits)
    assert type(got.cache) is type(want.cache)
    assert getattr(got.cache, "updates", 0) == getattr(want.cache, "updates", 0)
    steps = 28
    if make is static_cache:
        assert calls.windowed == {"prefill": 4}
        assert list(calls.stock.values()) == [steps]
    else:
        assert (calls.windowed, calls.stock) == ({"prefill": 4, "decode": steps}, {})


# -- what is computed --


@contextmanager
def counted(model: Model) -> Iterator[list[tuple[int, int]]]:
    """Queries and keys of every call of torch's attention in a sliding layer."""
    sizes: list[tuple[int, int]] = []
    inside = False
    attend = functional.scaled_dot_product_attention

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal inside
        inside = True

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal inside
        inside = False

    def count(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if inside:
            sizes.append((query.shape[2], key.shape[2]))
        return attend(query, key, *args, **kwargs)

    hooks = []
    for layer in text_model(model).layers:
        if layer.self_attn.is_sliding:
            hooks.append(layer.self_attn.register_forward_pre_hook(enter))
            hooks.append(layer.self_attn.register_forward_hook(leave))
    functional.scaled_dot_product_attention = count
    try:
        yield sizes
    finally:
        functional.scaled_dot_product_attention = attend
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("how", ("uncached", "training", "stock cache"))
def test_no_call_is_larger_than_a_block_and_its_window(some: Species, how: str) -> None:
    window, length = 16, 300
    model = some.build(window)
    ids = named_ids(model, 1, length)

    def call() -> None:
        if how == "training":
            model.train()
            model(ids, labels=ids, use_cache=False).loss.backward()
        elif how == "uncached":
            scored(model, ids)
        else:
            with torch.no_grad():
                model(ids, **{cache_key(model): window_cache(model)})

    with counted(model) as stock:
        call()
    assert max(queries * keys for queries, keys in stock) == length * length
    with swapatch.patch(model), counted(model) as ours:
        call()
    assert len(ours) >= len(stock) * length // BLOCK
    assert max(queries * keys for queries, keys in ours) <= BLOCK * (window + window // 8 + BLOCK)


# -- the same gradients --


@pytest.mark.parametrize("window", WINDOWS)
def test_gradients_of_every_parameter(species: Species, window: int) -> None:
    model = species.build(window).train()
    for length in lengths(window):
        ids = named_ids(model, 1, length)
        inputs = images(species, model, length)
        want = gradients(model, ids, **inputs)
        for wrong in (window - 1, window + 1) if length == 5 * window else ():
            other = species.with_window(model, wrong).train()
            assert gradient_error(gradients(other, ids, **inputs), want) > 1e-3
        with swapatch.patch(model):
            assert_same_gradients(gradients(model, ids, **inputs), want)
            assert swapatch.status(model).calls.windowed == {"training": 1}


def test_gradients_of_padded_batches(species: Species) -> None:
    model = species.build(16).train()
    ids, mask = named_ids(model, 3, 80), holes(3, 80)
    want = gradients(model, ids, mask, attention_mask=mask)
    with swapatch.patch(model):
        assert_same_gradients(gradients(model, ids, mask, attention_mask=mask), want)


def test_gradients_with_the_cache_that_a_forward_makes(some: Species) -> None:
    """`use_cache` is on by default, in training as well."""
    model = some.build(16)
    ids = named_ids(model, 1, 80)
    for mode in (True, False):
        model.train(mode)
        want = gradients(model, ids, use_cache=None)
        with swapatch.patch(model):
            assert_same_gradients(gradients(model, ids, use_cache=None), want)


def test_gradients_into_embeddings(some: Species) -> None:
    """Of a frozen model; one with per-layer embeddings cannot do without the tokens themselves."""
    model = some.build(16).requires_grad_(False)
    ids = named_ids(model, 1, 80)
    extra: dict[str, Any] = {}
    if some.ple:
        extra["per_layer_inputs"] = text_model(model).get_per_layer_inputs(ids, None)
    found = []
    for patched in (False, True):
        embeds = model.get_input_embeddings()(ids).requires_grad_()
        handle = swapatch.patch(model) if patched else None
        model(inputs_embeds=embeds, use_cache=False, **extra).logits.square().sum().backward()
        found.append({"embeds": embeds.grad})
        if handle:
            handle.undo()
    assert_same_gradients(found[1], found[0])


def test_gradients_into_pixels() -> None:
    species = BY_NAME["gemma3_vision"]
    model = species.build(16).requires_grad_(False)
    inputs = species.inputs(model, [60], images=[[(10, 9), (30, 18)]], pixels=True)
    found = []
    for patched in (False, True):
        pixels = inputs["pixel_values"].clone().requires_grad_()
        handle = swapatch.patch(model) if patched else None
        model(**{**inputs, "pixel_values": pixels}, use_cache=False).logits.square().sum().backward()
        found.append({"pixels": pixels.grad})
        if handle:
            handle.undo()
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("filled", ("without gradients", "with gradients", "empty"))
def test_several_steps_before_one_backward(some: Species, filled: str, layout: str) -> None:
    """A vector that is learned, added in the first layer: steps, a chunk, a roll and more steps on one cache."""
    model = some.build(16).requires_grad_(False)
    ids = named_ids(model, 1, 190)
    vector = torch.zeros(text_config(model).hidden_size, device=model.device, requires_grad=True)
    first = {"without gradients": 60, "with gradients": 60, "empty": 0}[filled]

    def gradient(cache: Any) -> Gradients:
        vector.grad = None
        hook = text_model(model).layers[0].register_forward_hook(lambda module, args, output: output + vector)
        key, total = cache_key(model), torch.zeros((), device=model.device)
        if first:
            with torch.set_grad_enabled(filled == "with gradients"):
                model(ids[:, :first], **{key: cache})
        cuts = [first, *range(first + 1, first + 5), first + 40, *range(first + 41, first + 75)]
        for start, stop in pairwise(cuts):
            total = total + model(ids[:, start:stop], **{key: cache}).logits.square().mean()
        total.backward()
        hook.remove()
        return {"vector": vector.grad.clone()}

    want = gradient(window_cache(model))
    with swapatch.patch(model, layout=layout):
        assert_same_gradients(gradient(swapatch.CompactCache(model, layout=layout)), want)


def test_steps_without_gradients_after_steps_with_them(some: Species, layout: str) -> None:
    """A step that writes in place leaves alone what an earlier one keeps for its way back."""
    model = some.build(16)
    ids = named_ids(model, 1, 100)
    key = cache_key(model)

    def gradient(cache: Any) -> Gradients:
        loss = model(ids[:, :60], **{key: cache}).logits.square().mean()
        loss = loss + model(ids[:, 60:61], **{key: cache}).logits.square().mean()
        with torch.no_grad():
            for position in range(61, 80):
                model(ids[:, position : position + 1], **{key: cache})
        return parameter_gradients(model, loss)

    want = gradient(window_cache(model))
    with swapatch.patch(model, layout=layout):
        assert_same_gradients(gradient(swapatch.CompactCache(model, layout=layout)), want)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(some: Species, dtype: torch.dtype) -> None:
    """No further from the float32 truth than stock is: over several prompts, for with one the noise is 20 %."""
    model = some.build(16).train()
    prompts = named_ids(model, 6, 120).split(1)
    truths = [gradients(model, ids) for ids in prompts]

    def error() -> float:
        squares = 0.0
        for ids, truth in zip(prompts, truths, strict=True):
            with torch.autocast(model.device.type, dtype):
                found = gradients(model, ids)
            squares += sum(float((found[name] - truth[name]).square().sum()) for name in truth)
        return squares**0.5

    want = error()
    with swapatch.patch(model):
        assert error() <= 1.1 * want


def test_bfloat16_gradients_are_no_further_from_the_truth(some: Species) -> None:
    exact = some.build(16).train()
    model = some.build(16, dtype=torch.bfloat16).train()
    errors: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(4):
        ids = named_ids(model, 1, 120, seed)
        truth = gradients(exact, ids)
        size = torch.stack([truth[name].norm() for name in truth]).norm()
        for patched in (False, True):
            handle = swapatch.patch(model) if patched else None
            found = gradients(model, ids)
            off = torch.stack([(found[name].float() - truth[name]).norm() for name in truth]).norm()
            errors[patched].append(float(off / size))
            if handle:
                handle.undo()
    assert sum(errors[True]) <= 1.1 * sum(errors[False])


def test_a_replaced_attention_is_differentiated_itself(some: Species, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own function in the place of torch's is used in every layer, forward and backward."""
    model = some.build(16).train()
    ids = named_ids(model, 1, 80)
    before = gradients(model, ids)
    attend = functional.scaled_dot_product_attention

    def cooler(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return attend(query * 0.5, *args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", cooler)
    want = gradients(model, ids)
    assert gradient_error(want, before) > 0.01
    with swapatch.patch(model):
        assert_same_gradients(gradients(model, ids), want)


@pytest.mark.parametrize("inference", (False, True), ids=("written over", "made in inference mode"))
def test_a_mask_of_the_caller_s_is_not_kept(some: Species, inference: bool) -> None:
    """He may use its memory for the next batch before he goes backward, or have made it anywhere."""
    model = some.build(16).train()
    ids, given = named_ids(model, 2, 60), holes(2, 60)
    want = gradients(model, ids, given, attention_mask=given)
    with torch.inference_mode(inference):
        mask = given.clone()
    with swapatch.patch(model):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        if not inference:
            mask.zero_()
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.device)
        weights = weights * given[..., None]
        assert_same_gradients(parameter_gradients(model, (logits * weights).sum()), want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, as below
def test_a_batch_of_gradients(some: Species) -> None:
    model = some.build(16)
    ids = named_ids(model, 1, 60)
    weight = text_model(model).layers[0].self_attn.v_proj.weight

    def batch() -> Gradients:
        logits = model(ids, use_cache=False).logits[0, 50, :5]
        (found,) = torch.autograd.grad(logits, weight, torch.eye(5, device=logits.device), is_grads_batched=True)
        return {"batch": found}

    want = batch()
    with swapatch.patch(model):
        assert_same_gradients(batch(), want)


def test_autocast_leaves_float64_alone() -> None:
    model = BY_NAME["gemma3_text"].build(16).double()
    ids = named_ids(model, 1, 60)
    with torch.autocast(model.device.type, torch.bfloat16):
        want = scored(model, ids)
        with swapatch.patch(model):
            got = scored(model, ids)
    assert_same_logits(got, want)


@pytest.mark.parametrize("change", ("attention_dropout", "is_causal"))
def test_layers_that_were_changed_run_in_stock_s_way(change: str) -> None:
    """One module alone, with a prompt within the window, where stock makes no mask; in `generate` as well."""
    model = BY_NAME["gemma3_text"].build(16)
    attention = text_model(model).layers[0].self_attn
    setattr(attention, change, {"attention_dropout": 0.8, "is_causal": False}[change])
    attention.train()
    ids = named_ids(model, 1, 12)
    steps = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        return [scored(model, ids), model.generate(ids, **steps)]

    want = run()
    with swapatch.patch(model):
        got = run()
        model.generate(ids, **steps, cache_implementation="static", disable_compile=True)
        calls = swapatch.status(model).calls
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert calls.windowed == {}
    assert sum(calls.stock.values()) == 11


@pytest.mark.parametrize("where", ("meta", "fake"))
def test_tensors_that_hold_nothing(where: str, layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 2, 50)
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    if where == "meta":
        model, ids, mode = model.to("meta"), ids.to("meta"), nullcontext()
    with swapatch.patch(model, layout=layout), mode, torch.no_grad():
        masks: list[dict[str, Any]] = [{}, {}]
        if where == "fake":  # stock looks into a mask on the meta device
            masks = [{"attention_mask": torch.ones_like(ids[:, :1]).expand(2, length)} for length in (50, 51)]
        output = model(ids, use_cache=True, **masks[0])
        step = model(ids[:, :1], **masks[1], **{cache_key(model): cache_of(output)})
    assert step.logits.shape == (2, 1, VOCAB)


def test_a_vision_model_refuses_what_stock_refuses() -> None:
    model = BY_NAME["gemma3_vision"].build(16)
    ids = named_ids(model, 1, 50)
    with torch.no_grad(), swapatch.patch(model):
        for width in (30, 70):
            with pytest.raises(RuntimeError, match="must match"):
                model(ids, attention_mask=torch.ones(1, width, device=model.device), use_cache=True)


# -- torch.func --


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of attention in the global layers
def test_transforms_of_torch_func(some: Species) -> None:
    """`grad`, `vmap` and one of the other over a model without a cache."""
    model = some.build(8)
    ids = named_ids(model, 3, 50)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def logits(row: Tensor) -> Tensor:
        out: Tensor = model(row[None], use_cache=False).logits
        return out

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        call = {"use_cache": False}
        out = torch.func.functional_call(model, parameters, (row[None],), call).logits
        return out.square().mean()

    def run() -> tuple[Gradients, Gradients, Tensor]:
        grad = torch.func.grad(loss)
        with torch.no_grad():
            mapped = torch.func.vmap(logits)(ids)
        return grad(parameters, ids[0]), torch.func.vmap(grad, in_dims=(None, 0))(parameters, ids), mapped

    want = run()
    with swapatch.patch(model):
        got = run()
    assert_same_gradients(got[0], want[0])
    assert_same_gradients(got[1], want[1])
    assert_same_logits(got[2][:, 0], want[2][:, 0])


# -- what is counted --


def test_calls_are_counted_with_their_reason() -> None:
    model = BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 20)
    with swapatch.patch(model), torch.no_grad():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        model(ids, use_cache=False)
        model(ids, output_attentions=True)
        model(ids, attention_mask=torch.ones(20, 20, dtype=torch.bool, device=model.device).tril()[None, None])
        with swapatch.disabled():
            model(ids)
        model.set_attn_implementation("eager")
        model(ids, is_causal=False, use_cache=False)
        calls = swapatch.status(model).calls
    assert calls.windowed == {"prefill": 1, "decode": 3, "uncached": 1}
    assert calls.stock == {
        "attention weights are wanted": 1,
        "a ready-made mask": 1,
        "swapatch is switched off": 1,
        "is_causal=False": 1,
    }
    assert swapatch.status(model).calls == swapatch.CallCounts()


def test_positions_are_left_to_who_comes_later() -> None:
    """Without positions in a call, a hook after ours finds none, and may give its own."""
    model = BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 30)
    seen: list[Any] = []

    def place(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(kwargs.get("position_ids"))
        return args, {**kwargs, "position_ids": 2 * torch.arange(kwargs["input_ids"].shape[1], device=ids.device)[None]}

    def run() -> Tensor:
        hook = text_model(model).register_forward_pre_hook(place, with_kwargs=True)
        logits = forced(model, ids, prompt=28).logits
        hook.remove()
        return logits

    want = run()
    with swapatch.patch(model):
        assert_same_logits(run(), want)
    assert seen == [None] * 6
