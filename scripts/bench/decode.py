"""A whole decode step, over caches of any length."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

import swapatch
from swapatch import entry
from swapatch._compat import CACHE_NAME, kv_shape
from swapatch.families import plan_model

from .checks import ROUNDING, TOLERANCES, check
from .device import device_of
from .layer import random_rows
from .models import patched_if, random_gemma4, random_model, random_name, subject
from .rows import Row, name_of
from .sizes import Options, Shape
from .timing import Way, compare, timed

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
            check({name: way()[1] for name, way in ways.items()}, TOLERANCES[torch.float32])
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
    token = torch.full((batch, 1), 5, device=model.device)

    def some_steps(number: int) -> Tensor:
        for _ in range(number):
            logits = model(token, **{CACHE_NAME: cache}).logits[:, -1]
        return logits

    def run() -> tuple[float, Tensor]:
        with patched_if(patched, model):
            some_steps(1)
            seconds, logits = device_of(model).timed(lambda: some_steps(steps))
        return seconds / steps, logits.clone()  # a CUDA graph writes its next result to the same place

    return run


def mask_work(name: str, model: Any, context: int, dtype: torch.dtype, options: Options) -> Row:
    """The part of a step that goes into masks, indices and rolls, which all sliding layers share."""
    cache = swapatch.CompactCache(model.config)
    fill(cache, model.config, context, dtype)
    spent, begin = [], entry.begin_step

    def clocked(*args: Any, **named: Any) -> Any:
        seconds, masks = timed(lambda: begin(*args, **named))
        spent.append(seconds)
        return masks

    way = decode_way(model, cache, 1, patched=True)
    way()
    with mock.patch.object(entry, "begin_step", clocked):
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
