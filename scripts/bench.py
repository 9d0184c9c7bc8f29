"""Time and memory of stock transformers and of swapatch, measured in turn in one process.

    python scripts/bench.py                            # everything: bench-results/bench.json and bench.csv
    python scripts/bench.py --only layer-prefill decode
    python scripts/bench.py --quick                    # toy sizes: shows that it works, not how fast anything is

A ratio is stock's time (or memory) over swapatch's: above 1 swapatch is ahead. It is the median of the ratios of single
rounds, and each round runs every way once, so that a machine that is busy for a while slows all of them alike. Before
anything is timed the ways must have computed the same.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache as once
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from checkpoint import checkpoint_path
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)
from transformers.cache_utils import (
    Cache,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate

import swapatch
from swapatch import hooks, step
from swapatch._compat import CACHE_NAME, kv_shape
from swapatch.attention import BACKENDS
from swapatch.attention.windowed import PREFILL_BLOCK
from swapatch.geometry import Span
from swapatch.masks import CausalWindow
from swapatch.plan import plan_model
from swapatch.step import DecodeStep, FixedStep, Step

SCHEMA = 1
"""Of the JSON file; goes up when a field changes its meaning."""

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of two results that counts as rounding, as a part of the largest number in them."""

ROUNDING = 0.3
"""The same for what was found equal in float32 already: bfloat16 in a whole model, over rows of random numbers."""

LONG = 3.0
"""Seconds from which on a run has no use for a warm-up: the run that is checked is timed as well."""

AGAIN = 20.0
"""Seconds that a first round of such runs may take, if there is to be a second one."""

HEAD_DIM = 256

Way = Callable[[], tuple[float, Any]]
"""One way of doing the work: runs it once, and returns the seconds it took and what it computed.

The first call of every way computes the same, and so does the second, and so on.
"""


# ---------------------------------------------------------------------------------------------------------------------
# sizes


@dataclass(frozen=True)
class Shape:
    """One sliding layer."""

    window: int
    heads: int
    kv_heads: int
    dim: int = HEAD_DIM

    def __str__(self) -> str:
        return f"W={self.window}, {self.heads}/{self.kv_heads} heads, D={self.dim}"


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how many seconds each comparison may go on once it has its first round."""

    seconds: float
    layer_prefill: tuple[Shape, ...]
    layer_lengths: tuple[int, ...]
    blocks: tuple[int, ...]  # queries in one
    layer_decode: tuple[Shape, ...]
    layer_context: int
    layer_steps: int  # in a round; 64 of them, so that each round has one roll of an anchored buffer
    full_rows: int  # of the full cache that a bounded one is compared with
    prefill: dict[torch.dtype, tuple[int, ...]]
    chunk: int
    chunk_to: int  # chunked prefill is measured up to this length
    eager_to: int
    flex_at: int
    parts: int  # prompt length
    contexts: tuple[int, ...]
    few_contexts: tuple[int, ...]  # of the other models
    batch_context: int
    batch: int  # beside 1: the more sequences, the more the cache weighs against the weights
    gemma4: dict[str, int]
    decode_steps: int
    memory: dict[str, tuple[int, ...]]
    gemma3: dict[str, int]
    compiled_tokens: int
    python: dict[str, int]  # so small a model that a step of it is hardly more than the calls it makes
    patch_layers: int
    roofline: int  # prompt length
    copy_bytes: int
    matmul: int


TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 64,
    "vocab_size": 512,
}

FULL = Sizes(
    seconds=2.0,
    layer_prefill=(Shape(512, 4, 1), Shape(1024, 8, 4)),
    layer_lengths=(2048, 4096, 8192, 16384),
    blocks=(64, 128, 256, 512, 1024),
    layer_decode=(Shape(512, 4, 1), Shape(1024, 4, 2)),
    layer_context=4096,
    layer_steps=64,
    full_rows=8192,
    prefill={torch.bfloat16: (512, 1024, 2048, 4096, 8192, 16384), torch.float32: (512, 2048)},
    chunk=512,
    chunk_to=4096,
    eager_to=2048,
    flex_at=2048,
    parts=8192,
    contexts=(1, 512, 2048, 8192, 16384),
    few_contexts=(1, 2048, 16384),
    batch_context=2048,
    batch=8,
    # As wide as Gemma 4 E2B, with fewer layers and tokens.
    gemma4={
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "vocab_size": 40000,
        "vocab_size_per_layer_input": 40000,
    },
    decode_steps=2,
    memory={"stock": (4096, 8192, 16384), "swapatch": (4096, 8192, 16384, 32768)},
    # As wide as Gemma 3 4B. The vocabulary is smaller in the same proportion as the layers are fewer, so that the head
    # weighs what it does there.
    gemma3={
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 46000,
    },
    compiled_tokens=1500,
    python={**TOY, "num_hidden_layers": 18},
    patch_layers=60,
    roofline=4096,
    copy_bytes=2**30,
    matmul=2048,
)

QUICK = Sizes(
    seconds=0.1,
    layer_prefill=(Shape(64, 4, 1, 32),),
    layer_lengths=(128, 256),
    blocks=(64, 256),
    layer_decode=(Shape(64, 4, 2, 32),),
    layer_context=200,
    layer_steps=8,
    full_rows=512,
    prefill={torch.bfloat16: (32, 256), torch.float32: (256,)},
    chunk=64,
    chunk_to=256,
    eager_to=256,
    flex_at=0,
    parts=256,
    contexts=(1, 200),
    few_contexts=(200,),
    batch_context=200,
    batch=2,
    gemma4={
        **{name: size for name, size in TOY.items() if name != "num_hidden_layers"},
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": TOY["vocab_size"],
    },
    decode_steps=4,
    memory={"stock": (1024, 2048), "swapatch": (1024, 2048)},
    gemma3=TOY,
    compiled_tokens=100,
    python=TOY,
    patch_layers=12,
    roofline=256,
    copy_bytes=2**24,
    matmul=256,
)


@dataclass(frozen=True)
class Options:
    """Of a run."""

    sizes: Sizes = FULL
    quick: bool = False
    long: bool = False
    rounds: int = 12
    threads: int = field(default_factory=torch.get_num_threads)


# ---------------------------------------------------------------------------------------------------------------------
# results


@dataclass
class Row:
    """One figure: stock and swapatch doing the same, or one of them alone.

    Attributes:
        setting: what was run besides ``model``.
        tokens: of the prompt, or the context of a decode step.
        error: largest difference of the two results, as a part of the largest number in them.
        ratio: stock over swapatch, median of the rounds; for a figure that is no comparison, None.
        ratio_of_sums: the same of the sums over all rounds, which rare work such as a roll counts in.
    """

    case: str
    model: str
    setting: str
    tokens: int | None
    dtype: str
    unit: str
    stock: str = ""
    stock_value: float | None = None
    patched: str = ""
    patched_value: float | None = None
    ratio: float | None = None
    ratio_of_sums: float | None = None
    rounds: int = 1
    error: float | None = None
    tolerance: float | None = None
    note: str = ""
    threads: int = 0
    cpu: str = ""
    torch: str = torch.__version__
    transformers: str = transformers.__version__
    swapatch: str = swapatch.__version__

    def __post_init__(self) -> None:
        self.threads = self.threads or torch.get_num_threads()
        self.cpu = self.cpu or cpu_name()


@dataclass
class Result:
    """Seconds of every way, round by round, and how far what it computed was from the first way's."""

    seconds: dict[str, list[float]]
    errors: dict[str, float]
    tolerance: float

    def row(self, stock: str, patched: str, **about: Any) -> Row:
        stocks, patcheds = self.seconds[stock], self.seconds[patched]
        return Row(
            unit="s",
            stock=stock,
            stock_value=statistics.median(stocks),
            patched=patched,
            patched_value=statistics.median(patcheds),
            ratio=statistics.median(s / p for s, p in zip(stocks, patcheds, strict=True)),
            ratio_of_sums=sum(stocks) / sum(patcheds),
            rounds=len(stocks),
            error=max(self.errors[stock], self.errors[patched]),
            tolerance=self.tolerance,
            **about,
        )


def compare(
    ways: dict[str, Way], dtype: torch.dtype, options: Options, tolerance: float | None = None, patience: int = 1
) -> Result:
    """Check that all ways compute the same as the first, then time them in turn, ``patience`` times as long."""
    start, budget, rounds = time.perf_counter(), patience * options.sizes.seconds * len(ways), patience * options.rounds
    first = {name: way() for name, way in ways.items()}
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    errors = check(first, tolerance)
    warm = max(seconds for seconds, _ in first.values()) >= LONG
    times = {name: [seconds] if warm else [] for name, (seconds, _) in first.items()}
    del first
    end = start + max(budget, AGAIN) if warm else time.perf_counter() + budget
    names = list(ways)
    while (done := len(times[names[0]])) == 0 or (done < rounds and time.perf_counter() < end):
        # There and back: none is always the one that finds the caches as the same other one left them.
        for name in names if done % 2 == 0 else names[::-1]:
            times[name].append(ways[name]()[0])
    return Result(times, errors, tolerance)


def check(first: dict[str, tuple[float, Any]], tolerance: float) -> dict[str, float]:
    """How far every way is from the first; an AssertionError if it is too far."""
    want = next(iter(first.values()))[1].float()
    errors = {}
    for name, (_, got) in first.items():
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
        errors[name] = float((got.float() - want).abs().max() / want.abs().max())
        allowed = f"{tolerance:.0e} allowed in {got.dtype}"
        assert errors[name] <= tolerance, f"{name}: off by {errors[name]:.1e} of the largest number, {allowed}"
    return errors


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------------
# one sliding layer


def layer_config(shape: Shape) -> Gemma3TextConfig:
    """A model of one sliding layer; nobody builds it, but caches and masks are made from it."""
    return Gemma3TextConfig(
        hidden_size=shape.heads * shape.dim,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        sliding_window=shape.window,
        attn_implementation="sdpa",
    )


def random_rows(shape: Shape, tokens: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, ``[1, heads, tokens, dim]``, strided as a projection leaves them."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, tokens, heads, shape.dim, generator=generator).to(dtype).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return query, key, value


def stock_mask(shape: Shape, tokens: int, dtype: torch.dtype, layer: Any = None) -> Tensor | None:
    """The mask that transformers hands to a sliding layer, made once a forward for all layers: never timed here."""
    cache = None if layer is None else Cache(layers=[layer])
    stub = torch.empty(1, tokens, 0, dtype=dtype)
    masks = create_masks_for_generate(layer_config(shape), stub, None, **{CACHE_NAME: cache})
    return masks["sliding_attention"]


def stock_attention(shape: Shape) -> Callable[..., Tensor]:
    """transformers' own SDPA path, as a sliding layer calls it."""
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=shape.dim**-0.5)[0]

    return attend


def layer_prefill(options: Options) -> Iterator[Row]:
    """The attention of one sliding layer over a whole prompt. Masks are made before the clock starts, on both sides."""
    sizes = options.sizes
    for shape, dtype, tokens in product(sizes.layer_prefill, TOLERANCES, sizes.layer_lengths):
        about = {"model": "one sliding layer", "setting": str(shape), "tokens": tokens, "dtype": name_of(dtype)}
        result = compare(prefill_layer_ways(shape, tokens, dtype), dtype, options)
        yield result.row("sdpa", "swapatch", case="layer-prefill", **about)


def prefill_layer_ways(shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, Way]:
    rows = random_rows(shape, tokens, dtype)
    mask, stock = stock_mask(shape, tokens, dtype), stock_attention(shape)
    queries = Span(0, tokens)
    ours = Step(swapatch.CompactCache(layer_config(shape)), CausalWindow(shape.window), queries, BACKENDS["windowed"])
    ours.rectangles(rows[0])
    return {
        "sdpa": lambda: timed(lambda: stock(*rows, mask)),
        "swapatch": lambda: timed(lambda: ours.attend(*rows, shape.dim**-0.5)),
    }


def blocks(options: Options) -> Iterator[Row]:
    """The same with other numbers of queries in a block; the ratio is over the block that swapatch takes."""
    sizes, tokens = options.sizes, options.sizes.layer_lengths[-2]
    for shape, dtype in product(sizes.layer_prefill, TOLERANCES):
        about = {"case": "blocks", "model": "one sliding layer", "tokens": tokens, "dtype": name_of(dtype)}
        ways = {}
        for size in (PREFILL_BLOCK, *(size for size in sizes.blocks if size != PREFILL_BLOCK)):
            with mock.patch.object(step, "PREFILL_BLOCK", size):
                ways[f"block of {size}"] = prefill_layer_ways(shape, tokens, dtype)["swapatch"]
        result = compare(ways, dtype, options)
        for name in list(ways)[1:]:
            yield result.row(name, f"block of {PREFILL_BLOCK}", setting=str(shape), **about)


@dataclass
class StockLayer:
    """Decode steps of one sliding layer as transformers does them: write, attend."""

    shape: Shape
    layer: Any
    steps: int
    window: int | None = None  # for a layer that knows of none: the mask hides what is older
    seen: int = 0

    def __call__(self) -> tuple[float, Tensor]:
        seconds, outs = 0.0, []
        attend = stock_attention(self.shape)
        for query, key, value in next_tokens(self):
            mask = self._mask(query.dtype)
            start = time.perf_counter()
            keys, values = self.layer.update(key, value)
            out = attend(query, keys, values, mask)
            seconds += time.perf_counter() - start
            outs.append(out)
        return seconds / self.steps, torch.cat(outs)

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        if self.window is None:
            return stock_mask(self.shape, 1, dtype, self.layer)
        last = self.seen - 1  # the token was counted when it was drawn
        rows = torch.arange(self.layer.max_cache_len)
        return ((rows <= last) & (rows > last - self.window)).view(1, 1, 1, -1)

    def fill(self, key: Tensor, value: Tensor) -> StockLayer:
        self.layer.update(key, value)
        self.seen = key.shape[2]
        return self


@dataclass
class CompactLayer:
    """The same as swapatch does it. What a step makes once for all layers is not timed; a roll is a layer's own."""

    shape: Shape
    cache: swapatch.CompactCache
    steps: int
    kind: type[DecodeStep] = DecodeStep
    seen: int = 0

    def __call__(self) -> tuple[float, Tensor]:
        seconds, outs, layer = 0.0, [], self.cache.sliding[0]
        for query, key, value in next_tokens(self):
            start = time.perf_counter()
            layer.make_room(1)
            seconds += time.perf_counter() - start
            step = self._step(query)
            start = time.perf_counter()
            out = step.attend(query, *step.write(0, key, value), self.shape.dim**-0.5)
            seconds += time.perf_counter() - start
            step.commit()
            outs.append(out)
        return seconds / self.steps, torch.cat(outs)

    def _step(self, query: Tensor) -> DecodeStep:
        rule, queries = CausalWindow(self.shape.window), Span(self.seen - 1, self.seen)
        step = self.kind(self.cache, rule, queries, BACKENDS["windowed"])
        if self.kind is DecodeStep:
            step.rectangles(query)
        return step

    def fill(self, key: Tensor, value: Tensor) -> CompactLayer:
        self.cache.layers[0].update(key, value)
        self.seen = key.shape[2]
        return self


def next_tokens(way: StockLayer | CompactLayer) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of one token at a time; the same for all ways at the same position."""
    held = (way.layer if isinstance(way, StockLayer) else way.cache.layers[0]).keys
    for _ in range(way.steps):
        rows = random_rows(way.shape, 1, held.dtype, seed=way.seen)
        way.seen += 1
        yield rows


def layer_decode(options: Options) -> Iterator[Row]:
    """One sliding layer's decode step, write and attend, over full windows; then against a cache without a window."""
    sizes = options.sizes
    for shape, dtype in product(sizes.layer_decode, TOLERANCES):
        about = {"case": "layer-decode", "model": "one sliding layer", "dtype": name_of(dtype)}
        about.update(setting=str(shape), tokens=sizes.layer_context)
        ways = decode_layer_ways(shape, dtype, options)
        result = compare(ways, dtype, options)
        for stock, patched in product(("dynamic", "static"), ("anchored", "ring")):
            yield result.row(stock, patched, **about)
    shape = sizes.layer_decode[-1]
    for dtype in TOLERANCES:
        about = {"case": "layer-decode", "model": "one sliding layer", "dtype": name_of(dtype)}
        about.update(setting=f"{shape}, against a full cache", tokens=sizes.full_rows)
        result = compare(full_layer_ways(shape, dtype, options), dtype, options)
        for patched in ("anchored, whole buffer", "anchored"):
            yield result.row(f"{sizes.full_rows} rows, masked", patched, **about)


def decode_layer_ways(shape: Shape, dtype: torch.dtype, options: Options) -> dict[str, Way]:
    config, steps, context = layer_config(shape), options.sizes.layer_steps, options.sizes.layer_context
    _, key, value = random_rows(shape, context, dtype, seed=10**6)
    room = context + steps * (options.rounds + 2)
    return {
        "dynamic": StockLayer(shape, DynamicSlidingWindowLayer(shape.window), steps).fill(key, value),
        "static": StockLayer(shape, StaticSlidingWindowLayer(room, shape.window), steps).fill(key, value),
        "anchored": CompactLayer(shape, swapatch.CompactCache(config), steps).fill(key, value),
        "ring": CompactLayer(shape, swapatch.CompactCache(config, layout="ring"), steps).fill(key, value),
    }


def full_layer_ways(shape: Shape, dtype: torch.dtype, options: Options) -> dict[str, Way]:
    """A cache of full length, masked to the window, against the bounded buffer, attended whole or as far as filled."""
    config, steps, rows = layer_config(shape), options.sizes.layer_steps, options.sizes.full_rows
    _, key, value = random_rows(shape, rows - steps * (options.rounds + 2), dtype, seed=10**6)
    fixed = swapatch.CompactCache(config, max_cache_len=rows)
    return {
        f"{rows} rows, masked": StockLayer(shape, StaticLayer(rows), steps, window=shape.window).fill(key, value),
        "anchored, whole buffer": CompactLayer(shape, fixed, steps, kind=FixedStep).fill(key, value),
        "anchored": CompactLayer(shape, swapatch.CompactCache(config), steps).fill(key, value),
    }


# ---------------------------------------------------------------------------------------------------------------------
# a whole model


@dataclass
class Subject:
    """A model, and a prompt of any length for it."""

    name: str
    model: Any
    text: list[int]

    def prompt(self, tokens: int) -> Tensor:
        repeated = self.text * -(-tokens // len(self.text))
        return torch.tensor([repeated[:tokens]])


@once
def subject(quick: bool, dtype: torch.dtype) -> Subject:
    """The real checkpoint with a real text, over and over; a toy with random tokens when it must be quick."""
    if quick:
        torch.manual_seed(0)
        model = random_model(TOY, dtype)
        return Subject("random toy", model, torch.randint(3, TOY["vocab_size"], (300,)).tolist())
    path = checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    text = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")
    return Subject("Gemma 3 270M", model, AutoTokenizer.from_pretrained(path)(text).input_ids)


def random_model(config: dict[str, int], dtype: torch.dtype) -> Any:
    made = Gemma3ForCausalLM(Gemma3TextConfig(**config, pad_token_id=0, eos_token_id=1, attn_implementation="sdpa"))
    return made.to(dtype).eval()


def random_gemma4(config: dict[str, int], dtype: torch.dtype) -> Any:
    """With per-layer embeddings, and a second half of its layers that shares the first one's keys and values."""
    half = ["sliding_attention", "sliding_attention", "full_attention"]
    shared = {"layer_types": half * 2, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    made = Gemma4ForCausalLM(Gemma4TextConfig(**config, **shared, pad_token_id=0, eos_token_id=1))
    return made.to(dtype).eval()


def random_name(config: Any) -> str:
    family = "Gemma 4 with PLE and sharing" if config.model_type == "gemma4_text" else "Gemma 3"
    layers = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, W={config.sliding_window}"
    return f"random {family}, {layers}"


def patched_if(wanted: bool, model: Any) -> AbstractContextManager[Any]:
    return swapatch.patch(model) if wanted else nullcontext()


def prefill(options: Options) -> Iterator[Row]:
    """A whole prefill, from the tokens to the logits of the last one."""
    sizes = options.sizes
    for dtype, lengths in sizes.prefill.items():
        model = subject(options.quick, dtype)
        for tokens in lengths:
            about = {"case": "prefill", "model": model.name, "tokens": tokens, "dtype": name_of(dtype)}
            result = compare(prefill_ways(model, tokens, sizes), dtype, options)
            for stock in [name for name in result.seconds if name.startswith("stock")]:
                yield result.row(stock, "swapatch", setting="one-shot", **about)
            if "swapatch, chunked" in result.seconds:
                chunked = f"prefill_chunk_size={sizes.chunk}"
                yield result.row("stock sdpa, chunked", "swapatch, chunked", setting=chunked, **about)
            if tokens == sizes.flex_at and dtype == torch.bfloat16:
                yield from flex(model, tokens, dtype, options)


def prefill_ways(model: Subject, tokens: int, sizes: Sizes) -> dict[str, Way]:
    ids = model.prompt(tokens)
    ways = {
        "stock sdpa": prefill_way(model.model, ids),
        "swapatch": prefill_way(model.model, ids, patched=True),
    }
    if tokens <= sizes.eager_to:
        ways["stock eager"] = prefill_way(model.model, ids, attention="eager")
    if sizes.chunk < tokens <= sizes.chunk_to:
        ways["stock sdpa, chunked"] = prefill_way(model.model, ids, chunk=sizes.chunk)
        ways["swapatch, chunked"] = prefill_way(model.model, ids, chunk=sizes.chunk, patched=True)
    return ways


def prefill_way(
    model: Any, ids: Tensor, *, patched: bool = False, attention: str = "sdpa", chunk: int | None = None
) -> Way:
    """The logits of the last token; in chunks it is `generate` that cuts them."""

    def one_shot() -> Tensor:
        return model(ids, logits_to_keep=1).logits[:, -1]

    def in_chunks() -> Tensor:
        how = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        given = {"attention_mask": torch.ones_like(ids), "prefill_chunk_size": chunk}
        return model.generate(ids, **given, **how).logits[0]

    def run() -> tuple[float, Tensor]:
        with attending(model, attention), patched_if(patched, model):
            return timed(one_shot if chunk is None else in_chunks)

    return run


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """The model with this attention implementation."""
    before = model.config._attn_implementation
    if before != implementation:
        model.set_attn_implementation(implementation)
    yield
    if before != implementation:
        model.set_attn_implementation(before)


def flex(model: Subject, tokens: int, dtype: torch.dtype, options: Options) -> Iterator[Row]:
    """Flex attention is compiled at its first call, which does not succeed everywhere."""
    about = {"case": "prefill", "model": model.name, "setting": "one-shot", "tokens": tokens, "dtype": name_of(dtype)}
    ids = model.prompt(tokens)
    ways = {
        "stock flex": prefill_way(model.model, ids, attention="flex_attention"),
        "swapatch": prefill_way(model.model, ids, patched=True),
    }
    try:
        ways["stock flex"]()
        yield compare(ways, dtype, options).row("stock flex", "swapatch", **about)
    except Exception as error:  # whatever a compiler finds to say
        model.model.set_attn_implementation("sdpa")
        yield Row(unit="s", stock="stock flex", note=f"does not run here: {one_line(error)}", **about)


PARTS = {"sliding attention": "sliding_attention", "global attention": "full_attention"}


def parts(options: Options) -> Iterator[Row]:
    """What the time of a long prefill goes into: clocks before and after the modules, projections included."""
    model, tokens = subject(options.quick, torch.bfloat16), options.sizes.parts
    ids, about = model.prompt(tokens), {"case": "parts", "model": model.name, "tokens": tokens, "dtype": "bfloat16"}
    found = {name: seconds_by_part(model.model, ids, name == "swapatch") for name in ("stock sdpa", "swapatch")}
    for part in found["swapatch"]:
        stock, ours = found["stock sdpa"][part], found["swapatch"][part]
        share = f"{ours / found['swapatch']['all']:.0%} of swapatch's time"
        own = {"stock": "stock sdpa", "stock_value": stock, "patched": "swapatch", "patched_value": ours}
        yield Row(setting=part, unit="s", **about, **own, ratio=stock / ours, note=share)


def seconds_by_part(model: Any, ids: Tensor, patched: bool) -> dict[str, float]:
    """Seconds in the attention of each kind of layer, in the MLPs, and in all; the rest is norms, head and masks."""
    spent: dict[str, float] = dict.fromkeys((*PARTS, "MLP"), 0.0)
    names = {kind: part for part, kind in PARTS.items()}

    def clock(module: Any, part: str) -> list[Any]:
        started: list[float] = []

        def stop(*_: Any) -> None:
            spent[part] += time.perf_counter() - started.pop()

        before = module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))
        return [before, module.register_forward_hook(stop)]

    hooked = []
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        hooked += clock(layer.self_attn, names[kind]) + clock(layer.mlp, "MLP")
    run = prefill_way(model, ids, patched=patched)
    run()
    spent.update(dict.fromkeys(spent, 0.0))
    whole, _ = run()
    for hook in hooked:
        hook.remove()
    return {**spent, "rest": whole - sum(spent.values()), "all": whole}


DECODE_PATIENCE = 3
"""A step of a whole model is nearly the same with and without swapatch: only many short rounds tell them apart."""

DECODE_PAIRS = (
    ("stock dynamic", "swapatch anchored"),
    ("stock dynamic", "swapatch ring"),
    ("stock static", "swapatch static"),
)
"""Who is compared with whom: the global layers are of the same kind, for swapatch leaves them to stock."""


def decode(options: Options) -> Iterator[Row]:
    """A whole decode step, over caches that hold random rows: how long it takes does not depend on what is in them."""
    dtype = torch.bfloat16
    for name, model, cases in decode_models(dtype, options):
        precise = deepcopy(model).float()
        for context, batch in cases:
            about = {"case": "decode", "model": name, "tokens": context, "dtype": name_of(dtype)}
            # First in float32, untimed: bfloat16 on rows that no model ever made says little about being equal.
            ways = decode_ways(precise, context, batch, torch.float32, options)
            check({name: way() for name, way in ways.items()}, TOLERANCES[torch.float32])
            ways = decode_ways(model, context, batch, dtype, options)
            result = compare(ways, dtype, options, ROUNDING, patience=DECODE_PATIENCE)
            for stock, patched in DECODE_PAIRS:
                yield result.row(stock, patched, setting=one_step(batch), **about)
            if batch == 1:
                yield mask_work(name, model, context, dtype, options)


def one_step(batch: int) -> str:
    return "one step" if batch == 1 else f"one step, batch {batch}"


def decode_models(dtype: torch.dtype, options: Options) -> Iterator[tuple[str, Any, list[tuple[int, int]]]]:
    """A name, the model, and the contexts and batches to measure it at."""
    sizes, model = options.sizes, subject(options.quick, dtype)
    yield model.name, model.model, [(context, 1) for context in sizes.contexts]
    torch.manual_seed(0)
    few = [(context, 1) for context in sizes.few_contexts]
    for make, config, more in (
        (random_model, sizes.gemma3, [(sizes.batch_context, sizes.batch)]),
        (random_gemma4, sizes.gemma4, []),
        (random_model, sizes.python, []),
    ):
        other = make(config, dtype)
        yield random_name(other.config), other, few + more


def decode_ways(model: Any, context: int, batch: int, dtype: torch.dtype, options: Options) -> dict[str, Way]:
    config, steps = model.config, options.sizes.decode_steps
    room = room_for(context, options)
    caches = {
        "stock dynamic": DynamicCache(config=config),
        "stock static": StaticCache(config, room),
        "swapatch anchored": swapatch.CompactCache(config),
        "swapatch ring": swapatch.CompactCache(config, layout="ring"),
        "swapatch static": swapatch.CompactCache(config, max_cache_len=room),
    }
    for cache in caches.values():
        fill(cache, config, context, dtype, batch)
    return {name: decode_way(model, cache, steps, "swapatch" in name, batch) for name, cache in caches.items()}


def room_for(context: int, options: Options) -> int:
    """Tokens of a static cache for all steps of a way, the untimed ones and the calls before the rounds included."""
    return context + (options.sizes.decode_steps + 1) * (DECODE_PATIENCE * options.rounds + 4)


def fill(cache: Any, config: Any, tokens: int, dtype: torch.dtype, batch: int = 1) -> None:
    """Random rows in every layer of a cache that has its own, the same for every cache and every sequence.

    All values share a part: the mean of unrelated ones is almost nothing, and the norm after it would blow up rounding.
    """
    for planned in plan_model(config).layers:
        if not planned.shared:
            _, key, value = random_rows(Shape(0, 1, *kv_shape(config, planned.index)), tokens, dtype)
            rows = (states.expand(batch, -1, -1, -1) for states in (key, value + value[:, :, :1]))
            cache.layers[planned.index].update(*rows)


def decode_way(model: Any, cache: Any, steps: int, patched: bool, batch: int = 1) -> Way:
    """Some steps, after one that is not timed: the first on a model that was just patched, or just put back."""
    token = torch.full((batch, 1), 5)

    def some_steps(number: int) -> Tensor:
        for _ in range(number):
            logits = model(token, **{CACHE_NAME: cache}).logits[:, -1]
        return logits

    def run() -> tuple[float, Tensor]:
        with patched_if(patched, model):
            some_steps(1)
            seconds, logits = timed(lambda: some_steps(steps))
        return seconds / steps, logits

    return run


def mask_work(name: str, model: Any, context: int, dtype: torch.dtype, options: Options) -> Row:
    """The part of a step that goes into masks, indices and rolls, which all sliding layers share."""
    cache = swapatch.CompactCache(model.config)
    fill(cache, model.config, context, dtype)
    spent, begin = [], hooks.begin

    def clocked(*args: Any) -> Any:
        seconds, masks = timed(lambda: begin(*args))
        spent.append(seconds)
        return masks

    way = decode_way(model, cache, 1, patched=True)
    way()
    with mock.patch.object(hooks, "begin", clocked):
        shares = []
        for _ in range(options.rounds):
            seconds, _ = way()
            shares.append(spent[-1] / seconds)
    about = {"model": name, "tokens": context, "dtype": name_of(dtype), "rounds": len(shares)}
    return Row(
        case="decode",
        setting="beginning a step: both masks, write index, roll; part of the step's time",
        unit="fraction",
        patched="swapatch anchored",
        patched_value=statistics.median(shares),
        note=f"median {statistics.median(spent) * 1e6:.0f} us",
        **about,
    )


# ---------------------------------------------------------------------------------------------------------------------
# memory


def memory(options: Options) -> Iterator[Row]:
    """Peak resident memory of a one-shot prefill above what is resident before it, in a process of its own each."""
    lengths = dict(options.sizes.memory)
    if options.long:
        lengths["stock"] = lengths["swapatch"]
    peaks = {
        (name, tokens): peak_in_child(name, tokens, options)
        for tokens in lengths["swapatch"]
        for name in ("stock", "swapatch")
        if tokens in lengths[name]
    }
    for tokens in lengths["swapatch"]:
        stock, patched = peaks.get(("stock", tokens)), peaks["swapatch", tokens]
        yield Row(
            case="memory",
            model="random toy" if options.quick else "Gemma 3 270M",
            setting="one-shot prefill, peak above the weights",
            tokens=tokens,
            dtype="bfloat16",
            unit="MiB",
            stock="stock sdpa" if stock is not None else "",
            stock_value=stock,
            patched="swapatch",
            patched_value=patched,
            ratio=stock / patched if stock is not None and patched else None,
            note="" if stock is not None else "stock takes minutes: --long",
        )


def peak_in_child(name: str, tokens: int, options: Options) -> float:
    command = [sys.executable, __file__, "--child", name, str(tokens), "--threads", str(options.threads)]
    done = subprocess.run(command + ["--quick"] * options.quick, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def peak_memory(name: str, tokens: int, options: Options) -> float:
    """MiB; what the child does."""
    model = subject(options.quick, torch.bfloat16)
    with patched_if(name == "swapatch", model.model), torch.no_grad():
        # Weights are mapped from their file and only resident once they were read; so are torch's kernels.
        model.model(model.prompt(16), logits_to_keep=1)
        ids = model.prompt(tokens)
        before = start_of_peak()
        output = model.model(ids, logits_to_keep=1)
        peak = resident_peak()
    del output
    return (peak - before) / 2**20


def start_of_peak() -> int:
    """Bytes resident now; from here on counts :func:`resident_peak`, where the system can begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")
    except OSError:
        return resident_peak()


def resident_peak() -> int:
    try:
        return resident("VmHWM")
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ---------------------------------------------------------------------------------------------------------------------
# compiled


def compiled(options: Options) -> Iterator[Row]:
    """A decode step under torch.compile, static global layers on both sides."""
    dtype, sizes = torch.float32, options.sizes
    torch.manual_seed(0)
    stock = random_model(sizes.gemma3, dtype)
    patched = deepcopy(stock)
    swapatch.patch(patched)
    about = {"case": "compiled", "model": random_name(stock.config), "dtype": name_of(dtype)}
    for batch in (1, sizes.batch):
        about.update(setting=one_step(batch), tokens=sizes.compiled_tokens)
        try:
            result = compare(
                compiled_ways(stock, patched, batch, dtype, options), dtype, options, patience=DECODE_PATIENCE
            )
        except Exception as error:  # whatever a compiler finds to say
            yield Row(unit="s", stock="stock static, compiled", note=f"does not run here: {one_line(error)}", **about)
            continue
        for name in ("swapatch anchored, compiled", "swapatch ring, compiled"):
            yield result.row("stock static, compiled", name, **about)


def compiled_ways(stock: Any, patched: Any, batch: int, dtype: torch.dtype, options: Options) -> dict[str, Way]:
    torch._dynamo.reset()  # else a second batch would compile for any
    config, tokens, steps = stock.config, options.sizes.compiled_tokens, options.sizes.decode_steps
    room = room_for(tokens, options)
    caches = {
        "stock static, compiled": (stock, StaticCache(config, room)),
        "swapatch anchored, compiled": (patched, swapatch.CompactCache(config, max_cache_len=room)),
        "swapatch ring, compiled": (patched, swapatch.CompactCache(config, max_cache_len=room, layout="ring")),
    }
    ways = {}
    for name, (model, cache) in caches.items():
        fill(cache, config, tokens, dtype, batch)
        ways[name] = decode_way(torch.compile(model), cache, steps, patched=False, batch=batch)
        ways[name]()  # compiles
    return ways


# ---------------------------------------------------------------------------------------------------------------------
# startup and roofline


GEMMA3 = "transformers.models.gemma3.modeling_gemma3"
IMPORTED = {
    "transformers and its Gemma 3": GEMMA3,
    "transformers and its Gemma 3 and 4": ", ".join(
        [GEMMA3, *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma4", "gemma4_unified"))]
    ),
}
"""What is there before ``import swapatch``: transformers alone imports no model, and not even torch."""


def startup(options: Options) -> Iterator[Row]:
    """How long ``patch`` and ``import swapatch`` take."""
    about = {"case": "startup", "tokens": None, "unit": "s", "rounds": 5, "patched": "swapatch"}
    layers = options.sizes.patch_layers
    model = random_model({**TOY, "num_hidden_layers": layers}, torch.float32)
    about["patched_value"] = statistics.median(patch_and_undo(model) for _ in range(5))
    yield Row(model=f"random toy, {layers} layers", setting="patch(model)", dtype="float32", **about)
    for said, loaded in IMPORTED.items():
        about["patched_value"] = statistics.median(import_time(loaded) for _ in range(3))
        about["rounds"] = 3
        yield Row(model="", setting=f"import swapatch, after {said}", dtype="", **about)


def patch_and_undo(model: Any) -> float:
    seconds, handle = timed(lambda: swapatch.patch(model))
    handle.undo()
    return seconds


def import_time(loaded: str) -> float:
    code = f"import time, {loaded}; start = time.perf_counter(); import swapatch; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


def roofline(options: Options) -> Iterator[Row]:
    """What the machine could do at best, and how near a prefill and a decode step come to it."""
    dtype, sizes = torch.bfloat16, options.sizes
    bandwidth, flops = best_bandwidth(sizes.copy_bytes), best_flops(sizes.matmul, dtype)
    machine = {"case": "roofline", "model": "this machine", "tokens": None, "stock": "torch"}
    yield Row(setting="memory, copy or sum", dtype="float32", unit="GB/s", stock_value=bandwidth / 1e9, **machine)
    yield Row(setting="matrix product", dtype=name_of(dtype), unit="GFLOP/s", stock_value=flops / 1e9, **machine)
    model, tokens = subject(options.quick, dtype), sizes.roofline
    ids, config = model.prompt(tokens), model.model.config
    wanted = {
        "prefill": (prefill_flops(model.model, tokens) / flops, prefill_way, {"ids": ids}),
        "decode": (decode_bytes(model.model, tokens) / bandwidth, decode_way, {}),
    }
    for what, (least, maker, given) in wanted.items():
        for name in ("stock", "swapatch"):
            extra = given or {"cache": filled(name, config, tokens, dtype), "steps": 4 * sizes.decode_steps}
            way = maker(model.model, **extra, patched=name == "swapatch")
            seconds = statistics.median(way()[0] for _ in range(3))
            yield roofline_row(what, name, seconds, least, model.name, tokens, name_of(dtype))


def roofline_row(what: str, name: str, seconds: float, least: float, model: str, tokens: int, dtype: str) -> Row:
    unit = {"prefill": "FLOPs", "decode": "bytes"}[what]
    own = ("stock", "stock_value") if name == "stock" else ("patched", "patched_value")
    return Row(
        case="roofline",
        model=model,
        setting=f"{what}: time that the {unit} need at best, as a part of the time taken",
        tokens=tokens,
        dtype=dtype,
        unit="fraction",
        rounds=3,
        note=f"{least * 1e3:.2f} ms at best, {seconds * 1e3:.2f} ms taken",
        **dict(zip(own, (name, least / seconds), strict=True)),
    )


def filled(name: str, config: Any, tokens: int, dtype: torch.dtype) -> Any:
    cache = DynamicCache(config=config) if name == "stock" else swapatch.CompactCache(config)
    fill(cache, config, tokens, dtype)
    return cache


def keys_seen(config: Any, tokens: int) -> list[int]:
    """By layer, keys that the last of so many tokens sees."""
    window = {"sliding_attention": config.sliding_window}
    return [min(tokens, window.get(kind, tokens)) for kind in config.layer_types]


def decode_bytes(model: Any, tokens: int) -> int:
    """All weights once (the head is the embedding, of which a step otherwise reads one row), and all visible rows."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    row = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return weights + row * sum(keys_seen(config, tokens))


def prefill_flops(model: Any, tokens: int) -> int:
    """Two a weight and token, four a head, dimension and visible pair; the head only for the last token."""
    config = model.config
    embedding = model.get_input_embeddings().weight.numel()
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - embedding
    pairs = sum(keys * (keys + 1) // 2 + (tokens - keys) * keys for keys in keys_seen(config, tokens))
    return 2 * (matrices * tokens + embedding) + 4 * config.num_attention_heads * config.head_dim * pairs


def best_bandwidth(size: int) -> float:
    """Bytes a second, of the better of copying and summing up; both are limited by memory alone."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    copied = min(timed(lambda: target.copy_(source))[0] for _ in range(5))
    summed = min(timed(source.sum)[0] for _ in range(5))
    return max(2 * size / copied, size / summed)


def best_flops(size: int, dtype: torch.dtype) -> float:
    one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(timed(lambda: one @ other)[0] for _ in range(5))


# ---------------------------------------------------------------------------------------------------------------------
# running and writing

CASES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "layer-prefill": layer_prefill,
    "blocks": blocks,
    "layer-decode": layer_decode,
    "prefill": prefill,
    "parts": parts,
    "decode": decode,
    "memory": memory,
    "compiled": compiled,
    "startup": startup,
    "roofline": roofline,
}


def run(names: list[str], options: Options, out: Path) -> list[Row]:
    """These cases; what is done is written after each of them, so that a run cut short leaves something."""
    rows: list[Row] = []
    with progress(len(names)) as show, torch.no_grad():
        for number, name in enumerate(names):
            show(number, name, None)
            for row in CASES[name](options):
                rows.append(row)
                show(number, name, row)
            write(rows, names[: number + 1], out)
        show(len(names), "done", None)
    return rows


def write(rows: list[Row], names: list[str], out: Path) -> None:
    """Rows of other cases that an earlier run left there stay; every row says what it was measured with."""
    out.mkdir(parents=True, exist_ok=True)
    new = [asdict(row) for row in rows]
    kept = [row for row in earlier(out / "bench.json") if row["case"] not in names]
    order = list(CASES)
    found = sorted(kept + new, key=lambda row: order.index(row["case"]))
    document = {"schema": SCHEMA, "environment": environment(), "rows": found}
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (out / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Row)])
        table.writeheader()
        table.writerows(found)


def earlier(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["rows"] if document.get("schema") == SCHEMA else []


def environment() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "swapatch": swapatch.__version__,
        "system": platform.system(),
    }


@once
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, str, Row | None], None]]:
    """Rows as they come, with a bar below them where there is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield lambda number, name, row: print(f"{name:<14} {line(row) if row else '...'}", flush=True)
        return
    console = Console(soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def show(number: int, name: str, row: Row | None) -> None:
            bar.update(task, completed=number, description=name)
            if row is not None or not console.is_terminal:
                console.print(f"{name:<14} {line(row) if row else '...'}", markup=False)

        yield show


def line(row: Row) -> str:
    about = ", ".join(str(part) for part in (row.setting, row.tokens and f"{row.tokens:,} tokens", row.dtype) if part)
    sides = [
        f"{name} {amount(value, row.unit)}"
        for name, value in ((row.stock, row.stock_value), (row.patched, row.patched_value))
        if value is not None
    ]
    ratio = f"ratio {row.ratio:.2f} ({row.rounds} rounds)" if row.ratio is not None else ""
    return " | ".join(part for part in (about, *sides, ratio, row.note) if part)


def amount(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"
    return f"{value:.1%}" if unit == "fraction" else f"{value:,.1f} {unit}"


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Measure stock transformers and swapatch in turn.")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=CASES, help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes and models: quick, and figures of no meaning")
    parser.add_argument(
        "--long", action="store_true", help="also what takes minutes: stock's memory at the longest prompt"
    )
    parser.add_argument("--rounds", metavar="N", type=int, default=Options.rounds, help="at most; default: %(default)s")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads for torch; default: torch's choice")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="default: bench-results, or bench-results/quick")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--rounds and --threads take numbers from 1")
    return options


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    options = Options(QUICK if given.quick else FULL, given.quick, given.long, given.rounds)
    if given.child:
        name, tokens = given.child
        print(peak_memory(name, int(tokens), options))
        return
    out = given.out or Path("bench-results", *["quick"] * given.quick)
    start = time.perf_counter()
    run(given.only or list(CASES), options, out)
    print(f"{out / 'bench.json'} and bench.csv, after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
