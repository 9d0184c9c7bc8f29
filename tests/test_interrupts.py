"""Threads, interrupts, errors and too little memory: the model stays usable, undo is exact, and a cache goes on right
or says that it cannot.
"""

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_logits, assert_unchanged, cache_key, forced, greedy, snapshot
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from zoo import BY_NAME, Model, Species, named_ids, text_model

import swapatch
from swapatch.layers import AnchoredLayer, SlidingLayer

WINDOW, TOKENS = 16, 220
PACKAGE = str(Path(swapatch.__file__).parent)
ERRORS = (KeyboardInterrupt, torch.OutOfMemoryError, ZeroDivisionError)
STEPS = {"prefill": (0, 40), "append": (100, 100), "decode": (128, 1)}
"""Tokens seen before, and tokens of the step. The buffers have 128 rows, or 64 in a ring: the last two roll or wrap."""


@pytest.fixture(params=("gemma3_text", "gemma4_ple_shared"))
def species(request: pytest.FixtureRequest) -> Species:
    return BY_NAME[request.param]


@contextmanager
def failing(module: nn.Module, error: type[BaseException], after: int = 0) -> Iterator[None]:
    """The module fails when it is called, after so many calls that go well."""
    calls = count()

    def fail(module: nn.Module, args: Any) -> None:
        if next(calls) == after:
            raise error("on purpose")

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def middle(model: Model) -> nn.Module:
    layers = text_model(model).layers
    return layers[len(layers) // 2].mlp


def goes_on(model: Model, cache: Any, ids: Tensor, want: Tensor, tokens: int = 1) -> bool:
    """Whether a cache takes what follows the tokens that it has seen, with stock's logits, or else refuses for good.

    `tokens` are what the first call gets.
    """
    seen = int(cache.get_seq_length())
    stop = seen + tokens + 5
    for _ in range(2):
        try:
            got = forced(model, ids[:, seen:stop], prompt=tokens, cache=cache).logits
        except swapatch.CacheStateError as error:
            assert "start a new cache" in str(error)  # noqa: PT017
        else:
            assert_same_logits(got, want[:, seen:stop])
            return True
    return False


# -- threads --


def test_four_threads_on_one_model(species: Species, layout: str) -> None:
    """Each gets what it gets alone, with all four in the middle of the model at once. One has swapatch switched off."""
    model = species.build(WINDOW)
    padded = species.inputs(model, (110, 9))
    calls: list[dict[str, Any]] = [
        {"ids": named_ids(model, 1, 50), "num_beams": 3},
        {"ids": named_ids(model, 3, 60), "cache_implementation": "static"},
        {"ids": padded["input_ids"], "attention_mask": padded["attention_mask"]},
        {"ids": named_ids(model, 1, 110)},
    ]
    want = [greedy(model, **call, n=30) for call in calls]
    snap = snapshot(model)
    barrier = threading.Barrier(len(calls), timeout=60)

    def meet(module: nn.Module, args: Any) -> None:
        barrier.wait()

    def run(number: int) -> Any:
        try:
            with swapatch.disabled() if number == 3 else nullcontext():
                return greedy(model, **calls[number], n=30)
        except BaseException:
            barrier.abort()  # the others would wait for it
            raise

    with swapatch.patch(model, layout=layout), ThreadPoolExecutor(len(calls)) as pool:
        hook = middle(model).register_forward_pre_hook(meet)
        runs = list(pool.map(run, range(len(calls))))
        hook.remove()
    for number, (got, alone) in enumerate(zip(runs, want, strict=True)):
        assert torch.equal(got.tokens, alone.tokens)
        assert_same_logits(got.logits, alone.logits)
        assert isinstance(got.cache, swapatch.CompactCache) is (number < 3)
    assert_unchanged(model, snap)


# -- a step that fails on the way --


@pytest.mark.slow
@pytest.mark.parametrize("fixed", (False, True), ids=("dynamic", "static"))
@pytest.mark.parametrize("name", ("gemma3_text", "gemma3_mqa", "gemma4_ple_shared"))
def test_a_step_that_fails_anywhere(name: str, fixed: bool, layout: str) -> None:
    """Before and after the write of each layer, and after the last one. A cache goes on if no layer was written."""
    model = BY_NAME[name].build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want = forced(model, ids, prompt=200).logits
    snap = snapshot(model)
    handle = swapatch.patch(model, layout=layout)
    layers = text_model(model).layers
    places = [part for layer in layers for part in (layer.self_attn, layer.self_attn.o_proj)]
    # A decode step writes rows of sliding layers that do not count before its end.
    first_global = next(layer.index for layer in handle.plan.layers if layer.kind == "global")
    untouched = {"prefill": 1, "append": 1, "decode": 2 * first_global + 1}
    errors = cycle(ERRORS)
    for step, (before, tokens) in STEPS.items():
        start = swapatch.CompactCache(model, max_cache_len=TOKENS if fixed else None, layout=layout)
        if before:
            forced(model, ids[:, :before], prompt=before, cache=start)
        for number, (place, error) in enumerate(zip([*places, text_model(model).norm], errors, strict=False)):
            cache = copy.deepcopy(start)
            with failing(place, error), pytest.raises(error):
                forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
            assert goes_on(model, cache, ids, want, tokens) == (number < untouched[step]), (step, number)
        cache.reset()
        assert goes_on(model, cache, ids, want, 40)
        cache = copy.deepcopy(start)
        with failing(model.lm_head, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
        assert cache.get_seq_length() == before + tokens
        assert goes_on(model, cache, ids, want)
    assert_same_logits(forced(model, ids, prompt=200).logits, want)
    handle.undo()
    assert_unchanged(model, snap)
    assert torch.equal(forced(model, ids, prompt=200).logits, want)


@pytest.mark.parametrize("attention", ("ready-made mask", "weights"))
def test_stock_code_that_fails_on_a_compact_cache(species: Species, attention: str) -> None:
    """Where swapatch leaves a call to stock, a half written cache is refused as well."""
    model = species.build(WINDOW, attn_implementation="eager")
    ids = named_ids(model, 1, 50)
    if attention == "weights":
        options: dict[str, Any] = {"output_attentions": True}
    else:
        options = {"attention_mask": torch.ones(40, 40, dtype=torch.bool).tril()[None, None]}
    with swapatch.patch(model), torch.no_grad():
        cache = swapatch.CompactCache(model)
        call = {cache_key(model): cache, **options}
        with failing(text_model(model).norm, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(ids[:, :40], **call)
        with pytest.raises(swapatch.CacheStateError, match="half written"):
            model(ids[:, :40], **call)
        with pytest.raises(swapatch.CacheStateError, match="half written"):
            forced(model, ids[:, 40:], prompt=1, cache=cache)
        cache.reset()
        model(ids[:, :40], **call)
        forced(model, ids[:, 40:], prompt=1, cache=cache)


@contextmanager
def interrupted_at(number: int | None) -> Iterator[list[tuple[str, int]]]:
    """Ctrl-C before the line of swapatch that is run as number so-and-so; gives the lines that were reached."""
    lines: list[tuple[str, int]] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) - 1 == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def filled(model: Model, ids: Tensor, layout: str, fixed: bool = False) -> swapatch.CompactCache:
    """The cache of a patched model that has seen these tokens, if any."""
    cache = swapatch.CompactCache(model, max_cache_len=TOKENS if fixed else None, layout=layout)
    if ids.shape[1]:
        forced(model, ids, prompt=ids.shape[1], cache=cache)
    return cache


def first_and_last(lines: list[tuple[str, int]]) -> list[int]:
    """The numbers of the first and the last time that each line is run."""
    first = {line: number for number, line in reversed(list(enumerate(lines)))}
    last = {line: number for number, line in enumerate(lines)}
    return sorted({*first.values(), *last.values()})


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("name", "layout", "fixed"),
    (("gemma3_text", "anchored", False), ("gemma3_text", "anchored", True), ("gemma4_ple_shared", "ring", False)),
)
def test_interrupt_at_every_line(name: str, layout: str, fixed: bool, step: str) -> None:
    model = BY_NAME[name].build(WINDOW)
    before, tokens = STEPS[step]
    ids = named_ids(model, 1, before + tokens + 2)
    want = forced(model, ids, prompt=before + tokens).logits
    with swapatch.patch(model, layout=layout):
        start = filled(model, ids[:, :before], layout, fixed)
        for _ in range(2):  # the second time masks that are kept are not made again, as in every run below
            cache = copy.deepcopy(start)
            with interrupted_at(None) as lines:
                forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
        assert len(lines) > 100
        outcomes = []
        for number in first_and_last(lines):
            cache = copy.deepcopy(start)
            with pytest.raises(KeyboardInterrupt), interrupted_at(number):
                forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
            left = tokens if cache.get_seq_length() == before else 1
            outcomes.append(goes_on(model, cache, ids, want, left))
    assert 0.2 < sum(outcomes) / len(outcomes) < 1


Layers = list[SlidingLayer]
LOOKS: dict[str, Callable[[Layers], Layers]] = {
    "read": lambda layers: layers,
    "copied": lambda layers: [copy.copy(layer) for layer in layers],
    "copied deeply": copy.deepcopy,
    "pickled": lambda layers: pickle.loads(pickle.dumps(layers)),
    "the other first": lambda layers: layers[::-1],
    "reordered": lambda layers: [layer for layer in layers if layer.reorder_cache(torch.tensor([1, 0])) is None],
}
"""Who comes next after an interrupt."""


def full_layers(fixed: int | None) -> Layers:
    """Two that share a workspace, of two sequences, with all rows written: in the second the negative of the first."""
    first = AnchoredLayer(WINDOW, fixed)
    layers = [first, AnchoredLayer(WINDOW, fixed, first.workspace)]
    rows = torch.arange(1.0, 1 + 2 * 2 * 128 * 3).view(2, 2, 128, 3)
    for layer, sign in zip(layers, (1, -1), strict=True):
        layer.update(sign * rows, sign * rows - 0.5)
    return layers


def roll(layers: Layers) -> None:
    for layer in layers:
        layer.make_room(1)


@pytest.mark.parametrize("fixed", (None, 300), ids=("dynamic", "static"))
@pytest.mark.parametrize("look", LOOKS)
def test_interrupt_at_every_line_of_a_roll(look: str, fixed: int | None) -> None:
    """Rows move within their buffers: whoever comes next finds the move done, or not begun, and goes on."""
    want = [layer.past() for layer in LOOKS[look](full_layers(fixed))]
    layers = full_layers(fixed)
    with interrupted_at(None) as lines:
        roll(layers)
    origins = set()
    for number in range(len(lines)):
        layers = full_layers(fixed)
        with pytest.raises(KeyboardInterrupt), interrupted_at(number):
            roll(layers)
        found = LOOKS[look](layers)
        for _ in range(2):
            for layer, rows in zip(found, want, strict=True):
                assert all(map(torch.equal, layer.past(), rows)), (number, lines[number])
                origins.add(layer.origin)
                layer.make_room(1)
                assert layer.origin == 64
                assert not layer.key_rows[:, :, 64:].any()
                assert not layer.value_rows[:, :, 64:].any()
    assert origins == {0, 64}


class Memory(TorchDispatchMode):
    """Out of memory at the allocation that comes after so many others; counts them."""

    ALLOCATIONS = ("cat", "zeros", "empty", "new_empty", "empty_like", "zeros_like", "clone", "mm", "bmm")

    def __init__(self, left: int | None) -> None:
        super().__init__()
        self.left, self.seen = left, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.ALLOCATIONS:
            if self.seen == self.left:
                raise torch.OutOfMemoryError("on purpose")
            self.seen += 1
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_out_of_memory_at_every_allocation(species: Species, step: str, layout: str) -> None:
    model = species.build(WINDOW)
    before, tokens = STEPS[step]
    ids = named_ids(model, 1, before + tokens + 2)
    want = forced(model, ids, prompt=before + tokens).logits
    with swapatch.patch(model, layout=layout):
        start = filled(model, ids[:, :before], layout)
        for memory in (Memory(None), Memory(None)):  # the first run makes the masks that all calls share
            cache = copy.deepcopy(start)
            with memory:
                forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
        assert memory.seen > 10
        outcomes = []
        for number in range(memory.seen):
            cache = copy.deepcopy(start)
            with pytest.raises(torch.OutOfMemoryError), Memory(number):
                forced(model, ids[:, before : before + tokens], prompt=tokens, cache=cache)
            left = tokens if cache.get_seq_length() == before else 1
            outcomes.append(goes_on(model, cache, ids, want, left))
    assert set(outcomes) == {True, False}


# -- generate --

MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("anchored", {}),
    "beams": ("ring", {"num_beams": 2}),
    "static": ("anchored", {"cache_implementation": "static"}),
    "prompt lookup": ("ring", {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", (0, 5), ids=("prefill", "decode"))
def test_generate_is_interrupted(species: Species, after: int, mode: str) -> None:
    """The next answers are stock's, and nothing is left once the patch is undone."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, 110)
    layout, options = MODES[mode]
    want = greedy(model, ids, 30, **options)
    snap = snapshot(model)
    handle = swapatch.patch(model, layout=layout)
    for error in ERRORS:
        with failing(middle(model), error, after), pytest.raises(error):
            greedy(model, ids, 30, **options)
        got = greedy(model, ids, 30, **options)
        assert isinstance(got.cache, swapatch.CompactCache)
        assert torch.equal(got.tokens, want.tokens)
        assert_same_logits(got.logits, want.logits)
    handle.undo()
    assert_unchanged(model, snap)
    assert torch.equal(greedy(model, ids, 30, **options).logits, want.logits)


class EnoughError(Exception):
    """What a callback of the user's raises."""


class Streamer(BaseStreamer):
    """Has enough after so many portions."""

    def __init__(self, portions: int) -> None:
        self.left = portions

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise EnoughError

    def end(self) -> None:
        raise AssertionError("there is no end")


class Criteria(StoppingCriteria):
    """Has enough after so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise EnoughError
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


CALLBACKS: dict[str, Callable[[], dict[str, Any]]] = {
    "streamer": lambda: {"streamer": Streamer(21)},
    "criteria": lambda: {"stopping_criteria": [Criteria(20)]},
}


@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_callback_raises(species: Species, callback: str, layout: str) -> None:
    """The cache that the caller passed goes on where it was."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, 110)
    tokens = greedy(model, ids, 40).tokens
    want = forced(model, tokens, prompt=110).logits
    snap = snapshot(model)
    handle = swapatch.patch(model, layout=layout)
    cache = swapatch.CompactCache(model, layout=layout)
    with pytest.raises(EnoughError):
        greedy(model, ids, 40, **{cache_key(model): cache}, **CALLBACKS[callback]())
    assert cache.get_seq_length() == 130
    assert goes_on(model, cache, tokens, want)
    assert torch.equal(greedy(model, ids, 40).tokens, tokens)
    handle.undo()
    assert_unchanged(model, snap)
    assert torch.equal(forced(model, tokens, prompt=110).logits, want)


# -- patching and undoing themselves --


def test_interrupt_at_every_line_of_patch(species: Species) -> None:
    """All or nothing: the model is patched, and can be undone, or it is as it was."""
    model = species.build(WINDOW)
    snap = snapshot(model)
    with interrupted_at(None) as lines:
        swapatch.patch(model)
    swapatch.unpatch(model)
    for number in first_and_last(lines):
        with pytest.raises(KeyboardInterrupt), interrupted_at(number):
            swapatch.patch(model)
        if not swapatch.unpatch(model):
            assert_unchanged(model, snap)
    assert_unchanged(model, snap)


def test_interrupt_at_every_line_of_undo(species: Species) -> None:
    """An undo that was interrupted is finished by calling it again, with or without the handle."""
    model = species.build(WINDOW)
    snap = snapshot(model)
    swapatch.patch(model)
    with interrupted_at(None) as lines:
        swapatch.unpatch(model)
    for number in first_and_last(lines):
        handle = swapatch.patch(model)
        with pytest.raises(KeyboardInterrupt), interrupted_at(number):
            swapatch.unpatch(model)
        if number % 2:
            handle.undo()
        else:
            swapatch.unpatch(model)
        assert_unchanged(model, snap)
