"""Models with code of their own, derived from the classes that we know: patched, or refused with a reason."""

import functools
from typing import Any

import pytest
import torch
import transformers
from compare import assert_same_logits, assert_unchanged, greedy, snapshot
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3 as modeling
from zoo import BY_NAME, Model, named_ids, text_model

import swapatch

WINDOW, PROMPT, NEW = 8, 20, 5


class OwnConfig(transformers.Gemma3TextConfig):
    model_type = "own_gemma"
    factor: float = 0.5


class OwnAttention(modeling.Gemma3Attention):
    """Adds something, and leaves the forward alone."""

    def __init__(self, config: OwnConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_proj = nn.Sequential(self.q_proj, nn.Dropout(0.0))


class OwnForward(modeling.Gemma3Attention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * self.config.factor, *args, **kwargs)


class OwnLayer(modeling.Gemma3DecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **kwargs) * self.config.factor


class OwnText(modeling.Gemma3TextModel):
    def forward(self, input_ids: Tensor | None = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        assert attention_mask is None or isinstance(attention_mask, Tensor)
        return super().forward(input_ids, attention_mask, **kwargs)


class OwnModel(transformers.Gemma3ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.factor
        return out


def build(attention: type | None = None, layer: type | None = None, text: type | None = None) -> Model:
    """A model of a class of its own, with the weights of the zoo's."""
    stock = BY_NAME["gemma3_text"].build(WINDOW)
    config = OwnConfig(**{name: value for name, value in stock.config.to_dict().items() if name != "model_type"})
    config._attn_implementation = "sdpa"
    model = OwnModel(config).eval()
    model.load_state_dict(stock.state_dict())
    inner: Any = text_model(model)
    for index, old in enumerate(inner.layers):
        if layer:
            old.__class__ = layer
        if attention:
            own = attention(config, index).eval()
            own.load_state_dict(old.self_attn.state_dict(), strict=False)
            old.self_attn = own
    if text:
        inner.__class__ = text
    return model


@pytest.mark.parametrize(
    ("parts", "windowed"),
    (({}, True), ({"attention": OwnAttention}, True), ({"layer": OwnLayer}, False), ({"text": OwnText}, False)),
    ids=("model", "attention", "layer", "text model"),
)
def test_patched(parts: dict[str, type], windowed: bool, layout: str) -> None:
    """By windows where nobody could look at a mask, by stock's way else."""
    torch.manual_seed(0)
    model, ids = build(**parts), named_ids(None, 1, PROMPT)
    want = greedy(model, ids, NEW)
    with swapatch.patch(model, layout=layout):
        got = greedy(model, ids, NEW)
        calls = swapatch.status(model).calls
    assert isinstance(got.cache, swapatch.CompactCache)
    assert_same_logits(got.logits, want.logits)
    assert bool(calls.windowed) == windowed
    assert bool(calls.stock) != windowed


def test_an_attention_of_its_own_is_refused() -> None:
    model = build(attention=OwnForward)
    snap = snapshot(model)
    with pytest.raises(swapatch.UnsupportedModelError, match="OwnForward, with a forward of its own"):
        swapatch.patch(model)
    assert_unchanged(model, snap)


def test_a_class_that_somebody_has_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    stock = modeling.Gemma3Attention.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    monkeypatch.setattr(modeling.Gemma3Attention, "forward", forward)
    with pytest.raises(swapatch.PatchConflictError, match="take that replacement off"):
        swapatch.patch(model)


def test_a_config_of_another_family_around_ours() -> None:
    config = BY_NAME["gemma3_vision"].make_config(WINDOW)
    config.__class__ = type("Other", (transformers.PreTrainedConfig,), {"model_type": "other"})
    config.get_text_config = lambda decoder=False: config.text_config  # type: ignore[method-assign]
    with pytest.raises(swapatch.UnsupportedModelError, match="'other' around 'gemma3_text'"):
        swapatch.CompactCache(config)
