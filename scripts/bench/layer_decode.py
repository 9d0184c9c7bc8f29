"""One sliding layer's decode step: write a row, attend the window."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

import swapatch
from swapatch.attention import KERNELS
from swapatch.families import family_of
from swapatch.geometry import Span
from swapatch.rules import Rule
from swapatch.step import FixedRowStep, LayerCall, RowStep

from .checks import TOLERANCES
from .layer import layer_config, random_rows, stock_attention, stock_mask
from .rows import Row, name_of
from .sizes import Options, Shape
from .timing import Way, compare


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
    kind: type[RowStep] = RowStep
    seen: int = 0

    def __call__(self) -> tuple[float, Tensor]:
        seconds, outs, layer = 0.0, [], self.cache.sliding[0]
        module = SimpleNamespace(layer_idx=0, scaling=self.shape.dim**-0.5)
        for query, key, value in next_tokens(self):
            start = time.perf_counter()
            layer.make_room(1)
            seconds += time.perf_counter() - start
            step, call = self._step(), LayerCall(module, query, (query, query), self.cache, None)
            start = time.perf_counter()
            out, _, _ = step.attend(call, query, key, value)
            seconds += time.perf_counter() - start
            outs.append(out)
        return seconds / self.steps, torch.cat(outs)

    def _step(self) -> RowStep:
        family, rule = family_of(layer_config(self.shape).model_type), Rule(self.shape.window)
        queries = Span(self.seen - 1, self.seen)  # the token was counted when it was drawn
        return self.kind(family, rule, queries, self.cache.sliding[0], KERNELS["windowed"])

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
        "anchored, whole buffer": CompactLayer(shape, fixed, steps, kind=FixedRowStep).fill(key, value),
        "anchored": CompactLayer(shape, swapatch.CompactCache(config), steps).fill(key, value),
    }
