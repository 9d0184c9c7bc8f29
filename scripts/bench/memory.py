"""Peak memory of a prefill."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .models import patched_if, subject, subject_name
from .peak import peak_in_child
from .rows import Row
from .sizes import Options


def memory(options: Options) -> Iterator[Row]:
    """Peak memory of a one-shot prefill above what is held before it, in a process of its own each."""
    lengths = dict(options.sizes.memory)
    if options.long:
        lengths["stock"] = lengths["swapatch"]
    peaks = {
        (name, tokens): peak_in_child("prefill", name, tokens, options)
        for tokens in lengths["swapatch"]
        for name in ("stock", "swapatch")
        if tokens in lengths[name]
    }
    for tokens in lengths["swapatch"]:
        stock, patched = peaks.get(("stock", tokens)), peaks["swapatch", tokens]
        yield Row(
            case="memory",
            model=subject_name(options.quick, options.device.name),
            setting="one-shot prefill, peak above the weights",
            tokens=tokens,
            dtype="bfloat16",
            unit="MiB",
            stock="stock sdpa" if stock is not None else "",
            stock_value=stock,
            patched="swapatch",
            patched_value=patched,
            ratio=stock / patched if stock is not None and patched else None,
            note="" if stock is not None else "stock takes minutes, or more memory than there may be: --long",
        )


def prefill_peak(name: str, tokens: int, options: Options) -> float:
    """MiB; what the child does."""
    model = subject(options.quick, torch.bfloat16, options.device.name)
    with patched_if(name == "swapatch", model.model), torch.no_grad():
        # Weights are mapped from their file and only resident once they were read; so are torch's kernels.
        model.model(model.prompt(16), logits_to_keep=1)
        ids = model.prompt(tokens)
        return options.device.peak(lambda: model.model(ids, logits_to_keep=1))
