"""A training step of a whole model, without an optimizer: what it takes in time and in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .device import CPU
from .models import patched_if, random_model, random_name
from .peak import peak_in_child
from .rows import Row, name_of
from .sizes import Options
from .timing import Way, compare, timed

DTYPE = torch.float32


def training(options: Options) -> Iterator[Row]:
    """Forward with labels and backward, in train mode and without a cache; then the peak memory of a longer one."""
    sizes = options.sizes
    model = trained_model(sizes.training)
    about = {"case": "training", "dtype": name_of(DTYPE)}
    step = {"model": trained_name(model), "setting": "forward and backward"}
    training_step(model, random_ids(model, 16))  # long ones are timed from the first on: nothing may be new to torch
    for tokens in sizes.training_lengths:
        result = compare(training_ways(model, tokens), DTYPE, options)
        yield result.row("stock sdpa", "swapatch", tokens=tokens, **step, **about)
    del model
    layers, tokens = sizes.training_memory
    stock, patched = (peak_in_child("training", name, tokens, options) for name in ("stock", "swapatch"))
    yield Row(
        model=trained_name(memory_model(options)),
        setting=f"forward and backward of {layers} layers, peak above the weights",
        tokens=tokens,
        unit="MiB",
        stock="stock sdpa",
        stock_value=stock,
        patched="swapatch",
        patched_value=patched,
        ratio=stock / patched if patched else None,
        **about,
    )


def trained_model(config: dict[str, int]) -> Any:
    torch.manual_seed(0)
    return random_model(config, DTYPE).train()


def trained_name(model: Any) -> str:
    return f"{random_name(model.config)}, vocabulary {model.config.vocab_size:,}"


def training_ways(model: Any, tokens: int) -> dict[str, Way]:
    ids = random_ids(model, tokens)
    return {"stock sdpa": training_way(model, ids), "swapatch": training_way(model, ids, patched=True)}


def random_ids(model: Any, tokens: int) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))


def training_way(model: Any, ids: Tensor, *, patched: bool = False) -> Way:
    """The loss, and the gradient of every parameter."""

    def run() -> tuple[float, tuple[Tensor, ...]]:
        model.zero_grad()
        with patched_if(patched, model):
            seconds, loss = timed(lambda: training_step(model, ids))
        return seconds, (loss, *(parameter.grad for parameter in model.parameters()))

    return run


def training_step(model: Any, ids: Tensor) -> Tensor:
    with torch.enable_grad():
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    return loss.detach()


def memory_model(options: Options) -> Any:
    """With fewer layers, so that stock's step fits into a machine."""
    layers, _ = options.sizes.training_memory
    return trained_model({**options.sizes.training, "num_hidden_layers": layers})


def training_peak(name: str, tokens: int, options: Options) -> float:
    """MiB; what the child does."""
    model = memory_model(options)
    with patched_if(name == "swapatch", model):
        training_step(model, random_ids(model, 16))  # torch's kernels become resident
        model.zero_grad()
        ids = random_ids(model, tokens)
        return CPU.peak(lambda: training_step(model, ids))
