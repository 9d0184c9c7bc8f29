"""What a step costs before any number is computed: kernels that are launched, waits for the device, copies to it."""

from collections import Counter
from typing import Any

import pytest
import torch
from compare import cache_key, stock_or_patched
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.cache_utils import DynamicCache, StaticCache
from zoo import Model, named_ids

import swapatch

WINDOW, ROOM, LAYERS = 64, 400, 18

aten = torch.ops.aten
FREE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.detach.default,
    aten.alias.default,
}
"""Operations that run nothing on a device, beside views."""

WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that wait until the device has computed it."""


class Launches(TorchDispatchMode):
    """Counts under ``"kernels"``, ``"copies"`` (of numbers that Python has) and, with :func:`waits`, ``"waits"``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter(kernels=0, copies=0, waits=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.lift_fresh.default:
            self.counts["copies"] += 1
        elif not (func.is_view or func in FREE or func is aten._local_scalar_dense.default):
            self.counts["kernels"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a counter."""
    current: list[Launches] = []

    def waiting(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def wait(tensor: torch.Tensor) -> Any:
            if current:
                current[-1].counts["waits"] += 1
            return method(tensor)

        return wait

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, waiting(name))

    def count(call: Any) -> Counter[str]:
        with Launches() as counting:
            current.append(counting)
            call()
            current.pop()
        return counting.counts

    return count


@pytest.fixture(scope="module")
def model() -> Model:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    torch.manual_seed(0)
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, num_hidden_layers=LAYERS, sliding_window=WINDOW)).eval()


MASKS = {"no mask": None, "all ones": 0, "padded": 5}


def cache_for(model: Model, patched: bool, layout: str, static: bool) -> Any:
    if patched:
        return swapatch.CompactCache(model, layout=layout, max_cache_len=ROOM if static else None)
    return StaticCache(model.config, max_cache_len=ROOM) if static else DynamicCache(config=model.config)


def figures(model: Model, launches: Any, prompt: int, layout: str, static: bool, mask: str) -> Any:
    """Of a prefill and of the second step behind it, stock's and ours."""
    ids = named_ids(model, 2, ROOM)
    padding = torch.ones_like(ids)
    hidden = MASKS[mask]
    padding[0, : hidden or 0] = 0
    found = []
    for patched in stock_or_patched(model, layout=layout):
        cache = cache_for(model, patched, layout, static)

        def call(start: int, stop: int, cache: Any = cache) -> None:
            given = {} if hidden is None else {"attention_mask": padding[:, :stop]}
            with torch.no_grad():
                model(ids[:, start:stop], logits_to_keep=1, **{cache_key(model): cache}, **given)

        prefill = launches(lambda call=call: call(0, prompt))
        call(prompt, prompt + 1)
        found.append((prefill, launches(lambda call=call: call(prompt + 1, prompt + 2))))
    return zip(*found, strict=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("static", (False, True), ids=("dynamic", "static"))
@pytest.mark.parametrize("layout", ("anchored", "ring"))
@pytest.mark.parametrize("prompt", (40, 300))
def test_never_more_than_stock(model: Model, launches: Any, prompt: int, layout: str, static: bool, mask: str) -> None:
    """Kernels of a decode step; waits and copies of a prefill too.

    A prompt launches more: two zeros for each bounded buffer, and beyond the window a call for each block.
    """
    prefill, decode = figures(model, launches, prompt, layout, static, mask)
    for stock, ours in (prefill, decode):
        assert ours["waits"] <= stock["waits"]
        assert ours["copies"] <= stock["copies"]
    assert decode[1]["kernels"] <= decode[0]["kernels"]
    if prompt < WINDOW and mask != "padded":
        assert prefill[1]["kernels"] <= prefill[0]["kernels"] + 2 * LAYERS
