"""What ``inspect`` shows: from a config alone, what swapatch would do to the model, and what its cache would take."""

from __future__ import annotations

from typing import Any

import torch

from .._text import aligned, human_bytes, print_table, ranges
from ..families import plan_model
from ..layers import LAYOUTS
from ..plan import LayerPlan, ModelPlan, text_config
from ..sizes import report
from .load import DTYPES

TOKENS = tuple(1024 << power for power in range(8))
"""Lengths in the table of sizes, 1k to 128k."""

STOCK_CACHES = {"stock_dynamic": "dynamic", "stock_static": "static", "full": "full"}
"""Columns of that table beside our own, with the layouts that :func:`swapatch.report` knows them by."""


def describe(
    config: Any, name: str, *, batch: int = 1, dtype: torch.dtype | None = None, layout: str = "anchored"
) -> dict[str, Any]:
    """All that can be said of a model from its config, as plain values.

    Args:
        config: of a model.
        name: what to call it.
        batch, dtype, layout: of the caches whose sizes are predicted; the dtype by default that of the config.

    Raises:
        UnsupportedModelError: swapatch would refuse the model.
    """
    plan, text = plan_model(config), text_config(config)
    rows = LAYOUTS[layout].base_rows(plan.window)
    dtype = dtype or config_dtype(config)
    return {
        "model": name,
        "model_type": config.model_type,
        "layers": [_layer(plan, layer, rows) for layer in plan.layers],
        "patched_layers": len(plan.sliding),
        "window": plan.window,
        "layout": layout,
        "rows": rows,
        "images_both_ways": plan.bidirectional and config is not text,  # a text model gets no images
        "max_tokens": getattr(text, "max_position_embeddings", None),
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes": [_sizes(config, tokens, batch, dtype, layout) for tokens in TOKENS],
    }


def config_dtype(config: Any) -> torch.dtype:
    """The type that a config says its weights have, else bfloat16, the type of the published ones."""
    named = next((c.dtype for c in (config, text_config(config)) if getattr(c, "dtype", None)), None)
    return DTYPES.get(str(named).removeprefix("torch."), torch.bfloat16)


def _layer(plan: ModelPlan, layer: LayerPlan, rows: int) -> dict[str, Any]:
    sliding = layer.kind == "sliding"
    seen = f"a window of {plan.window}" if sliding else "all keys: no window to bound"
    whose = f", those of layer {layer.source}" if layer.shared else ""
    return {
        "index": layer.index,
        "kind": layer.kind,
        "shares_with": layer.source if layer.shared else None,
        "patched": sliding,
        "rows": 0 if layer.shared else rows if sliding else None,
        "why": f"attends {seen}{whose}",
    }


def _sizes(config: Any, tokens: int, batch: int, dtype: torch.dtype, layout: str) -> dict[str, int]:
    columns = {**STOCK_CACHES, "swapatch": layout}
    sizes = {
        name: report(config, tokens=tokens, batch=batch, dtype=dtype, layout=kind).total_bytes
        for name, kind in columns.items()
    }
    return {"tokens": tokens, **sizes}


def show(found: dict[str, Any]) -> None:
    """Print what :func:`describe` found."""
    both_ways = "tokens of one image see each other both ways" if found["images_both_ways"] else "causal"
    facts = [
        ["model", f"{found['model']} ({found['model_type']})"],
        ["patched", f"{found['patched_layers']} of {len(found['layers'])} layers"],
        ["window", f"{found['window']} keys, {both_ways}"],
        ["buffer", f"{found['rows']} rows a sliding layer ({found['layout']})"],
    ]
    print(aligned(*_headless(facts), left="ll"))
    print("\nLayers")
    print_table(["layers", "kind", "patched", "rows", "why"], _layer_rows(found["layers"]), left="lll l")
    print(f"\nKeys and values, {found['dtype']}, batch {found['batch']}")
    limit = found["max_tokens"] or TOKENS[-1]
    print_table(
        ["tokens", "stock dynamic", "stock static", "full cache", "swapatch"],
        [_size_row(sizes, limit) for sizes in found["kv_bytes"]],
    )
    print("Stock dynamic from the first step on; until then its sliding layers keep the whole prompt, as a full cache.")
    if limit < TOKENS[-1]:
        print(f"* more than the {limit} positions that the model was made for")


def _headless(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return rows[0], rows[1:]


def _layer_rows(layers: list[dict[str, Any]]) -> list[list[str]]:
    """One row for all layers that are alike."""
    alike: dict[tuple[str, bool, int | None, str], list[int]] = {}
    for layer in layers:
        alike.setdefault((layer["kind"], layer["patched"], layer["rows"], layer["why"]), []).append(layer["index"])
    return [
        [ranges(indices), kind, "yes" if patched else "no", "tokens" if rows is None else str(rows), why]
        for (kind, patched, rows, why), indices in alike.items()
    ]


def _size_row(sizes: dict[str, int], limit: int) -> list[str]:
    tokens = sizes["tokens"]
    mark = "*" if tokens > limit else ""
    return [f"{tokens // 1024}k{mark}", *(human_bytes(size) for name, size in sizes.items() if name != "tokens")]
