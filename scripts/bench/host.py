"""A compiled decode step inside ``generate``, of a model so small that it is hardly more than the calls around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

import swapatch

from .models import random_model, random_name
from .rows import Row, failed, name_of
from .sizes import Options
from .timing import Way, compare

HOST_PATIENCE = 5
"""Microseconds are told apart by many short rounds alone."""

GRAPHS = {
    "stock static, compiled": (False, None),
    "swapatch static, compiled": (True, None),
    "swapatch static, compiled, dynamic=False": (True, False),
}
"""Whether patched, and ``dynamic`` of the compiler.

With ``dynamic=False`` stock has no row: its sliding layers count tokens in a number, so each step is another graph.
"""


def host(options: Options) -> Iterator[Row]:
    """Time for each token of ``generate`` with a static cache and one full graph; the tokens must be the same."""
    dtype, (prompt, new) = torch.float32, options.sizes.host_tokens
    torch.manual_seed(0)
    model = random_model(options.sizes.python, dtype)
    ids = torch.randint(3, model.config.vocab_size, (1, prompt))
    about = {"case": "host", "model": random_name(model.config), "tokens": prompt, "dtype": name_of(dtype)}
    about["setting"] = f"one step of generate, {new} new tokens"
    torch._dynamo.reset()
    ways = {}
    for name, (patched, dynamic) in GRAPHS.items():
        way = host_way(model, ids, new, patched, dynamic)
        try:
            way()  # compiles
            ways[name] = way
        except Exception as error:  # whatever a compiler finds to say
            yield failed(error, **{"patched" if patched else "stock": name}, **about)
    stock, *others = GRAPHS
    if stock in ways:
        result = compare(ways, dtype, options, tolerance=0.0, patience=HOST_PATIENCE)
        for name in others:
            if name in ways:
                yield result.row(stock, name, **about)


class Clock(BaseStreamer):
    """Notes when ``generate`` hands over the prompt, and each token after it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def seconds(self) -> float:
        """Of one decode step: the first token is the prefill's."""
        _, first, *_, last = self.times
        return (last - first) / (len(self.times) - 2)


def host_way(model: Any, ids: Tensor, new: int, patched: bool, dynamic: bool | None) -> Way:
    model = deepcopy(model)  # with a graph of its own
    if patched:
        swapatch.patch(model)
    # One config for all calls: with another one `generate` would compile anew.
    how = CompileConfig(fullgraph=True, dynamic=dynamic)
    how._compile_all_devices = True  # no argument of its constructor
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "compile_config": how}
    given.update(min_new_tokens=new, max_new_tokens=new, cache_implementation="static")

    def run() -> tuple[float, Tensor]:
        clock = Clock()
        tokens = model.generate(ids, streamer=clock, **given)
        assert hasattr(model, "_compiled_call"), "generate did not compile"
        return clock.seconds(), tokens

    return run
