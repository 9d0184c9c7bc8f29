"""A compact cache reads like stock's: whoever looks into it, edits it, wraps it or asks what it is finds the same."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_logits, cache_key, cache_of, forced, greedy
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer, StaticCache
from zoo import BY_NAME, Model, Species, named_ids, text_config

import swapatch
from swapatch._compat import CROPS_TO_LENGTH

WINDOW = 8
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 100)
Make = Callable[[Model], Any]


def dynamic(model: Model) -> Any:
    return DynamicCache(config=text_config(model))


def static(model: Model) -> Any:
    return StaticCache(text_config(model), 200)


KINDS: dict[str, tuple[Make, dict[str, Any]]] = {"dynamic": (dynamic, {}), "static": (static, {"max_cache_len": 200})}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stock_and_compact(model: Model, kind: str, layout: str) -> tuple[Any, swapatch.CompactCache]:
    make, options = KINDS[kind]
    return make(model), swapatch.CompactCache(model, layout=layout, **options)


def feed(model: Model, ids: Tensor, cache: Any, layout: str | None) -> Tensor:
    """Logits of some more tokens, one call."""
    handle = None if layout is None else swapatch.patch(model, layout=layout)
    try:
        with torch.no_grad():
            logits: Tensor = model(ids, **{cache_key(model): cache}).logits
    finally:
        if handle:
            handle.undo()
    return logits


def assert_same_rows(got: Any, want: Any) -> None:
    for ours, stock in zip(got.layers, want.layers, strict=True):
        for name in ("keys", "values"):
            rows, expected = getattr(ours, name, None), getattr(stock, name, None)
            if expected is None:
                assert rows is None
            else:
                torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt", LENGTHS)
def test_rows_after_every_call(model_kind: Species, kind: str, prompt: int, layout: str) -> None:
    """Time order, as many rows, the same numbers: after a prompt, steps, a chunk, steps."""
    model = model_kind.build(WINDOW)
    stock, ours = stock_and_compact(model, kind, layout)
    ids, start = named_ids(model, 1, prompt + 20), 0
    for tokens in (prompt, *[1] * 10, 5, *[1] * 5):
        part = ids[:, start : start + tokens]
        start += tokens
        want = feed(model, part, stock, None)
        assert_same_logits(feed(model, part, ours, layout), want)
        assert_same_rows(ours, stock)
        assert [layer.get_seq_length() for layer in ours.sliding] == [start] * len(ours.sliding)


def test_a_buffer_one_row_off_would_be_seen(layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    stock, ours = stock_and_compact(model, "dynamic", layout)
    for cache, patched in ((stock, None), (ours, layout)):
        feed(model, named_ids(model, 1, 30), cache, patched)
    ours.sliding[0].seen -= 1
    with pytest.raises(AssertionError):
        assert_same_rows(ours, stock)


@pytest.mark.parametrize("prompt", (5, 12, 100))
@pytest.mark.parametrize("more", (1, 3))
def test_edited_rows_count(model_kind: Species, kind: str, prompt: int, more: int, layout: str) -> None:
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, prompt + 10)
    stock, ours = stock_and_compact(model, kind, layout)
    for cache, patched in ((stock, None), (ours, layout)):
        feed(model, ids[:, : prompt - 1], cache, patched)
        feed(model, ids[:, prompt - 1 : prompt], cache, patched)
        for layer in cache.layers:
            if layer.keys is not None and layer.keys.numel():
                # A row that is still there at the next step in every kind of cache.
                newest = min(prompt, layer.keys.shape[2]) - 1
                layer.values[:, :, newest] += 0.5
                layer.keys[:, :, newest - 1] *= -1
    start = prompt
    for tokens in (more, 1, 1):
        part = ids[:, start : start + tokens]
        want = feed(model, part, stock, None)
        assert_same_logits(feed(model, part, ours, layout), want)
        start += tokens


def test_rows_that_were_read_stay_as_they_were(model_kind: Species, layout: str) -> None:
    """Who kept them has a snapshot, and writing into an old one changes nothing."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, 40)
    cache = swapatch.CompactCache(model, layout=layout)
    feed(model, ids[:, :30], cache, layout)
    kept = [(layer.keys, layer.keys.clone()) for layer in cache.sliding]
    feed(model, ids[:, 30:31], cache, layout)
    assert all(torch.equal(*pair) for pair in kept)
    twin = copy.deepcopy(cache)
    for rows, _ in kept:
        rows.fill_(7.0)
    assert torch.equal(feed(model, ids[:, 31:32], cache, layout), feed(model, ids[:, 31:32], twin, layout))


@pytest.mark.parametrize("how", ("by reading", "by setting"))
@pytest.mark.parametrize("prompt", (5, 30))
def test_merged_caches(model_kind: Species, prompt: int, how: str, layout: str) -> None:
    """Two conversations of the same length become a batch of two."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 2, prompt + 5)

    def merged(make: Callable[[], Any], patched: str | None) -> Any:
        caches = [make(), make()]
        for row, cache in enumerate(caches):
            feed(model, ids[row : row + 1, :prompt], cache, patched)
        held = [i for i, layer in enumerate(caches[0].layers) if layer.keys is not None and layer.keys.numel()]
        pairs = {
            index: [torch.cat([getattr(cache.layers[index], name) for cache in caches]) for name in ("keys", "values")]
            for index in held
        }
        both = caches[0] if how == "by setting" else make()
        for index, (keys, values) in pairs.items():
            if how == "by setting":
                both.layers[index].keys, both.layers[index].values = keys, values
            else:
                both.update(keys, values, index)
        return both

    stock = merged(lambda: dynamic(model), None)
    ours = merged(lambda: swapatch.CompactCache(model, layout=layout), layout)
    if how == "by reading" and prompt >= WINDOW:
        return assert_same_rows(ours, stock)  # its layers do not agree how long they are, so stock cannot go on
    for start in range(prompt, prompt + 5):
        part = ids[:, start : start + 1]
        want = feed(model, part, stock, None)
        assert_same_logits(feed(model, part, ours, layout), want)
    return None


def with_rows(cache: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Other rows in all sliding layers that have some."""
    for layer in cache.layers:
        if getattr(layer, "is_sliding", False) and layer.keys is not None and layer.keys.numel():
            layer.keys, layer.values = change(layer.keys), change(layer.values)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "prepended": lambda rows: torch.cat([rows[:, :, :3] * 0.5, rows], dim=2),
    "evicted": lambda rows: torch.cat([rows[:, :, :1], rows[:, :, -2:]], dim=2),
}


@pytest.mark.parametrize("own", (False, True), ids=("compact", "dynamic"))
@pytest.mark.parametrize("how", OTHERS)
@pytest.mark.parametrize("prompt", (6, 20))
def test_rows_of_another_number(model_kind: Species, prompt: int, how: str, own: bool, layout: str) -> None:
    """A prefix put before them, or some thrown out: stock attends what there is, as long as it needs no mask."""
    model = model_kind.build(16)
    ids = named_ids(model, 1, 40)
    found: list[Any] = []
    stock, ours = stock_and_compact(model, "dynamic", layout)
    for cache, patched in ((stock, None), (dynamic(model) if own else ours, layout)):
        logits: list[Any] = [feed(model, ids[:, :prompt], cache, patched)]
        held = cache.layers[0]
        with_rows(cache, OTHERS[how])
        try:
            for i in range(prompt, prompt + 12):
                logits.append(feed(model, ids[:, i : i + 1], cache, patched))
        except RuntimeError:
            logits.append(None)
        assert cache.layers[0] is held
        found.append(logits)
    assert [part is None for part in found[0]] == [part is None for part in found[1]]
    assert len(found[0]) > 2 or prompt == 20
    for got, want in zip(found[1], found[0], strict=True):
        if want is not None:
            assert_same_logits(got, want)


def test_rows_of_another_number_in_a_fixed_cache(layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    cache = swapatch.CompactCache(model, max_cache_len=100, layout=layout)
    feed(model, named_ids(model, 1, 30), cache, layout)
    cache.sliding[0].keys = cache.sliding[0].keys[:, :, 1:]
    with pytest.raises(swapatch.CacheStateError, match="7 rows of keys and 8 of values"):
        feed(model, named_ids(model, 1, 1), cache, layout)


@pytest.mark.parametrize("prompt", (3, 20))
def test_read_and_edited_within_a_forward(model_kind: Species, kind: str, prompt: int, layout: str) -> None:
    """By a hook that holds the cache: it finds what stock holds at that time, the new token included."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, prompt + 12)
    found = []
    for cache, patched in zip(stock_and_compact(model, kind, layout), (None, layout), strict=True):
        seen: list[Any] = []

        def look(module: Any, args: Any, output: Any, cache: Any = cache, seen: list[Any] = seen) -> None:
            layer = cache.layers[0]
            seen.append([layer.keys.clone(), *(other.get_seq_length() for other in cache.layers[:3])])
            layer.values[:, :, 0] *= 0.5

        feed(model, ids[:, :prompt], cache, patched)
        inner = getattr(model.model, "language_model", model.model)
        hooks = [inner.layers[0].register_forward_hook(look), inner.norm.register_forward_hook(look)]
        logits = [feed(model, ids[:, i : i + 1], cache, patched) for i in range(prompt, prompt + 6)]
        for hook in hooks:
            hook.remove()
        logits += [feed(model, ids[:, i : i + 1], cache, patched) for i in range(prompt + 6, prompt + 12)]
        found.append((torch.cat(logits, dim=1), seen))
    assert_same_logits(found[1][0], found[0][0])
    for got, want in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(got[0], want[0], atol=1e-4, rtol=0)
        assert got[1:] == want[1:]


@pytest.mark.parametrize("how", OTHERS)
def test_rows_of_another_number_within_a_forward(model_kind: Species, how: str, layout: str) -> None:
    """Set by a hook, in a layer that comes later in the same step."""
    model = model_kind.build(32)
    ids = named_ids(model, 1, 20)
    found = []
    for cache, patched in zip(stock_and_compact(model, "dynamic", layout), (None, layout), strict=True):
        logits = [feed(model, ids[:, :6], cache, patched)]
        inner = getattr(model.model, "language_model", model.model)

        def change(module: Any, args: Any, cache: Any = cache) -> None:
            layer = cache.layers[1]
            layer.keys, layer.values = OTHERS[how](layer.keys), OTHERS[how](layer.values)

        hook = inner.layers[0].register_forward_pre_hook(change)
        logits.append(feed(model, ids[:, 6:7], cache, patched))
        hook.remove()
        logits += [feed(model, ids[:, i : i + 1], cache, patched) for i in range(7, 20)]
        found.append(torch.cat(logits, dim=1))
    assert_same_logits(found[1], found[0])


@pytest.mark.parametrize("between", (3, 51, 200))
def test_an_earlier_state_written_back(model_kind: Species, between: int, layout: str) -> None:
    """A prefix that somebody saved by reading, restored into the same cache."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, 230)
    found = []
    for cache, patched in zip(stock_and_compact(model, "dynamic", layout), (None, layout), strict=True):
        feed(model, ids[:, :20], cache, patched)
        saved = [(layer.keys, layer.values, getattr(layer, "cumulative_length", None)) for layer in cache.layers]
        feed(model, ids[:, 20 : 20 + between], cache, patched)
        for layer, (keys, values, count) in zip(cache.layers, saved, strict=True):
            if keys is not None:
                layer.keys, layer.values = keys, values
                if count is not None:
                    layer.cumulative_length = count
        found.append([feed(model, ids[:, i : i + 2], cache, patched) for i in range(20, 60, 2)])
    for got, want in zip(found[1], found[0], strict=True):
        assert_same_logits(got, want)


@pytest.mark.parametrize("steps", (1, 3))
def test_a_layer_of_somebody_else_put_in(model_kind: Species, steps: int, layout: str) -> None:
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, 60)
    cache = swapatch.CompactCache(model, layout=layout)
    want = feed(model, ids, dynamic(model), None)[:, 20:]
    feed(model, ids[:, :20], cache, layout)
    new = DynamicSlidingWindowLayer(WINDOW)
    new.update(cache.layers[0].keys, cache.layers[0].values)
    new.cumulative_length = 20
    cache.layers[0] = new
    got = [feed(model, ids[:, i : i + steps], cache, layout) for i in range(20, 59, steps)]
    assert_same_logits(torch.cat(got, dim=1), want[:, : 39 // steps * steps])
    assert next(iter(swapatch.report(cache).layers)).kind == "sliding"


def test_read_in_inference_mode_and_on_outside(layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    cache = swapatch.CompactCache(model, layout=layout)
    feed(model, named_ids(model, 1, 20), cache, layout)
    with torch.inference_mode():
        cache.layers[0].keys.norm()
    weight = torch.ones(1, requires_grad=True)
    (cache.layers[0].keys * weight).sum().backward()
    assert weight.grad is not None


def test_iterated(model_kind: Species, layout: str) -> None:
    """As who gathers caches over processes does."""
    model = model_kind.build(WINDOW)
    stock, ours = stock_and_compact(model, "dynamic", layout)
    for cache, patched in ((stock, None), (ours, layout)):
        feed(model, named_ids(model, 1, 30), cache, patched)
    for got, want in zip(ours, stock, strict=True):
        assert len(got) == len(want)
        for pair in zip(got, want, strict=True):
            assert pair[0] is pair[1] is None or torch.allclose(*pair, atol=1e-4)


# -- who wraps what puts rows into it --


def instance_update(cache: Any, calls: list[int]) -> Any:
    stock = cache.update

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer)
        return stock(keys, values * 0.5, layer, *args, **kwargs)

    cache.update = update
    return cache


def layer_update(cache: Any, calls: list[int]) -> Any:
    layer = cache.layers[0]
    stock = layer.update

    def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        return stock(keys, values * 0.5, *args, **kwargs)

    layer.update = update
    return cache


def class_update(cache: Any, calls: list[int]) -> Any:
    stock = type(cache).update

    class Halving(type(cache)):  # type: ignore[misc]  # as a user's subclass
        def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            calls.append(layer)
            return stock(self, keys, values * 0.5, layer, *args, **kwargs)

    cache.__class__ = Halving
    return cache


@pytest.mark.parametrize("wrap", (instance_update, layer_update, class_update))
def test_a_wrapped_update_is_called(model_kind: Species, kind: str, wrap: Any, layout: str) -> None:
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, 40)
    found = []
    for cache, patched in zip(stock_and_compact(model, kind, layout), (None, layout), strict=True):
        calls: list[int] = []
        wrap(cache, calls)
        logits = [feed(model, ids[:, :20], cache, patched)]
        logits += [feed(model, ids[:, i : i + 1], cache, patched) for i in range(20, 40)]
        found.append((torch.cat(logits, dim=1), calls))
    assert_same_logits(found[1][0], found[0][0])
    assert found[1][1] == found[0][1] != []


def test_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 20)
    stock, calls = Cache.update, []

    def update(self: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer)
        return stock(self, keys, values * 0.5, layer, *args, **kwargs)

    monkeypatch.setattr(Cache, "update", update)
    want = greedy(model, ids, 5)
    count = len(calls)
    with swapatch.patch(model):
        assert_same_logits(greedy(model, ids, 5).logits, want.logits)
    assert len(calls) == 2 * count


# -- what it says it is --


def test_what_it_is(kind: str, layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    stock, ours = stock_and_compact(model, kind, layout)
    for cache in (ours, copy.deepcopy(ours), torch.load(_saved(ours), weights_only=False)):
        assert isinstance(cache, swapatch.CompactCache)
        assert isinstance(cache, DynamicCache) == isinstance(stock, DynamicCache)
        assert isinstance(cache, StaticCache) == isinstance(stock, StaticCache)
    for cache, patched in ((stock, None), (ours, layout)):
        feed(model, named_ids(model, 3, 20), cache, patched)
    for name in ("is_compileable", "is_sliding", "is_initialized", "max_cache_len", "max_batch_size", "batch_size"):
        try:
            want = getattr(stock, name)
        except (AttributeError, ValueError):
            continue
        assert getattr(ours, name) == want, name


def _saved(cache: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return file


# -- taking tokens back --


@pytest.mark.parametrize("asked", (-20, -10, -9, -3, 0, *((1, 6, 10, 20) if CROPS_TO_LENGTH else ())))
def test_crop_as_stock(model_kind: Species, asked: int, layout: str) -> None:
    """Ten tokens within the window: more than was seen empties, and where stock takes a length, so do we."""
    model = model_kind.build(16)
    ids = named_ids(model, 1, 30)
    found = []
    for cache, patched in zip(stock_and_compact(model, "dynamic", layout), (None, layout), strict=True):
        feed(model, ids[:, :10], cache, patched)
        cache.crop(asked)
        length = cache.get_seq_length()
        found.append((length, *(feed(model, ids[:, i : i + 2], cache, patched) for i in range(0, 30, 2))))
    assert found[0][0] == found[1][0]
    for got, want in zip(found[1][1:], found[0][1:], strict=True):
        assert_same_logits(got, want)


@pytest.mark.parametrize("asked", (-60, -50, -30, -7, 0))
@pytest.mark.parametrize("recorded_from", (0, 5, 30))
def test_crop_of_what_was_recorded(asked: int, recorded_from: int, layout: str) -> None:
    """Fifty tokens, in calls of several, past the window of eight: as if those taken back had never been."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 70)
    cache = swapatch.CompactCache(model, layout=layout)
    if recorded_from:
        feed(model, ids[:, :recorded_from], cache, layout)
    cache.activate_past_recording()
    for start in range(recorded_from, 50, 5):
        feed(model, ids[:, start : start + 5], cache, layout)
    left = max(50 + asked, 0)
    try:
        cache.crop(asked)
    except swapatch.CacheStateError:
        assert 0 < left < recorded_from
        return
    assert cache.get_seq_length() == left
    with torch.no_grad():
        want = model(ids[:, : left + 3], use_cache=False).logits[:, left:]
    assert_same_logits(feed(model, ids[:, left : left + 3], cache, layout), want)


def test_recorded_tokens_of_many_calls(layout: str) -> None:
    """What earlier calls recorded is kept as well, token by token."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 235)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=100).logits
        cache = forced(model, ids[:, :100], prompt=100).cache
        cache.activate_past_recording()
        forced(model, ids[:, 100:230], prompt=1, cache=cache)
        cache.crop(-130)
        got = forced(model, ids[:, 100:], prompt=1, cache=cache).logits
    assert_same_logits(got, want[:, 100:])


# -- attention weights --


def test_weights_of_eager_with_a_static_cache(model_kind: Species, layout: str) -> None:
    """Of stock's width, over rows that stand where stock's stand."""
    model = model_kind.build(WINDOW, attn_implementation="eager")
    ids = named_ids(model, 1, 40)
    found = []
    for cache, patched in zip(stock_and_compact(model, "static", layout), (None, layout), strict=True):
        handle = None if patched is None else swapatch.patch(model, layout=layout)
        weights = []
        with torch.no_grad():
            for start, stop in ((0, 5), (5, 6), (6, 12), *((i, i + 1) for i in range(12, 30)), (30, 40)):
                out = model(ids[:, start:stop], output_attentions=True, **{cache_key(model): cache})
                weights.append(out.attentions)
        if handle:
            handle.undo()
        found.append(weights)
    for got, want in zip(found[1], found[0], strict=True):
        for pair in zip(got, want, strict=True):
            torch.testing.assert_close(*pair, atol=1e-4, rtol=0)


def test_generate_returns_it(model_kind: Species, layout: str) -> None:
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, 20)
    with swapatch.patch(model, layout=layout):
        out = greedy(model, ids, 3)
    assert isinstance(out.cache, DynamicCache)
    assert isinstance(cache_of({cache_key(model): out.cache}), swapatch.CompactCache)
