"""Adapters of peft on a patched model, and the patch on an adapted one: tokens, logits and gradients as stock's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_logits, greedy
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from zoo import BY_NAME, Model, Species, named_ids

import swapatch

# peft passes and reads what transformers is about to rename, and says itself what it ignores.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}") for message in (":FutureWarning", "Position ids are not supported")
]

TASK = {"task_type": "CAUSAL_LM"}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(target_modules=PROJECTIONS, r=2, init_lora_weights=False, **TASK),
    "dora": lambda: LoraConfig(target_modules=PROJECTIONS, r=2, use_dora=True, init_lora_weights=False, **TASK),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK
    ),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=5, **TASK),
    "long prefix": lambda: PrefixTuningConfig(num_virtual_tokens=20, **TASK),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=5, **TASK),
}
WINDOW, PROMPT, NEW = 8, 20, 6


def adapted(species: Species, adapter: str) -> Model:
    torch.manual_seed(0)
    model = get_peft_model(species.build(WINDOW), ADAPTERS[adapter]()).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def gradients(model: Model, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ("gemma3_text", "gemma4_text"))
@pytest.mark.parametrize("outside", (False, True), ids=("patch the base", "patch the wrapper"))
def test_as_stock(name: str, adapter: str, outside: bool, layout: str) -> None:
    model, ids = adapted(BY_NAME[name], adapter), named_ids(BY_NAME[name], 1, PROMPT)
    try:
        want, slopes = greedy(model, ids, NEW), gradients(model, ids)
    except Exception as error:
        pytest.skip(f"stock cannot do this: {error!r:.100}")
    with swapatch.patch(model if outside else model.get_base_model(), layout=layout):
        got = greedy(model, ids, NEW)
        assert isinstance(got.cache, swapatch.CompactCache) or "prefix" in adapter
        assert_same_logits(got.logits, want.logits)
        for pair in zip(gradients(model, ids), slopes, strict=True):
            torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-3)
