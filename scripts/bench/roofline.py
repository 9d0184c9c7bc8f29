"""What the machine could do at best, and how near to it swapatch and stock come."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

import swapatch

from .decode import decode_way, fill
from .models import subject
from .prefill import prefill_way
from .rows import Row, name_of
from .sizes import Options
from .timing import timed


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
