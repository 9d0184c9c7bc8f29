"""Tensors that stay where they are: what a CUDA graph of a decode step needs, seen on a CPU.

The tensors are kept while they are compared: an address that was given back could be another tensor's by then.
"""

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from compare import assert_same_logits, cache_key, forced, greedy, unwritten_rows
from torch import Tensor, nn
from transformers import StaticCache
from zoo import BY_NAME, Model, named_ids, text_config

import swapatch
from swapatch.layers import LAYOUTS, SlidingLayer

WINDOW, PROMPT, STEPS = 16, 150, 300  # the buffers have 128 rows, or 64 in a ring: a prompt beyond them, and rolls
MARK = "_dynamo_static_input_type"


@pytest.fixture(params=("gemma3_text", pytest.param("gemma4_ple_shared", marks=pytest.mark.slow)))
def model(request: pytest.FixtureRequest) -> Model:
    return BY_NAME[request.param].build(WINDOW)


def steps(model: Model, ids: Tensor, cache: Any) -> Iterator[Tensor]:
    """The logits of one token after the other."""
    for part in ids.split(1, dim=1):
        yield forced(model, part, prompt=1, cache=cache).logits


def buffers(cache: swapatch.CompactCache) -> list[Tensor]:
    return [rows for layer in cache.sliding for rows in (layer.key_rows, layer.value_rows)]


def written(cache: swapatch.CompactCache) -> list[Tensor]:
    """Where the last decode step wrote what it is."""
    step = cache.sliding[0].step
    return [step.index, step.mask]


def addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def mark_of(tensor: Tensor) -> Any:
    return getattr(tensor, MARK, None)


def stock_mark(model: Model) -> Any:
    """How stock marks the buffers of its static layers."""
    layer = StaticCache(text_config(model), 40).layers[0]
    layer.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    assert mark_of(layer.keys) is not None
    return mark_of(layer.keys)


def test_a_fixed_cache_stays_where_it_is(model: Model, layout: str) -> None:
    """Buffers, write index and mask: in a prompt that is longer than they are, in chunks, over rolls, after a reset."""
    ids = named_ids(model, 2, PROMPT + STEPS)
    want = forced(model, ids, prompt=PROMPT + STEPS).logits
    mark, kept = stock_mark(model), []
    with swapatch.patch(model, layout=layout):
        cache = swapatch.CompactCache(model, max_cache_len=PROMPT + STEPS, layout=layout)
        for _ in range(2):
            logits = [forced(model, ids[:, :PROMPT], prompt=20, chunks=[PROMPT - 20], cache=cache).logits]
            kept.append((buffers(cache), []))
            for step in steps(model, ids[:, PROMPT:], cache):
                logits.append(step)
                kept.append((buffers(cache), written(cache)))
            assert_same_logits(torch.cat(logits, 1), want)
            cache.reset()
            assert not any(rows.any() for rows in buffers(cache))
    for held, of_step in kept:
        assert addresses(held) == addresses(kept[0][0])
        assert addresses(of_step) in ([], addresses(kept[1][1]))
        assert {mark_of(tensor) for tensor in (*held, *of_step)} == {mark}


def test_a_layer_that_is_reset_takes_another_batch(layout: str) -> None:
    layer = LAYOUTS[layout](WINDOW, 200)
    for batch in (1, 3, 1):
        rows = torch.arange(1.0, 41).view(1, 1, 40, 1).repeat(batch, 1, 1, 1)
        layer.update(rows, -rows)
        assert torch.equal(layer.keys, rows[:, :, -WINDOW:])
        assert torch.equal(layer.values, -layer.keys)
        layer.reset()


def test_a_growing_cache_rolls_where_it_is(model: Model) -> None:
    """By way of one scratch buffer, that is of one layer's size and belongs to all of them."""
    ids = named_ids(model, 1, 300)
    want = forced(model, ids, prompt=300).logits[:, 100:]
    with swapatch.patch(model):
        cache = forced(model, ids[:, :100], prompt=100).cache
        before = buffers(cache)
        origin = cache.sliding[0].origin
        got = torch.cat(list(steps(model, ids[:, 100:], cache)), 1)
    assert_same_logits(got, want)
    assert cache.sliding[0].origin >= origin + 128
    assert all(now is rows for now, rows in zip(buffers(cache), before, strict=True))
    (workspace,) = {layer.workspace for layer in cache.sliding}
    scratch = [rows for rows in workspace._tensors.values() if rows.ndim == 4]
    assert sum(rows.nbytes for rows in scratch) == sum(rows.nbytes for rows in before[:2])


def test_a_prompt_needs_no_scratch(model: Model) -> None:
    with swapatch.patch(model):
        cache = forced(model, named_ids(model, 1, 300), prompt=300).cache
    assert not cache.sliding[0].workspace._tensors


class Rows(NamedTuple):
    """Layers that share a workspace, with rows in them, the same in all."""

    layers: list[SlidingLayer]
    keys: Tensor

    @classmethod
    def fill(cls, layers: int, tokens: int, **options: Any) -> "Rows":
        made = LAYOUTS["anchored"](WINDOW)
        every = [made, *(LAYOUTS["anchored"](WINDOW, None, made.workspace) for _ in range(layers - 1))]
        keys = torch.arange(1.0, tokens + 1, **options).view(1, 1, tokens, 1)
        for layer in every:
            layer.update(keys, -keys)
        return cls(every, keys)


def test_rows_with_a_history_roll_into_fresh_buffers() -> None:
    """What somebody may go backward through is not written over."""
    (layer,), keys = Rows.fill(1, 128, requires_grad=True)
    before = layer.key_rows
    layer.make_room(1)
    assert layer.key_rows is not before
    layer.past()[0].sum().backward()
    assert keys.grad_fn is not None


def test_a_roll_leaves_zeros_behind() -> None:
    (first, second), keys = Rows.fill(2, 128)
    for layer in (first, second):
        layer.make_room(1)
        assert layer.origin == 64
        assert torch.equal(layer.key_rows[:, :, :64], keys[:, :, 64:])
        assert torch.equal(layer.value_rows[:, :, :64], -keys[:, :, 64:])
        assert not layer.key_rows[:, :, unwritten_rows(layer)].any()
        assert not layer.value_rows[:, :, unwritten_rows(layer)].any()


@pytest.mark.parametrize("how", (copy.copy, copy.deepcopy))
def test_a_copied_layer_has_a_workspace_of_its_own(how: Any) -> None:
    (layer, _), keys = Rows.fill(2, 128)
    layer.make_room(1)
    twin = how(layer)
    assert twin.workspace is not layer.workspace
    assert not {*addresses([*twin.workspace._tensors.values()])} & {*addresses([*layer.workspace._tensors.values()])}
    twin.update(keys, keys)
    assert torch.equal(layer.key_rows[:, :, :64], keys[:, :, 64:])


def test_layers_of_a_deep_copied_cache_share_as_before(layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    with swapatch.patch(model, layout=layout):
        cache = swapatch.CompactCache(model, max_cache_len=300, layout=layout)
        forced(model, named_ids(model, 1, 150), prompt=100, cache=cache)
        twin = copy.deepcopy(cache)
        assert len({layer.workspace for layer in twin.sliding}) == 1
        assert {mark_of(rows) for rows in buffers(twin)} == {stock_mark(model)}
        forced(model, named_ids(model, 1, 1), prompt=1, cache=twin)
        forced(model, named_ids(model, 1, 1), prompt=1, cache=cache)
    mine = addresses([*buffers(cache), *written(cache), *cache.sliding[0].workspace._tensors.values()])
    theirs = addresses([*buffers(twin), *written(twin), *twin.sliding[0].workspace._tensors.values()])
    assert not {*mine} & {*theirs}


class Inputs(NamedTuple):
    """What a graph is called with."""

    addresses: list[int]
    static: list[bool]


class Graphs:
    """A backend that runs graphs as they are, and keeps what they were called with, a list for each graph."""

    def __init__(self) -> None:
        self.calls: list[list[Inputs]] = []
        self.kept: list[Any] = []  # or an address could be that of two tensors

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls: list[Inputs] = []
        self.calls.append(calls)

        def run(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            self.kept.append(tensors)
            static = [isinstance(arg, nn.Parameter) or mark_of(arg) is not None for arg in tensors]
            calls.append(Inputs(addresses(tensors), static))
            return graph(*args)

        return run

    def __deepcopy__(self, memo: Any) -> "Graphs":
        return self  # `generate` copies what it is configured with


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def moving(calls: list[Inputs], model: Model) -> int:
    """How many inputs of a graph may be elsewhere in the next call; all others are checked to stay."""
    own = {tensor.data_ptr() for tensor in model.buffers()}
    first = calls[0]
    for call in calls:
        assert call.static == first.static
        for address, other, static in zip(call.addresses, first.addresses, first.static, strict=True):
            assert address == other or not static
    return sum(not (static or address in own) for address, static in zip(first.addresses, first.static, strict=True))


def compiled_generate(model: Model, graphs: Graphs, tokens: int, **inputs: Any) -> Any:
    config = transformers.CompileConfig(fullgraph=True, backend=graphs, mode=None, dynamic=False)  # type: ignore[arg-type]
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    return greedy(model, named_ids(model, 2, 40), tokens, **options, **inputs)


@pytest.mark.parametrize("padded", (False, True), ids=("", "padded"))
def test_what_moves_moves_in_stock(model: Model, padded: bool, layout: str, graphs: Graphs) -> None:
    """In `generate` with a static cache: the token, its position, and the mask of global layers, which stock makes."""
    inputs = {}
    if padded:
        mask = torch.ones(2, 40, dtype=torch.long)
        mask[0, :9] = 0
        inputs["attention_mask"] = mask
    compiled_generate(model, graphs, 2, **inputs)
    stock = moving(graphs.calls.pop(), model)
    with swapatch.patch(model, layout=layout):
        cache = compiled_generate(model, graphs, 100, **inputs).cache
    assert isinstance(cache, swapatch.CompactCache)
    (calls,) = graphs.calls
    assert len(calls) == 99
    assert moving(calls, model) == stock - 1  # the mask of sliding layers stays, stock's does not


def test_a_graph_that_is_called_by_hand(layout: str, graphs: Graphs) -> None:
    """Two caches take turns on one graph: each has tensors of its own, which stay where they are."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 2, 20 + 150)
    want = forced(model, ids, prompt=20).logits
    found: list[list[Any]] = [[], []]
    with swapatch.patch(model, layout=layout), torch.no_grad():
        call = torch.compile(model, dynamic=False, backend=graphs)
        caches = [swapatch.CompactCache(model, max_cache_len=170, layout=layout) for _ in range(2)]
        pairs = zip(ids[:, None, :20], caches, strict=True)
        logits = [[forced(model, row, prompt=20, cache=cache).logits] for row, cache in pairs]
        for position in range(20, 170):
            for number, cache in enumerate(caches):
                row = ids[number : number + 1, position : position + 1]
                logits[number].append(call(row, **{cache_key(model): cache}).logits)
                step = cache.sliding[0].step
                found[number].append([*buffers(cache), *written(cache), step.place])
    for number, kept in enumerate(found):
        assert_same_logits(torch.cat(logits[number], 1), want[number : number + 1])
        assert all(addresses(tensors) == addresses(kept[0]) for tensors in kept)
        assert {mark_of(tensor) for tensor in kept[0]} == {stock_mark(model)}
    assert not {*addresses(found[0][0])} & {*addresses(found[1][0])}
