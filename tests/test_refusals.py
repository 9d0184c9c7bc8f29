"""Models that cannot be patched are refused before anything is touched, with what was found, supported and to do."""

from collections.abc import Callable

import pytest
import transformers
from compare import assert_unchanged, snapshot
from torch import nn
from zoo import BY_NAME, SLIDING, text_config

import swapatch

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def changed(name: str, **changes: object) -> Callable[[], nn.Module]:
    """A model of the zoo whose text config was changed after it was built."""

    def build() -> nn.Module:
        model = BY_NAME[name].build(8)
        for key, value in changes.items():
            object.__setattr__(text_config(model), key, value)
        return model

    return build


def embedder() -> nn.Module:
    config = transformers.Gemma3TextConfig(**TINY, use_bidirectional_attention=True)
    return transformers.Gemma3TextModel(config)


def gemma4_all() -> nn.Module:
    config = BY_NAME["gemma4_text"].make_config(16).to_dict() | {"use_bidirectional_attention": "all"}
    return transformers.Gemma4TextModel(transformers.Gemma4TextConfig(**config))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "gemma 1": (lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**TINY)), "no sliding layers"),
    "gemma 2": (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TINY)), "caps its attention scores"),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), "model_type 'llama'"),
    "gemma 3 embedder": (embedder, "bidirectional attention"),
    "gemma 4 'all'": (gemma4_all, "use_bidirectional_attention='all'"),
    "no sliding layer": (changed("gemma3_text", layer_types=["full_attention"] * 4), "no sliding layer"),
    "unknown layer": (changed("gemma3_text", layer_types=[SLIDING, "chunked_attention"]), "chunked_attention"),
    "window None": (changed("gemma3_text", sliding_window=None), "sliding_window=None"),
    "window 0": (changed("gemma3_text", sliding_window=0), "sliding_window=0"),
    "window 1": (changed("gemma4_text", sliding_window=1), "sliding_window=1"),
    "all shared": (changed("gemma4_text", num_kv_shared_layers=4), "with keys and values of its own"),
    "a string": (lambda: "google/gemma-3-1b-it", "str 'google/gemma-3-1b-it'"),
    "None": (lambda: None, "NoneType None"),
    "a bare module": (lambda: nn.Linear(2, 2), "Linear"),
    "two models": (lambda: nn.ModuleList([BY_NAME["gemma3_text"].build(8) for _ in range(2)]), "ModuleList"),
    "a config": (lambda: text_config(BY_NAME["gemma3_text"].build(8)), "0 modules of class Gemma3TextModel"),
}


@pytest.mark.parametrize(("build", "found"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_and_untouched(build: Callable[[], object], found: str) -> None:
    model = build()
    snap = snapshot(model) if isinstance(model, nn.Module) else None
    with pytest.raises(swapatch.UnsupportedModelError) as caught:
        swapatch.patch(model)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["found", "supported", "do"]
    assert found in str(caught.value)
    if snap is not None:
        assert_unchanged(model, snap)
        assert not swapatch.is_patched(model)
