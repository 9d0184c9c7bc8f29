"""All ways there are to run the same model: stock's attentions, compiled or not, swapatch's, and llama.cpp's."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from checkpoint import import_gguf_package
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

import swapatch
from swapatch._compat import CACHE_NAME

from . import llamacpp
from .checks import TOLERANCES
from .decode import DECODE_PATIENCE, decode_way
from .device import device_of
from .models import Subject, subject
from .rows import Row, failed, name_of
from .sizes import Options
from .timing import Result, Way, compare

SETTLING = 5
"""Rounds after which ways that are still compiled anew are measured as they are."""

OURS = "swapatch"
"""What the others are compared with."""


def whole(model: Any, mode: str | None = None) -> Any:
    return torch.compile(model, mode=mode)


def by_layer(model: Any, mode: str | None = None) -> Any:
    """Each decoder layer by itself. The layers share their code, and each graph counts against the limit for it."""
    for layer in model.model.layers:
        layer.compile(mode=mode)
    return model


@dataclass(frozen=True)
class Peer:
    """One way to run a model."""

    attention: str = "sdpa"
    patched: bool = False
    compile: Callable[[Any, str | None], Any] | None = None

    def of(self, model: Any, mode: str | None = None) -> Any:
        """A model of its own, so that nothing is changed between two calls, but with the same weights in memory."""
        weights = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        twin = deepcopy(model, weights)
        twin.set_attn_implementation(self.attention)
        if self.patched:
            swapatch.patch(twin)
        return self.compile(twin, mode) if self.compile else twin


PREFILLS = {
    "stock sdpa": Peer(),
    "stock eager": Peer("eager"),
    "stock flex": Peer("flex_attention"),  # transformers compiles the attention itself
    "stock flash": Peer("flash_attention_2"),
    "stock sdpa, compiled": Peer(compile=whole),
    "stock flex, compiled": Peer("flex_attention", compile=whole),
    OURS: Peer(patched=True),
    "swapatch, compiled": Peer(patched=True, compile=whole),
    "swapatch, layers compiled": Peer(patched=True, compile=by_layer),
}

DECODES = {
    "stock sdpa": Peer(),
    "stock sdpa, compiled": Peer(compile=whole),
    OURS: Peer(patched=True),
    "swapatch, compiled": Peer(patched=True, compile=whole),
}


def peers(options: Options) -> Iterator[Row]:
    """A prefill of each length, and a decode step after one of them."""
    # Past its limit torch would run the rest uncompiled, and only log it.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield from all_peers(options)


def all_peers(options: Options) -> Iterator[Row]:
    for dtype, lengths in options.sizes.peers.items():
        model = subject(options.quick, dtype, options.device.name)
        about = {"case": "peers", "model": model.name, "dtype": name_of(dtype)}
        for tokens in lengths:
            prefill = {"setting": "prefill", "tokens": tokens, **about}
            wanted = {name: peer for name, peer in PREFILLS.items() if is_measured(peer, tokens, options)}
            ways = partial(prefill_way, model, tokens)
            result = yield from compared(wanted, ways, dtype, options, prefill)
            yield from llama_cpp("prompt", model, result, options, prefill)
        if options.sizes.peers_context not in lengths:
            continue
        decode = {"setting": "one step", "tokens": options.sizes.peers_context, **about}
        ways = partial(step_way, model, options)
        result = yield from compared(DECODES, ways, dtype, options, decode, DECODE_PATIENCE)
        yield from llama_cpp("token", model, result, options, decode)


def is_measured(peer: Peer, tokens: int, options: Options) -> bool:
    if peer.compile and tokens not in options.sizes.peers_compiled:
        return False
    if peer.attention == "eager" and tokens > options.sizes.eager_to:
        return False
    return peer.attention in options.device.attentions


def prefill_way(model: Subject, tokens: int, peer: Peer) -> Way:
    call, ids = peer.of(model.model), model.prompt(tokens)
    return lambda: device_of(model.model).timed(lambda: call(ids, logits_to_keep=1).logits[:, -1])


def step_way(model: Subject, options: Options, peer: Peer) -> Way:
    """After a prompt, which swapatch reads for all of them. Compiled ones have caches of a fixed size."""
    ids, steps = model.prompt(options.sizes.peers_context), options.sizes.peers_steps
    room = ids.shape[1] + (steps + 1) * (DECODE_PATIENCE * options.rounds + SETTLING + 2)
    cache = new_cache(model.model.config, peer, room)
    Peer(patched=True).of(model.model)(ids, logits_to_keep=1, **{CACHE_NAME: cache})
    return decode_way(peer.of(model.model, options.device.graph_mode), cache, steps, patched=False)


def new_cache(config: Any, peer: Peer, room: int) -> Any:
    if peer.patched:
        return swapatch.CompactCache(config, max_cache_len=room if peer.compile else None)
    return StaticCache(config, room) if peer.compile else DynamicCache(config=config)


def compared(
    wanted: dict[str, Peer],
    way_of: Callable[[Peer], Way],
    dtype: torch.dtype,
    options: Options,
    about: dict[str, Any],
    patience: int = 1,
) -> Generator[Row, None, Result]:
    """A row for each way but ours: stock's against ours, and what else is ours against stock's first."""
    torch.compiler.reset()  # else another length would compile for any
    ways = {}
    for name, peer in wanted.items():
        try:
            way = way_of(peer)
            way()
            ways[name] = way
        except Exception as error:  # a compiler's, too little memory, something that is not installed
            yield failed(error, **{"stock" if name.startswith("stock") else "patched": name}, **about)
    settle(ways, {name for name in ways if wanted[name].compile})
    result = compare(ways, dtype, options, TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16]), patience)
    first, *_ = ways
    for name in ways:
        if name != OURS:
            yield result.row(*((name, OURS) if name.startswith("stock") else (first, name)), **about)
    return result


def settle(ways: dict[str, Way], compiled: set[str]) -> None:
    """Until nothing is compiled any more: a second call finds out what changes, and ways share functions of torch.

    All ways go on together, for those that decode must stay at the same position.
    """
    graphs = torch._dynamo.utils.counters["stats"]
    for _ in range(SETTLING if compiled else 0):
        before = graphs["unique_graphs"]
        for name in ways:
            ways[name]()
        if graphs["unique_graphs"] == before:
            return


def llama_cpp(what: str, model: Subject, result: Result, options: Options, about: dict[str, Any]) -> Iterator[Row]:
    """Other numbers, so only its time is compared; its weights are those that the checkpoint was made from."""
    if not model.real:
        return
    prompt = model.prompt(about["tokens"])[0].tolist()
    asked = {"threads": options.threads, "rounds": options.rounds, "seconds": options.sizes.seconds}
    try:
        with gguf_file() as gguf:
            found = llamacpp.measure(gguf=gguf, prompt=prompt, new=options.sizes.peers_steps, **asked)
    except Exception as error:  # it may not be installed, or not run here
        yield failed(error, stock="llama.cpp", **about)
        return
    theirs, ours = statistics.median(found[what]), statistics.median(result.seconds[OURS])
    yield Row(
        unit="s",
        stock="llama.cpp",
        stock_value=theirs,
        patched=OURS,
        patched_value=ours,
        ratio=theirs / ours,
        rounds=len(found[what]),
        note=f"weights in 4 to 8 bits (Q4_K_M); not in turn with the others; {found['about']}",
        **about,
    )


@contextmanager
def gguf_file() -> Iterator[str]:
    package = import_gguf_package()
    with TemporaryDirectory() as folder:
        yield str(package.assemble(Path(folder) / package.MODEL_NAME))
