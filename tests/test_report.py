"""Rows and bytes: what is predicted from a config is what a cache then holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from compare import forced, storage_bytes
from zoo import BY_NAME, Model, Species, named_ids, text_config

import swapatch
from swapatch.layers import LAYOUTS
from swapatch.sizes import SIZES, LayerReport, Report

WINDOW, BATCH = 16, 2


def own(report: Report) -> list[LayerReport]:
    """The layers with keys and values: before transformers 5.23 a cache lists no others."""
    return [layer for layer in report.layers if layer.kind != "shared"]


def filled(model: Model, tokens: int, cache: Any = None) -> Any:
    """A cache that has seen so many tokens, the last two of them in steps."""
    ids = named_ids(model, BATCH, tokens)
    return forced(model, ids, prompt=max(1, tokens - 2), cache=cache).cache


@pytest.mark.parametrize("tokens", (1, 15, 16, 17, 70))
def test_stock_caches_are_as_predicted(species: Species, tokens: int) -> None:
    model = species.build(WINDOW)
    made: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: None,
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=tokens),
    }
    for layout, make in made.items():
        cache = filled(model, tokens, make())
        predicted = swapatch.report(model, tokens=tokens, batch=BATCH, dtype=torch.float32, layout=layout)
        assert own(predicted) == own(swapatch.report(cache)), layout
        assert predicted.total_bytes == storage_bytes(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", (1, 17, 150))
def test_compact_caches_are_as_predicted(species: Species, layout: str, tokens: int) -> None:
    model = species.build(WINDOW)
    with swapatch.patch(model, layout=layout):
        cache = filled(model, tokens)
    predicted = swapatch.report(model.config, tokens=tokens, batch=BATCH, dtype=torch.float32, layout=layout)
    assert own(predicted) == own(swapatch.report(cache))
    assert predicted.total_bytes == storage_bytes(cache)


def test_a_full_cache_is_as_predicted() -> None:
    """A dynamic cache without a config knows of no window, and keeps everything."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    cache = filled(model, 40, transformers.DynamicCache())
    predicted = swapatch.report(model, tokens=40, batch=BATCH, dtype=torch.float32, layout="full")
    measured = [(layer.rows, layer.bytes) for layer in swapatch.report(cache).layers]
    assert [(layer.rows, layer.bytes) for layer in predicted.layers] == measured


def test_every_layer_is_predicted(species: Species) -> None:
    """Shared ones too, with nothing, and the kinds are those of the config."""
    config = species.make_config(WINDOW)
    text = text_config(config)
    predicted = swapatch.report(config, tokens=8)
    assert [layer.index for layer in predicted.layers] == list(range(text.num_hidden_layers))
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    last = predicted.layers[text.num_hidden_layers - shared :]
    assert all((layer.kind, layer.rows, layer.bytes) == ("shared", 0, 0) for layer in last)
    for layer, kind in zip(own(predicted), text.layer_types, strict=False):
        assert layer.kind == {"sliding_attention": "sliding", "full_attention": "global"}[kind]


def test_bytes_follow_batch_and_dtype() -> None:
    config = BY_NAME["gemma4_text"].make_config(WINDOW)
    one = swapatch.report(config, tokens=100)
    assert swapatch.report(config, tokens=100, batch=3).total_bytes == 3 * one.total_bytes
    assert swapatch.report(config, tokens=100, dtype=torch.float32).total_bytes == 2 * one.total_bytes
    # Gemma 4's global layers have other heads: 3 sliding of 2 x 16 over 128 rows, 2 global of 2 x 32 over 100.
    assert one.total_bytes == 2 * 2 * (3 * 32 * 128 + 2 * 64 * 100)
    assert one.sliding_bytes == 2 * 2 * (3 * 32 * 128)


def test_a_known_model() -> None:
    """Gemma 3 1B at 32k tokens: 22 sliding and 4 global layers of one head of 256."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=26, num_key_value_heads=1, head_dim=256, sliding_window=512
    )
    mib = {layout: swapatch.report(config, tokens=32768, layout=layout).total_bytes / 2**20 for layout in SIZES}
    assert mib == {"anchored": 140.375, "ring": 139.0, "dynamic": 139.0, "static": 139.0, "full": 832.0}


@pytest.mark.parametrize(
    ("options", "found"),
    (
        ({}, "no tokens"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 5, "batch": 0}, "batch=0"),
        ({"tokens": 5, "layout": "heap"}, "layout='heap'"),
    ),
)
def test_refused_options(options: dict[str, Any], found: str) -> None:
    config = BY_NAME["gemma3_text"].make_config(WINDOW)
    with pytest.raises(ValueError, match=found) as caught:
        swapatch.report(config, **options)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["found", "supported", "do"]


def test_refused_objects() -> None:
    with pytest.raises(swapatch.UnsupportedModelError, match="str"):
        swapatch.report("google/gemma-3-1b-it", tokens=5)
    with pytest.raises(ValueError, match="tokens=5 with a cache"):
        swapatch.report(transformers.DynamicCache(), tokens=5)


def test_storage_that_layers_share_counts_once() -> None:
    cache = transformers.DynamicCache()
    both = torch.zeros(2, 1, 1, 10, 4)
    for layer in range(2):
        cache.update(torch.ones(1, 1, 10, 4), torch.ones(1, 1, 10, 4), layer)
        cache.layers[layer].keys, cache.layers[layer].values = both
    assert [layer.bytes for layer in swapatch.report(cache).layers] == [2 * 160, 0]


def test_printed(species: Species) -> None:
    """One line for layers alike, with a sum that is right."""
    report = swapatch.report(species.make_config(WINDOW), tokens=5000, layout="dynamic")
    lines = str(report).splitlines()
    assert lines[0].split() == ["kind", "rows", "bytes", "a", "layer", "bytes", "layers"]
    kinds = [line.split()[0] for line in lines[1:-1]]
    assert sorted(kinds) == sorted({layer.kind for layer in report.layers})
    assert lines[-1].split()[:2] == ["total", f"{report.total_bytes:,}"]
    assert not any(line != line.rstrip() for line in lines)


def test_an_empty_cache_prints() -> None:
    assert str(swapatch.report(transformers.DynamicCache())).splitlines()[-1].split()[:2] == ["total", "0"]
