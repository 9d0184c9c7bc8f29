"""What the time of a long prefill goes into."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .models import subject
from .prefill import prefill_way
from .rows import Row
from .sizes import Options

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
