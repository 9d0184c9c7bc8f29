"""The families of Gemma, a module each: all that is particular to one stands there, and is asked from here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..plan import UNPATCHED, ModelPlan, configs, refuse
from .family import Family

MODULES = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4_unified",
}
"""``model_type`` of the text configs that can be patched, and the module of their family."""

SUPPORTED = "Gemma 3 and Gemma 4 (model_type " + ", ".join(sorted({*MODULES, *MODULES.values()})) + ")"

_LOADED: dict[str, Family] = {}

_WHY = {
    "gemma": f"{UNPATCHED}: Gemma 1 has no sliding layers",
    "gemma2": f"{UNPATCHED}: Gemma 2 caps its attention scores, which the windowed attention does not do",
}


def family_of(model_type: str) -> Family:
    """The family of a text config, by its ``model_type``; imported now, for each takes long to import.

    >>> family_of("gemma3_text").attention.__name__
    'Gemma3Attention'
    """
    if model_type not in _LOADED:
        _LOADED[model_type] = import_module(f".{MODULES[model_type]}", __name__).FAMILY
    return _LOADED[model_type]


def plan_model(model_or_config: Any) -> ModelPlan:
    """The plan for a model or a config.

    Raises:
        UnsupportedModelError: says what was found, what is supported and what to do.
    """
    config, text = configs(model_or_config)
    known = next((name for name in _model_types(text) if name in MODULES), None)
    if known is None:
        raise refuse(f"model_type {config.model_type!r}", _WHY.get(text.model_type, UNPATCHED), SUPPORTED)
    family = family_of(known)
    if config is not text and family.outer_type not in _model_types(config):
        raise refuse(f"model_type {config.model_type!r} around {text.model_type!r}", UNPATCHED, SUPPORTED)
    return family.plan(config, text)


def _model_types(config: Any) -> list[str]:
    """Of a config and the classes that it is derived from, as a model with code of its own may derive from ours."""
    return [config.model_type, *(vars(cls)["model_type"] for cls in type(config).__mro__ if "model_type" in vars(cls))]


__all__ = ["MODULES", "SUPPORTED", "Family", "family_of", "plan_model"]
