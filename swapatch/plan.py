"""From a model's config to a plan: what each layer is, and whether the model can be patched. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ._errors import UnsupportedModelError, explain

MODEL_TYPES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
}
"""``model_type`` of the text configs that can be patched, and of the configs around them when there is vision.

The second is also the name of the module in :mod:`swapatch.families`.
"""

SLIDING, GLOBAL = "sliding_attention", "full_attention"

SUPPORTED = "Gemma 3 and Gemma 4 (model_type " + ", ".join(sorted({*MODEL_TYPES, *MODEL_TYPES.values()})) + ")"


@dataclass(frozen=True)
class LayerPlan:
    """One decoder layer.

    Attributes:
        index: its number in the model.
        kind: ``"sliding"`` or ``"global"``.
        source: the layer whose keys and values it attends; its own index unless it shares another layer's.
    """

    index: int
    kind: str
    source: int

    @property
    def shared(self) -> bool:
        """Whether the layer has no keys and values of its own."""
        return self.source != self.index


@dataclass(frozen=True)
class ModelPlan:
    """What swapatch knows of a model from its config.

    Attributes:
        model_type: of the text config.
        window: keys that a query of a sliding layer sees, itself included.
        layers: one entry for each decoder layer.
        bidirectional: whether tokens of one image can see each other both ways.
    """

    model_type: str
    window: int
    layers: tuple[LayerPlan, ...]
    bidirectional: bool

    @cached_property
    def sliding(self) -> tuple[int, ...]:
        """Indices of the sliding layers."""
        return tuple(layer.index for layer in self.layers if layer.kind == "sliding")

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Indices of the sliding layers that have a cache of their own."""
        return tuple(layer.index for layer in self.layers if layer.kind == "sliding" and not layer.shared)


def plan_model(model_or_config: Any) -> ModelPlan:
    """The plan for a model or a config.

    Raises:
        UnsupportedModelError: says what was found, what is supported and what to do.
    """
    config, text = _configs(model_or_config)
    if config.model_type not in (text.model_type, MODEL_TYPES.get(text.model_type)):
        raise _refuse(f"model_type {config.model_type!r} around {text.model_type!r}", _UNPATCHED)
    if text.model_type not in MODEL_TYPES:
        raise _refuse(f"model_type {config.model_type!r}", _DO.get(text.model_type, _UNPATCHED))
    _refuse_bidirectional(text)
    return ModelPlan(text.model_type, _window(text), _layers(text), _sees_images(config, text))


_UNPATCHED = "use the model as it is, unpatched"
_DO = {
    "gemma": f"{_UNPATCHED}: Gemma 1 has no sliding layers",
    "gemma2": f"{_UNPATCHED}: Gemma 2 caps its attention scores, which the windowed attention does not do",
}


def _sees_images(config: Any, text: Any) -> bool:
    """Whether images are attended both ways: always in Gemma 3, in Gemma 4 if the checkpoint says so."""
    if text.model_type == "gemma3_text":
        return config is not text
    return getattr(text, "use_bidirectional_attention", None) == "vision"


def text_config(model_or_config: Any) -> Any:
    """The config of the text part of a model or config."""
    return _configs(model_or_config)[1]


def _configs(model_or_config: Any) -> tuple[Any, Any]:
    config = getattr(model_or_config, "config", model_or_config)
    if isinstance(config, type) or not hasattr(config, "model_type") or not hasattr(config, "get_text_config"):
        shown = repr(model_or_config).partition("\n")[0][:60]
        raise _refuse(f"{type(model_or_config).__name__} {shown}", "pass a loaded transformers model")
    return config, config.get_text_config(decoder=True)


def _refuse(found: str, do: str, supported: str = SUPPORTED) -> UnsupportedModelError:
    return UnsupportedModelError(explain(found, supported, do))


def _refuse_bidirectional(config: Any) -> None:
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional not in (None, False, "vision") or getattr(config, "is_causal", True) is False:
        raise _refuse(
            f"bidirectional attention (use_bidirectional_attention={bidirectional!r})",
            f"{_UNPATCHED}: an embedder has no decode steps to speed up",
        )


def _window(config: Any) -> int:
    window = getattr(config, "sliding_window", None)
    if SLIDING not in _types(config):
        raise _refuse("no sliding layer in layer_types", f"{_UNPATCHED}: there is nothing to bound", "at least one")
    if not isinstance(window, int) or window < 2:
        raise _refuse(f"sliding_window={window!r}", "set sliding_window to 2 or more in the config", "windows from 2")
    return window


def _types(config: Any) -> list[str]:
    """The kinds of the layers that run: fewer while a model drafts with its first ones."""
    return list(config.layer_types)[: config.num_hidden_layers]


def _layers(config: Any) -> tuple[LayerPlan, ...]:
    kinds = {SLIDING: "sliding", GLOBAL: "global"}
    unknown = sorted(set(config.layer_types) - set(kinds))
    if unknown:
        raise _refuse(f"layer_types with {unknown}", f"only {sorted(kinds)} are known: use the model unpatched")
    types = _types(config)
    own = len(types) - (getattr(config, "num_kv_shared_layers", 0) or 0)
    if orphans := sorted(set(types) - set(types[:own])):
        raise _refuse(f"no layer of {orphans} with keys and values of its own", _UNPATCHED)
    last = {kind: index for index, kind in enumerate(types[:own])}
    return tuple(LayerPlan(i, kinds[kind], i if i < own else last[kind]) for i, kind in enumerate(types))
