"""Every way to call `generate`: a patched model gives what the stock one gives, from a compact cache where it applies.

Whole outputs are compared: tokens, logits of every step, scores, hidden states, whatever the mode returns. A watcher
tells for each forward whether the sliding layers attended compactly or ran stock code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import transformers
from compare import TOL, assert_same_logits, assert_sensitive, cache_key, cache_of, forced, layer_tensors, sliding_rows
from torch import Tensor, nn
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.generation import utils as generation_utils
from transformers.generation.streamers import BaseStreamer
from zoo import BY_NAME, FAMILIES, FULL, OLD, PAD, SLIDING, Family, Model, named_ids, text_config, text_model

import swapatch
from swapatch.geometry import ceil64
from swapatch.step import Step

LAYOUTS = ("anchored", "ring")
WINDOWS = (8, 65)
PROMPT = 116  # past both windows, but less than a buffer holds: rows are given up while tokens are generated
NEW = 24
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


def outcome(model: Model, layout: str | None, call: Callable[[Model], Any]) -> Run | Exception:
    """A run, or the error that it ended with: what one machine or version can do, another cannot."""
    try:
        return run(model, layout, call)
    except Exception as error:
        return error


def generate(model: Model, tokens: int, **options: Any) -> Any:
    """Stock `generate` with all that it returns; nothing ends it early unless told."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": NO_END, "max_new_tokens": tokens}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)  # for those that sample
    return model.generate(**settings | options)


def prompt(family: Family, model: Model, *lengths: int) -> dict[str, Tensor]:
    """A left-padded batch; models that take images get two in each long row, the last one near its end."""
    images = [[(20, 5), (length - 7, 5)] if length > 50 else [] for length in lengths]
    return family.inputs(model, lengths, images=images if family.vision else None)


def skip_if_stock_cannot(model: Model, call: Callable[[Model], Any]) -> None:
    """Versions before the newest fail at some modes themselves; the newest must not, or its tests would be empty."""
    if OLD and isinstance(error := outcome(model, None, call), Exception):
        pytest.skip(f"transformers {transformers.__version__} cannot do this: {error!r:.100}")


def assert_same(got: Any, want: Any) -> None:
    """Everything that `generate` returns but the cache: tokens equal, numbers within the tolerance."""
    torch.testing.assert_close(_comparable(got), _comparable(want), atol=TOL, rtol=0)


def assert_same_outcome(got: Run | Exception, want: Run | Exception) -> bool:
    """Whether both gave something, which then is the same; otherwise both failed with the same kind of error."""
    if isinstance(want, Exception):
        assert type(got) is type(want)
        return False
    assert isinstance(got, Run), repr(got)
    assert_same(got.output, want.output)
    return True


def _comparable(output: Any) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name not in ("cache", "past_key_values")}


def assert_compact(got: Run, want: Run, model: Model, layout: str, recorded: int = 0) -> None:
    """The run kept a compact cache, bounded though more tokens came than it has rows, and used it in every forward."""
    cache, stock = cache_of(got.output), cache_of(want.output)
    assert not isinstance(stock, swapatch.CompactCache)
    assert_bounded(cache, model, layout, recorded)
    assert cache.get_seq_length() == stock.get_seq_length()
    assert cache.get_seq_length() > max(sliding_rows(cache)) or recorded
    assert (got.compact, got.stock) == (want.stock, 0)
    assert want.compact == 0


def assert_bounded(cache: Any, model: Model, layout: str, recorded: int = 0) -> None:
    """A compact cache of this layout, finite, with no more rows than the window and the recorded tokens need."""
    assert isinstance(cache, swapatch.CompactCache)
    assert cache.layout == layout
    assert max(sliding_rows(cache)) <= ceil64(text_config(model).sliding_window + 63) + ceil64(recorded)
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
    main: bool = False  # run with every family, and some with the second window
    tokens: int = NEW
    text_only: bool = False  # stock refuses it for models that take images
    recorded: int = 0  # tokens at most that the cache remembers beyond the window, to take them back

    def __str__(self) -> str:
        return self.name

    def families(self) -> list[Family]:
        families = FAMILIES if self.main else SOME
        return [family for family in families if not (self.text_only and family.vision)]

    def call(self, family: Family, model: Model, tokens: int = 0) -> Any:
        options = self.inputs(family, model) | self.options
        return generate(model, tokens or self.tokens, **options)


BEAMS = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
MODES = [
    Mode("greedy", _padded, {"output_scores": True}, main=True),
    Mode("greedy over two rolls", _padded, {}, tokens=80),
    Mode("sampling", _padded, {"do_sample": True, "num_return_sequences": 3, "top_k": 20}, main=True),
    Mode("beams", _padded, BEAMS, main=True),
    Mode("sampled beams", _single, {**BEAMS, "do_sample": True}),
    Mode("prompt lookup", _single, {"prompt_lookup_num_tokens": 6}, main=True, recorded=64),
    Mode("embeddings", _embeddings, {}, text_only=True),
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
        for family in mode.families()
        for window in (WINDOWS if mode.main and family in SOME[:2] else WINDOWS[:1])
    ],
)
def test_mode(family: Family, window: int, mode: Mode, layout: str) -> None:
    model = family.build(window)
    want = run(model, None, lambda model: mode.call(family, model))
    got = run(model, layout, lambda model: mode.call(family, model))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout, mode.recorded)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        pytest.param(family, mode, id=f"{mode}-{family}")
        for mode in MODES
        for family in mode.families()
        if family in SOME
    ],
)
def test_mode_notices_a_wrong_window(family: Family, mode: Mode) -> None:
    """The comparison above can fail, for every mode: a window that is one off gives another output."""
    model = family.build(8)
    want = mode.call(family, model, 4)
    for window in (7, 9):
        got = mode.call(family, family.with_window(model, window), 4)
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
    ends = generate(model, 20, **inputs, **options).sequences[0, PROMPT + 10 : PROMPT + 15]
    call = {**inputs, **options, "eos_token_id": ends.tolist()}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert (got.compact, got.stock) == (want.stock, 0)
    assert torch.isin(got.output.sequences[:, PROMPT:-1], ends).any()


CHUNKS = [(family, 8, chunk, (PROMPT, 3)) for family in SOME for chunk in (7, 50)]
CHUNKS += [(SOME[0], 65, chunk, lengths) for chunk in (1, 2, 64, 65, 1000) for lengths in ((PROMPT,), (PROMPT, 3))]


@pytest.mark.parametrize(("family", "window", "chunk", "lengths"), CHUNKS, ids=str)
def test_prefill_in_chunks(family: Family, window: int, chunk: int, lengths: tuple[int, ...], layout: str) -> None:
    """With and without left padding. Images that a chunk cuts in two are in `test_images.py`."""
    model = family.build(window)
    call = {**family.inputs(model, lengths), "prefill_chunk_size": chunk}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout)
    assert (got.compact > NEW) == (chunk < PROMPT)


@some_families
def test_batch_sizes_on_one_model(family: Family, layout: str) -> None:
    model = family.build(8)
    for lengths in ((PROMPT, 40), (PROMPT,), (3, PROMPT, 20)):
        inputs = prompt(family, model, *lengths)
        want = run(model, None, lambda model: generate(model, NEW, **inputs))  # noqa: B023
        got = run(model, layout, lambda model: generate(model, NEW, **inputs))  # noqa: B023
        assert_same(got.output, want.output)
        assert_compact(got, want, model, layout)


class Collector(BaseStreamer):
    """Keeps what a streamer is given, and how often it was told the end."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("options", ({}, {"do_sample": True}, {"prompt_lookup_num_tokens": 6}), ids=str)
@some_families
def test_streamers(family: Family, options: dict[str, Any], layout: str) -> None:
    """The same tokens in the same portions."""
    model = family.build(8)
    call = {**prompt(family, model, PROMPT), **options}
    theirs, mine = Collector(), Collector()
    want = run(model, None, lambda model: generate(model, NEW, **call, streamer=theirs))
    got = run(model, layout, lambda model: generate(model, NEW, **call, streamer=mine))
    assert_same(got.output, want.output)
    assert_compact(got, want, model, layout, recorded=64 if "prompt_lookup_num_tokens" in options else 0)
    assert mine.parts == theirs.parts
    assert [token for part in mine.parts for token in part] == got.output.sequences[0].tolist()
    assert mine.ends == theirs.ends == 1


@some_families
def test_attention_weights(family: Family, layout: str) -> None:
    """Shapes and values are stock's: stock code computes them, from the compact rows."""
    model = family.build(8, attn_implementation="eager")
    call = {**prompt(family, model, PROMPT, 3), "output_attentions": True, "output_hidden_states": True}
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert len(got.output.attentions) == NEW
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert max(sliding_rows(cache_of(got.output))) < PROMPT + NEW - 1
    assert (got.compact, got.stock) == (0, want.stock)


# -- drafts that are taken back --


def draft(assistant: Model, tokens: int) -> Model:
    """Let the assistant draft exactly so many tokens a round, however sure it is."""
    config = assistant.generation_config
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


def relative(family: Family, model: Model) -> Model:
    """An assistant that is right now and then: the same weights with a longer window."""
    return family.with_window(model, 2 * text_config(model).sliding_window)


def stranger(family: Family, model: Model) -> Model:
    """An assistant that is hardly ever right."""
    return family.build(text_config(model).sliding_window, seed=5)


def assisted(model: Model, assistant: Model, tokens: int, inputs: dict[str, Any], **options: Any) -> Any:
    return generate(model, tokens, **inputs, assistant_model=assistant, **options)


OWN = [(family, 8, tokens, 2 * NEW) for family in SOME for tokens in (1, 20)]
OWN += [(SOME[0], window, 66, 150) for window in WINDOWS]


@pytest.mark.parametrize(("family", "window", "tokens", "new"), OWN, ids=str)
def test_own_assistant(
    family: Family, window: int, tokens: int, new: int, layout: str, made: list[swapatch.CompactCache]
) -> None:
    """Every draft is right, so bursts of it are kept: past the window, and over the end of the buffers."""
    model = draft(family.build(window), tokens)
    inputs = prompt(family, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, model, new, inputs))
    want = generate(model, new, **inputs)
    got = run(model, layout, lambda model: assisted(model, model, new, inputs))
    assert_same(got.output, want)
    assert_bounded(cache_of(got.output), model, layout, tokens + 1)
    assert len(made) == 2
    assert got.stock == 0


ASSISTANTS = [(family, relative, 5, "both") for family in FAMILIES]
ASSISTANTS += [(family, relative, 5, who) for family in SOME for who in ("target", "assistant")]
ASSISTANTS += [(family, stranger, 2, "both") for family in SOME]


@pytest.mark.parametrize(
    ("family", "helper", "tokens", "who"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].__name__}-{case[3]}") for case in ASSISTANTS],
)
def test_assistant(
    family: Family,
    helper: Callable[[Family, Model], Model],
    tokens: int,
    who: str,
    layout: str,
    made: list[swapatch.CompactCache],
) -> None:
    """Some or all of a draft is taken back in each round, on either side of the roll. Equals greedy without drafts."""
    new = 16  # the buffers roll after 12
    model = family.build(8)
    assistant = draft(helper(family, model), tokens)
    inputs = prompt(family, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, new, inputs))
    want = generate(model, new, **inputs)
    with watched(assistant) as drafts, patched(assistant, layout if who != "target" else None):
        got = run(model, layout if who != "assistant" else None, lambda model: assisted(model, assistant, new, inputs))
    assert_same(got.output, want)
    if who == "assistant":
        assert type(cache_of(got.output)) is DynamicCache
    else:
        assert_bounded(cache_of(got.output), model, layout, tokens + 1)
    assert len(made) == (2 if who == "both" else 1)
    assert bool(got.stock) == (who == "assistant")
    assert set(drafts) == {who != "target"}
    assert len(drafts) > new  # some were in vain


@some_families
def test_assistant_of_a_longer_window(family: Family, layout: str) -> None:
    """The second window, and a target whose buffers roll while it takes drafts back."""
    model = family.build(65)
    assistant = draft(relative(family, model), 20)
    inputs = prompt(family, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, NEW, inputs))
    want = generate(model, NEW, **inputs)
    with swapatch.patch(assistant, layout=layout):
        got = run(model, layout, lambda model: assisted(model, assistant, NEW, inputs))
    assert_same(got.output, want)
    assert_bounded(cache_of(got.output), model, layout, 21)
    assert got.stock == 0


@some_families
def test_turn_after_drafts(family: Family, layout: str) -> None:
    """The cache that drafts leave behind takes more turns, with drafts and without."""
    model = draft(family.build(8), 4)
    inputs = family.inputs(model, (PROMPT,))

    def call(model: Model) -> list[Any]:
        outputs = [assisted(model, model, 20, inputs)]
        for size, options in ((3, {"prompt_lookup_num_tokens": 4}), (40, {})):
            cache = cache_of(outputs[-1])
            turn = spoken(model, outputs[-1].sequences, inputs["attention_mask"], size) | {cache_key(model): cache}
            outputs.append(generate(model, 20, **turn, **options))
        return outputs

    skip_if_stock_cannot(model, call)
    want = run(model, None, call)
    got = run(model, layout, call)
    for ours, theirs in zip(got.output, want.output, strict=True):
        assert_same(ours, theirs)
    assert isinstance(cache_of(got.output[-1]), swapatch.CompactCache)
    assert (got.compact, got.stock) == (want.stock, 0)


@some_families
def test_sampled_drafts(family: Family, layout: str) -> None:
    """Speculative sampling: seeded, the same tokens as stock with the same assistant."""
    model = family.build(8)
    assistant = draft(relative(family, model), 3)
    inputs = prompt(family, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, assistant, NEW, inputs, do_sample=True))
    want = assisted(model, assistant, NEW, inputs, do_sample=True)
    with swapatch.patch(assistant, layout=layout):
        got = run(model, layout, lambda model: assisted(model, assistant, NEW, inputs, do_sample=True))
    assert_same(got.output, want)
    assert isinstance(cache_of(got.output), swapatch.CompactCache)
    assert got.stock == 0


@pytest.mark.parametrize("family", GEMMA4, ids=str)
def test_drafter_that_reads_shared_states(family: Family, layout: str) -> None:
    """Gemma 4's own kind of assistant attends the keys and values that the target returns: the same drafts as stock."""
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no such assistant")
    model = family.build(8)
    try:
        drafter = draft(shared_state_drafter(model), 3)
    except ValueError as error:
        if not OLD:
            raise
        pytest.skip(f"transformers {transformers.__version__} cannot build one: {error}")
    inputs = prompt(family, model, PROMPT)
    skip_if_stock_cannot(model, lambda model: assisted(model, drafter, NEW, inputs))

    def drafts(layout: str | None) -> tuple[Any, list[Tensor]]:
        logits: list[Tensor] = []
        hook = drafter.register_forward_hook(lambda module, args, output: logits.append(output.logits))
        got = run(model, layout, lambda model: assisted(model, drafter, NEW, inputs))
        hook.remove()
        assert (got.compact > 0, got.stock > 0) == (layout is not None, layout is None)
        return got.output, logits

    greedy = generate(model, NEW, **inputs)
    (want, their_drafts), (got, my_drafts) = drafts(None), drafts(layout)
    assert_same(want, greedy)
    assert_same(got, greedy)
    assert isinstance(cache_of(got), swapatch.CompactCache)
    torch.testing.assert_close(my_drafts, their_drafts, atol=TOL, rtol=0)


def shared_state_drafter(target: Model) -> Model:
    attentions = [layer.self_attn for layer in text_model(target).layers]
    near, far = (next(x for x in attentions if x.is_sliding == sliding) for sliding in (True, False))
    text = transformers.Gemma4TextConfig(
        layer_types=[SLIDING, FULL],
        num_hidden_layers=2,
        num_kv_shared_layers=2,
        vocab_size=NO_END,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=near.k_proj.out_features // near.head_dim,
        num_global_key_value_heads=far.k_proj.out_features // far.head_dim,
        attention_k_eq_v=True,  # so that the number above counts
        head_dim=near.head_dim,
        global_head_dim=far.head_dim,
        sliding_window=text_config(target).sliding_window,
        pad_token_id=PAD,
    )
    torch.manual_seed(3)
    whole = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=text_config(target).hidden_size)
    return transformers.Gemma4AssistantForCausalLM(whole).eval()


@pytest.mark.parametrize("layers", (1, 3))
def test_leaving_early_to_draft(family: Family, layout: str, layers: int) -> None:
    """The first layers of the model draft: meanwhile its config says that it has no others, perhaps no sliding one."""

    def call(model: Model) -> Any:
        return generate(draft(model, 3), NEW, **prompt(family, model, PROMPT), assistant_early_exit=layers)

    # Each on a model of its own: where stock cannot do it, the config stays as it was at the failure.
    want = outcome(family.build(8), None, call)
    got = outcome(family.build(8), layout, call)
    if isinstance(want, Exception):
        assert isinstance(got, Exception)
    else:
        assert_same_outcome(got, want)
        assert isinstance(cache_of(got.output), swapatch.CompactCache)
        assert got.stock == 0 or layers == 1


@some_families
def test_one_step_is_undone_at_the_end(family: Family, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the end is noticed one step late (on a Mac), that step is taken back from the cache that is returned."""
    if not hasattr(generation_utils, "DeferredStopCheck"):
        pytest.skip("this transformers does not defer")
    monkeypatch.setattr(generation_utils.DeferredStopCheck, "is_supported", staticmethod(lambda *args, **kwargs: True))
    monkeypatch.setattr(torch, "Event", lambda **options: Mock())  # a CPU has none, and nothing to wait for
    model = family.build(8)
    inputs = prompt(family, model, PROMPT)
    end = generate(model, NEW, **inputs).sequences[0, PROMPT + 16].item()
    want = run(model, None, lambda model: generate(model, NEW, **inputs, eos_token_id=end))
    got = run(model, layout, lambda model: generate(model, NEW, **inputs, eos_token_id=end))
    assert_same(got.output, want.output)
    assert got.output.sequences.shape[1] < PROMPT + NEW
    ids = named_ids(model, 1, 20)
    after = [forced(model, ids, prompt=1, cache=cache_of(want.output))]
    with swapatch.patch(model, layout=layout):
        after.append(forced(model, ids, prompt=1, cache=cache_of(got.output)))
    assert_same_logits(after[1].logits, after[0].logits)


@some_families
def test_counts_of_drafts_are_tensors(family: Family, layout: str) -> None:
    """As older versions of transformers count the tokens to take back; a cache must not keep such a tensor."""
    model = family.build(8)
    ids = named_ids(model, 1, PROMPT + 40)
    with swapatch.patch(model, layout=layout):
        want = forced(model, ids, prompt=PROMPT).logits[:, PROMPT:]
        cache = forced(model, ids[:, :PROMPT], prompt=PROMPT).cache
        cache.activate_past_recording()
        forced(model, ids[:, PROMPT : PROMPT + 5], prompt=5, cache=cache)
        cache.crop(-torch.tensor(5))
        assert type(cache.get_seq_length(next(iter(cache.plan.owners)))) is int
        assert_same_logits(forced(model, ids[:, PROMPT:], prompt=1, cache=cache).logits, want)


# -- a returned cache --


def turns(family: Family, model: Model, lengths: tuple[int, ...], **second: Any) -> list[Any]:
    """A prompt; then all ids so far and new ones; then only ids that the cache has not seen, with the whole mask."""
    inputs = family.inputs(model, lengths)
    outputs = [generate(model, 20, **inputs)]
    cache = cache_of(outputs[0])
    call = spoken(model, outputs[0].sequences, inputs["attention_mask"], 9) | {cache_key(model): cache}
    outputs.append(generate(model, 20, **call, **second))
    call = spoken(model, outputs[1].sequences, inputs["attention_mask"], 70) | {cache_key(model): cache}
    call["input_ids"] = call["input_ids"][:, cache.get_seq_length() :]
    outputs.append(generate(model, 20, **call))
    assert all(cache_of(output) is cache for output in outputs)
    return outputs


def spoken(model: Model, ids: Tensor, mask: Tensor, more: int) -> dict[str, Any]:
    """So many new ids after these, and the mask for all of them."""
    ids = torch.cat([ids, named_ids(model, len(ids), more, seed=more)], dim=1)
    return {"input_ids": ids, "attention_mask": nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)}


@pytest.mark.parametrize("second", ({}, {"prefill_chunk_size": 5}), ids=str)
@pytest.mark.parametrize("lengths", ((PROMPT,), (PROMPT, 3)), ids=str)
@some_families
def test_more_turns_on_a_returned_cache(
    family: Family, lengths: tuple[int, ...], second: dict[str, Any], layout: str, made: list[swapatch.CompactCache]
) -> None:
    model = family.build(8)
    skip_if_stock_cannot(model, lambda model: turns(family, model, lengths, **second))
    want = turns(family, model, lengths, **second)
    with watched(model) as seen, swapatch.patch(model, layout=layout):
        got = turns(family, model, lengths, **second)
    for ours, theirs in zip(got, want, strict=True):
        assert_same(ours, theirs)
    assert all(seen)
    assert len(made) == 1
    assert max(sliding_rows(made[0])) < made[0].get_seq_length()


@some_families
def test_returned_cache_goes_on_by_hand(family: Family, layout: str) -> None:
    model = family.build(8)
    inputs = family.inputs(model, (PROMPT, 3))
    more = 45

    def by_hand(model: Model) -> Tensor:
        output = generate(model, 20, **inputs)
        cache = cache_of(output)
        call = spoken(model, output.sequences, inputs["attention_mask"], more)
        ids, mask = call["input_ids"][:, cache.get_seq_length() :], call["attention_mask"]
        return forced(model, ids, prompt=5, chunks=[1, 9], attention_mask=mask, cache=cache).logits

    want = run(model, None, by_hand)
    got = run(model, layout, by_hand)
    assert_same_logits(got.output, want.output)
    assert (got.compact, got.stock) == (want.stock, 0)


# -- caches of a fixed length --


STATIC = {"cache_implementation": "static"}
FIXED_MODES = {
    "greedy": {},
    "beams": BEAMS,
    "chunks": {"prefill_chunk_size": 7},
    "longer than needed": {"max_cache_len": 400},
}


@pytest.mark.parametrize("options", FIXED_MODES.values(), ids=FIXED_MODES.keys())
@some_families
def test_static_cache(family: Family, options: dict[str, Any], layout: str) -> None:
    """Asked for by name: the global layers are static, the sliding ones are bounded all the same."""
    model = family.build(8)
    call = {**prompt(family, model, PROMPT, 3), **STATIC, **options}
    if "prefill_chunk_size" in options:
        call |= family.inputs(model, (PROMPT, 3))
        call.pop("mm_token_type_ids", None)
        call.pop("token_type_ids", None)
    skip_if_stock_cannot(model, lambda model: generate(model, NEW, **call))
    want = run(model, None, lambda model: generate(model, NEW, **call))
    got = run(model, layout, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert type(cache_of(want.output)) is StaticCache
    assert_compact(got, want, model, layout)
    assert cache_of(got.output).get_max_length() == cache_of(want.output).get_max_length()


@some_families
def test_masks_made_ahead_are_made_contiguous(family: Family, layout: str) -> None:
    """From 5.18 to 5.23 `generate` asks that of each mask it made ahead, without looking what kind of thing it is."""
    model = family.build(8)
    cache = swapatch.CompactCache(model, max_cache_len=200, layout=layout)
    call = {"config": model.config, "inputs_embeds": torch.empty(1, 5, 0), "attention_mask": None, "position_ids": None}
    with swapatch.patch(model, layout=layout):
        masks = model.create_masks_for_generate(**call, **{cache_key(model): cache})
    ready = {name: mask.contiguous() for name, mask in masks.items() if mask is not None}
    assert isinstance(ready[SLIDING], Step)


@pytest.mark.parametrize("helper", ("itself", "prompt lookup"))
@some_families
def test_static_cache_and_drafts(family: Family, helper: str, layout: str) -> None:
    """Stock refuses it past the window; who does it gives the same tokens."""
    model = draft(family.build(8), 3)
    # Room for drafts beyond the last token: stock's static layers fail at the end otherwise, whatever the window.
    inputs = {**prompt(family, model, PROMPT), "max_cache_len": 400}
    options = {"assistant_model": model} if helper == "itself" else {"prompt_lookup_num_tokens": 4}
    greedy = generate(model, NEW, **inputs, **STATIC)
    want = outcome(model, None, lambda model: generate(model, NEW, **inputs, **STATIC, **options))
    got = outcome(model, layout, lambda model: generate(model, NEW, **inputs, **STATIC, **options))
    if isinstance(got, Exception):
        assert type(got) is type(want)
    else:
        assert_same(got.output, greedy)


@pytest.mark.parametrize("name", ("gemma3_text", "gemma4_ple_shared"))
def test_static_cache_compiled(name: str, layout: str) -> None:
    """The slow one: traced for real, without generating machine code, on a CPU too."""
    if name not in BY_NAME:
        pytest.skip("this transformers has no such model")
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    family = BY_NAME[name]
    model = family.build(8)
    call = {**prompt(family, model, PROMPT), **STATIC}
    want = generate(model, NEW, **call)
    torch.compiler.reset()
    with swapatch.patch(model, layout=layout):
        got = generate(model, NEW, **call, compile_config=config)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    assert_same(got, want)
    assert_bounded(cache_of(got), model, layout)
    assert graphs > 0


# -- what stays stock's --


def no_cache(family: Family, model: Model) -> dict[str, Any]:
    return {"use_cache": False}


def offloaded(family: Family, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "offloaded"}


def offloaded_static(family: Family, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "offloaded_static"}


def quantized(family: Family, model: Model) -> dict[str, Any]:
    return {"cache_implementation": "quantized"}


def own_dynamic(family: Family, model: Model) -> dict[str, Any]:
    return {cache_key(model): DynamicCache(config=text_config(model))}


def own_dynamic_without_windows(family: Family, model: Model) -> dict[str, Any]:
    return {cache_key(model): DynamicCache()}


def own_static(family: Family, model: Model) -> dict[str, Any]:
    return {cache_key(model): StaticCache(text_config(model), PROMPT + NEW)}


def both_kinds_of_cache(family: Family, model: Model) -> dict[str, Any]:
    return own_dynamic(family, model) | STATIC


STOCK = (
    no_cache,
    offloaded,
    offloaded_static,
    quantized,
    own_dynamic,
    own_dynamic_without_windows,
    own_static,
    both_kinds_of_cache,
)


@pytest.mark.parametrize("options", STOCK)
@some_families
def test_stays_stock(
    family: Family,
    options: Callable[[Family, Model], dict[str, Any]],
    layout: str,
    made: list[swapatch.CompactCache],
) -> None:
    """The same outcome, be it an error, with the same kind of cache and no compact one in sight."""
    model = family.build(8)
    inputs = prompt(family, model, PROMPT, 3)
    want = outcome(model, None, lambda model: generate(model, NEW, **inputs, **options(family, model)))
    got = outcome(model, layout, lambda model: generate(model, NEW, **inputs, **options(family, model)))
    if assert_same_outcome(got, want):
        assert (got.compact, got.stock) == (0, want.stock)
        assert_same_kind_of_cache(got, want)
    assert not made


def assert_same_kind_of_cache(got: Run, want: Run) -> None:
    caches = [cache_of(run.output) if {"cache", "past_key_values"} & set(run.output) else None for run in (got, want)]
    assert type(caches[0]) is type(caches[1])
    if caches[0] is not None:
        assert [type(layer) for layer in caches[0].layers] == [type(layer) for layer in caches[1].layers]


@pytest.mark.parametrize("fixed", (None, 400))
@pytest.mark.parametrize("used", ("patched", "not patched"))
@some_families
def test_a_compact_cache_that_is_passed(family: Family, used: str, fixed: int | None, layout: str) -> None:
    """Made by hand it is used as any other, by a model that is not patched too."""
    model = family.build(8)
    inputs = prompt(family, model, PROMPT, 3)
    # An encoder-free model attends images otherwise when its masks are made ahead, as they are for a static cache.
    want = run(model, None, lambda model: generate(model, NEW, **inputs, **(STATIC if fixed else {})))
    cache = swapatch.CompactCache(model, max_cache_len=fixed, layout=layout)
    call = {**inputs, cache_key(model): cache}
    got = run(model, layout if used == "patched" else None, lambda model: generate(model, NEW, **call))
    assert_same(got.output, want.output)
    assert cache_of(got.output) is cache
    assert max(sliding_rows(cache)) < cache.get_seq_length() == PROMPT + NEW - 1
    assert (got.compact if used == "patched" else got.stock) == NEW


@some_families
def test_training_mode(family: Family, layout: str) -> None:
    """All is stock's code: dropout draws the same numbers."""
    model = family.build(8)
    for layer in text_model(model).layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    inputs = prompt(family, model, PROMPT)
    want = run(model, None, lambda model: generate(model, NEW, **inputs))
    got = run(model, layout, lambda model: generate(model, NEW, **inputs))
    assert_same(got.output, want.output)
    assert got.compact == 0
    without = generate(model.eval(), NEW, **inputs)
    assert not torch.equal(torch.stack(without.logits), torch.stack(got.output.logits))


@some_families
def test_gradients(family: Family, layout: str, made: list[swapatch.CompactCache]) -> None:
    model = family.build(8)
    ids = named_ids(model, 1, PROMPT)
    with watched(model) as seen, swapatch.patch(model, layout=layout):
        output = model(ids, use_cache=True)
    assert output.logits.requires_grad
    assert type(cache_of(output)) is DynamicCache
    assert (seen, made) == ([False], [])


@pytest.mark.parametrize("name", ("gemma3_text", "gemma3_vision", "gemma4_ple_shared"))
def test_generate_batch(name: str, layout: str, made: list[swapatch.CompactCache]) -> None:
    """Continuous batching keeps pages of its own. Stock gives nothing for Gemma 4: its heads differ between layers."""
    model = BY_NAME[name].build(8)
    prompts = [named_ids(model, 1, length, seed=length)[0].tolist() for length in (PROMPT, 7)]
    # Without a size the pages take most of the memory there is.
    size = {"page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size": 32}
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, **size)
    settings = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=NO_END, pad_token_id=PAD)

    def call(model: Model) -> dict[str, Any]:
        done = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=pages, warmup=False)
        return {name: torch.tensor(request.generated_tokens) for name, request in done.items() if not request.error}

    want = outcome(model, None, call)
    if isinstance(want, Run):
        for one, tokens in zip(prompts, want.output.values(), strict=False):
            alone = generate(model, 20, input_ids=torch.tensor([one])).sequences[0, len(one) :]
            if OLD and not torch.equal(tokens, alone):
                pytest.skip(f"transformers {transformers.__version__} gives a batch other tokens than one prompt alone")
            assert torch.equal(tokens, alone)
    got = outcome(model, layout, call)
    if assert_same_outcome(got, want) and want.output:
        assert (got.compact, got.stock) == (0, want.stock)
        assert len(want.output) == 2
    assert bool(want.output) or OLD or not name.startswith("gemma3")
    assert not made


# -- masks that the caller has made --


def ready_masks(cache: Any, model: Model, queries: int, kind: str) -> Any:
    """Masks for the next tokens: 4D for both kinds of layer, or one for each; random holes, the token itself seen."""
    seen = cache.get_seq_length()
    window = text_config(model).sliding_window
    query = torch.arange(seen, seen + queries)[:, None]
    key = torch.arange(seen + queries)
    holes = torch.rand(seen + queries, generator=torch.Generator().manual_seed(1)) < 0.2
    allowed = (key <= query) & (~holes | (key == query))
    if kind == "one for both":
        return allowed[None, None]
    first = max(0, seen - window + 1)
    near = allowed & (key > query - window)
    return {FULL: allowed[None, None], SLIDING: near[None, None, :, first:]}


def additive(mask: Any) -> Any:
    if isinstance(mask, dict):
        return {name: additive(part) for name, part in mask.items()}
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("convert", (lambda mask: mask, additive), ids=("bool", "additive"))
@pytest.mark.parametrize("kind", ("one for both", "one for each"))
@some_families
def test_ready_made_masks(family: Family, kind: str, convert: Callable[[Any], Any], layout: str) -> None:
    """They reach the layers as they are, over a prompt, several tokens and single ones."""
    model = family.build(8)
    ids = named_ids(model, 1, PROMPT + 15)
    # One mask for both can only fit where both kinds of layer have the same keys: within the window, or in a prefill.
    sizes = [PROMPT] if kind == "one for both" else [PROMPT, 5, *[1] * 10]

    @torch.no_grad()
    def call(model: Model) -> Any:
        cache = DynamicCache(config=text_config(model))
        if swapatch.is_patched(model):
            cache = swapatch.CompactCache(model, layout=layout)
        logits = []
        for part in ids[:, : sum(sizes)].split(sizes, dim=1):
            mask = convert(ready_masks(cache, model, part.shape[1], kind))
            logits.append(model(part, attention_mask=mask, **{cache_key(model): cache}).logits)
        return torch.cat(logits, dim=1)

    want = run(model, None, call)
    got = run(model, layout, call)
    assert_same_logits(got.output, want.output)
    assert (got.compact, got.stock) == (0, len(sizes))


@pytest.mark.parametrize("convert", (lambda mask: mask, additive), ids=("bool", "additive"))
@some_families
def test_ready_made_mask_that_does_not_fit(family: Family, convert: Callable[[Any], Any], layout: str) -> None:
    """Past the window one mask cannot serve both kinds of layer: the same error as stock's."""
    model = family.build(8)
    ids = named_ids(model, 1, PROMPT + 1)

    def call(model: Model) -> Any:
        cache = forced(model, ids[:, :PROMPT], prompt=PROMPT).cache
        mask = convert(ready_masks(cache, model, 1, "one for both"))
        with torch.no_grad():
            return model(ids[:, PROMPT:], attention_mask=mask, **{cache_key(model): cache})

    want = outcome(model, None, call)
    assert isinstance(want, RuntimeError)
    assert_same_outcome(outcome(model, layout, call), want)
