"""Every way to call `generate`: a patched model gives what the stock one gives, from a compact cache where it applies.

Whole outputs are compared: tokens, logits of every step, scores, hidden states, whatever the mode returns. A watcher
tells for each forward whether the sliding layers attended compactly or ran stock code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from compare import TOL, assert_same_logits, assert_sensitive, cache_key, cache_of, forced, layer_tensors, sliding_rows
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.generation import utils as generation_utils
from transformers.generation.streamers import BaseStreamer
from zoo import BY_NAME, FAMILIES, FULL, PAD, SLIDING, Family, Model, named_ids, text_config, text_model

import swapatch
from swapatch.geometry import ceil64
from swapatch.step import Step

LAYOUTS = ("anchored",)
WINDOWS = (8, 65)
PROMPT = 100  # past both windows, but less than a buffer holds: rows are given up while tokens are generated
NEW = 70
SOME = [BY_NAME[n] for n in ("gemma3_text", "gemma4_ple_shared", "gemma4_vision", "gemma4_unified") if n in BY_NAME]
"""One family of each kind, for modes that hardly depend on the family."""
GEMMA4 = [family for family in FAMILIES if family.name.startswith("gemma4") and "unified" not in family.name]
NO_END = text_config(FAMILIES[0].make_config(8)).vocab_size  # an end token that no model ever gives

some_families = pytest.mark.parametrize("family", SOME, ids=str)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[swapatch.CompactCache]:
    """Every compact cache that is made during the test, whoever makes it."""
    caches: list[swapatch.CompactCache] = []
    construct = swapatch.CompactCache.__init__

    def record(self: swapatch.CompactCache, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(swapatch.CompactCache, "__init__", record)
    return caches


# -- running a call and looking at what it did --


class Run(NamedTuple):
    output: Any
    compact: int  # forwards in which the sliding layers attended compactly
    stock: int  # and those in which they ran stock code


def patched(model: Model, layout: str | None) -> AbstractContextManager[Any]:
    """The model patched for a block of code, or left alone without a layout."""
    return nullcontext() if layout is None else swapatch.patch(model, layout=layout)


@contextmanager
def watched(model: Model) -> Iterator[list[bool]]:
    """For each forward of the block: whether the first sliding layer got a step in the place of its mask."""
    seen: list[bool] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(isinstance(kwargs["attention_mask"], Step))

    attention = next(layer.self_attn for layer in text_model(model).layers if layer.self_attn.is_sliding)
    hook = attention.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def run(model: Model, layout: str | None, call: Callable[[Model], Any]) -> Run:
    with watched(model) as seen, patched(model, layout):
        output = call(model)
    return Run(output, seen.count(True), seen.count(False))


def generate(model: Model, tokens: int, **options: Any) -> Any:
    """Stock `generate` with all that it returns; nothing ends it early unless told."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": NO_END, "max_new_tokens": tokens}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)  # for those that sample
    return model.generate(**settings | options)


def prompt(family: Family, model: Model, *lengths: int, seed: int = 0) -> dict[str, Tensor]:
    """A left-padded batch; models that take images get two each in the long rows, one of them at the end."""
    images = [[(20, 5), (length - 8, 8)] if length > 50 else [] for length in lengths]
    return family.inputs(model, lengths or (PROMPT,), seed, images=images if family.vision and lengths else None)


def assert_same(got: Any, want: Any) -> None:
    """Everything that `generate` returns but the cache: tokens equal, numbers within the tolerance."""
    torch.testing.assert_close(_comparable(got), _comparable(want), atol=TOL, rtol=0)


def _comparable(output: Any) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name not in ("cache", "past_key_values")}


def assert_compact(got: Run, want: Run, model: Model, layout: str, recorded: int = 0) -> None:
    """The run kept a compact cache, bounded though more tokens came than it has rows, and used it in every forward."""
    cache, stock = cache_of(got.output), cache_of(want.output)
    window = text_config(model).sliding_window
    assert isinstance(cache, swapatch.CompactCache)
    assert not isinstance(stock, swapatch.CompactCache)
    assert cache.layout == layout
    assert cache.get_seq_length() == stock.get_seq_length()
    assert max(sliding_rows(cache)) <= ceil64(window + 63) + ceil64(recorded)
    assert cache.get_seq_length() > max(sliding_rows(cache)) or recorded
    assert (got.compact, got.stock) == (want.stock, 0)
    assert want.compact == 0
    assert all(tensor.isfinite().all() for layer in cache.layers for tensor in layer_tensors(layer))


# -- modes that are a matter of options --


def _padded(family: Family, model: Model) -> dict[str, Any]:
    return prompt(family, model, PROMPT, 3)


def _single(family: Family, model: Model) -> dict[str, Any]:
    return prompt(family, model, PROMPT)


def _embeddings(family: Family, model: Model) -> dict[str, Any]:
    inputs = family.inputs(model, (PROMPT, 30))
    with torch.no_grad():
        return {
            "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
            "attention_mask": inputs["attention_mask"],
        }


def _guided(family: Family, model: Model) -> dict[str, Any]:
    return _single(family, model) | {"guidance_scale": 1.5, "negative_prompt_ids": named_ids(model, 1, 40, 5)}


@dataclass(frozen=True)
class Mode:
    """A way to generate that is chosen by options."""

    name: str
    inputs: Callable[[Family, Model], dict[str, Any]]
    options: dict[str, Any]
    main: bool = False  # run with every family and window
    recorded: int = 0  # tokens at most that the cache remembers beyond the window, to take them back

    def __str__(self) -> str:
        return self.name

    def call(self, family: Family, model: Model, tokens: int = NEW) -> Any:
        options = self.inputs(family, model) | self.options
        return generate(model, tokens, **options)


BEAMS = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
MODES = [
    Mode("greedy", _padded, {"output_scores": True}, main=True),
    Mode("sampling", _padded, {"do_sample": True, "num_return_sequences": 3, "top_k": 20}, main=True),
    Mode("beams", _padded, BEAMS, main=True),
    Mode("sampled beams", _single, {**BEAMS, "do_sample": True}),
    Mode("prompt lookup", _single, {"prompt_lookup_num_tokens": 6}, main=True, recorded=64),
    Mode("embeddings", _embeddings, {}),
    Mode("hidden states", _padded, {"output_hidden_states": True}),
    Mode("guidance", _guided, {}),
    Mode("dynamic by name", _single, {"cache_implementation": "dynamic"}),
    Mode("chunks and beams", _padded, {**BEAMS, "prefill_chunk_size": 33}),
]


@pytest.mark.parametrize(
    ("family", "window", "mode"),
    [
        pytest.param(family, window, mode, id=f"{mode}-{family}-{window}")
        for mode in MODES
        for family in (FAMILIES if mode.main else SOME)
        for window in (WINDOWS if mode.main or family is SOME[0] else WINDOWS[:1])
    ],
)
def test_mode(family: Family, window: int, mode: Mode, layout: str) -> None:
    model = family.build(window)
    want = run(model, None, lambda model: mode.call(family, model))
    got = run(model, layout, lambda model: mode.call(family, model))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout, mode.recorded)


@pytest.mark.parametrize("mode", MODES, ids=str)
@some_families
def test_mode_notices_a_wrong_window(family: Family, mode: Mode) -> None:
    """The comparison above can fail, for every mode: a window that is one off gives another output."""
    model = family.build(8)
    want = mode.call(family, model, 8)
    assert_same(mode.call(family, family.with_window(model, 8), 8), want)
    for window in (7, 9):
        got = mode.call(family, family.with_window(model, window), 8)
        with pytest.raises(AssertionError):
            assert_same(got, want)


@pytest.mark.parametrize("window", WINDOWS)
def test_logits_notice_a_wrong_window(family: Family, window: int) -> None:
    assert_sensitive(family, window, tol=1e-3)


@pytest.mark.parametrize("options", ({}, BEAMS), ids=("greedy", "beams"))
@some_families
def test_sequences_that_end_early(family: Family, options: dict[str, Any], layout: str) -> None:
    """Rows of a batch end at different steps; finished ones go on as padding."""
    model = family.build(8)
    inputs = prompt(family, model, PROMPT, 30, 3)
    ends = generate(model, NEW, **inputs).sequences[0, PROMPT + 40 :].tolist()
    call = {**inputs, **options, "eos_token_id": ends[:1]}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert (got.compact, got.stock) == (want.stock, 0)
    assert (got.output.sequences[:, PROMPT:] == PAD).any()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", (1, 2, 7, 64, 65, 99, 1000))
@some_families
def test_prefill_in_chunks(family: Family, window: int, chunk: int, layout: str) -> None:
    """With and without left padding. Images that a chunk cuts in two are in `test_images.py`."""
    if window == WINDOWS[1] and family is not SOME[0]:
        pytest.skip("one family is enough for the second window")
    model = family.build(window)
    for lengths in ((PROMPT,), (PROMPT, 3)):
        inputs = family.inputs(model, lengths)
        want = run(model, None, lambda model: generate(model, 35, **inputs, prefill_chunk_size=chunk))  # noqa: B023
        got = run(model, layout, lambda model: generate(model, 35, **inputs, prefill_chunk_size=chunk))  # noqa: B023
        assert_same(got.output, want.output)
        assert_compact(got, want, model, layout)


def test_batch_sizes_on_one_model(family: Family, layout: str) -> None:
    model = family.build(8)
    for lengths in ((PROMPT, 40), (90,), (3, PROMPT, 20)):
        inputs = prompt(family, model, *lengths)
        want = run(model, None, lambda model: generate(model, 40, **inputs))  # noqa: B023
        got = run(model, layout, lambda model: generate(model, 40, **inputs))  # noqa: B023
        assert_same(got.output, want.output)
        assert isinstance(cache_of(got.output), swapatch.CompactCache)
