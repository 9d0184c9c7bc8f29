"""A whole prefill, from the tokens to the logits of the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .device import device_of
from .models import Subject, attending, patched_if, subject
from .rows import Row, failed, name_of
from .sizes import Options, Sizes
from .timing import Way, compare


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
            return device_of(model).timed(one_shot if chunk is None else in_chunks)

    return run


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
        yield failed(error, stock="stock flex", **about)
