"""What a model is, read from its config: which layers slide, whose keys they attend, and the window. Data only.

What is particular to a family, its module in :mod:`swapatch.families` knows; here is what all of them share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._errors import UnsupportedModelError, explain

SLIDING, GLOBAL = "sliding_attention", "full_attention"

UNPATCHED = "use the model as it is, unpatched"


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

    @property
    def sliding(self) -> tuple[int, ...]:
        """Indices of the sliding layers."""
        return tuple(layer.index for layer in self.layers if layer.kind == "sliding")

    @property
    def owners(self) -> tuple[int, ...]:
        """Indices of the sliding layers that have a cache of their own."""
        return tuple(layer.index for layer in self.layers if layer.kind == "sliding" and not layer.shared)


def text_config(model_or_config: Any) -> Any:
    """The config of the text part of a model or config."""
    return configs(model_or_config)[1]


def configs(model_or_config: Any) -> tuple[Any, Any]:
    """The config of a model, or a config itself, and that of its text part.

    Raises:
        UnsupportedModelError: it is neither a model of transformers nor a config.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if isinstance(config, type) or not hasattr(config, "model_type") or not hasattr(config, "get_text_config"):
        shown = repr(model_or_config).partition("\n")[0][:60]
        raise refuse(f"{type(model_or_config).__name__} {shown}", "pass a loaded transformers model", "a model")
    return config, config.get_text_config(decoder=True)


def refuse(found: str, do: str, supported: str) -> UnsupportedModelError:
    """The error for a model that cannot be patched."""
    return UnsupportedModelError(explain(found, supported, do))


def window_of(config: Any) -> int:
    """Keys that a query of a sliding layer of this text config sees.

    Raises:
        UnsupportedModelError: no layer slides, or the window is below 2.
    """
    window = getattr(config, "sliding_window", None)
    if SLIDING not in _types(config):
        raise refuse("no sliding layer in layer_types", f"{UNPATCHED}: there is nothing to bound", "at least one")
    if not isinstance(window, int) or window < 2:
        raise refuse(f"sliding_window={window!r}", "set sliding_window to 2 or more in the config", "windows from 2")
    return window


def layers_of(config: Any) -> tuple[LayerPlan, ...]:
    """The layers of a text config.

    Raises:
        UnsupportedModelError: a layer is of an unknown kind, or has no keys to attend.
    """
    kinds = {SLIDING: "sliding", GLOBAL: "global"}
    supported = f"layers of {sorted(kinds)}"
    if unknown := sorted(set(config.layer_types) - set(kinds)):
        raise refuse(f"layer_types with {unknown}", UNPATCHED, supported)
    types = _types(config)
    own = len(types) - (getattr(config, "num_kv_shared_layers", 0) or 0)
    if orphans := sorted(set(types) - set(types[:own])):
        raise refuse(f"no layer of {orphans} with keys and values of its own", UNPATCHED, supported)
    last = {kind: index for index, kind in enumerate(types[:own])}
    return tuple(LayerPlan(i, kinds[kind], i if i < own else last[kind]) for i, kind in enumerate(types))


def _types(config: Any) -> list[str]:
    """The kinds of the layers that run: fewer while a model drafts with its first ones."""
    return list(config.layer_types)[: config.num_hidden_layers]
