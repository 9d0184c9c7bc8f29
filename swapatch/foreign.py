"""Who else has a hand in the sliding layers: replaced kernels and forwards, and hooks that could look at a mask.

Whoever hooks, wraps or replaces something is to find what he found in stock. So wherever a function that is neither
torch's, transformers', accelerate's nor ours would be shown a mask or attention weights, or stands where our code would
step in, a call is left to stock, for the reason that is given here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from transformers import masking_utils

from .attention.windowed import is_replaced
from .families import Family
from .plan import GLOBAL, SLIDING

_PACKAGES = ("torch", "transformers", "accelerate", __package__)
_KNOWN = tuple(os.path.dirname(str(find_spec(name).origin)) + os.sep for name in _PACKAGES)  # type: ignore[union-attr]

_INNER = ("_torchdynamo_orig_callable", "__func__", "func", "__wrapped__")
"""Where compiled functions, bound methods, partial ones and wrappers keep what they call."""

_MASK_MAKERS = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_masks_for_generate",
    "create_causal_mask_mapping",
    "create_masks_for_vision_model",
    "get_block_sequence_ids_for_mask",
    "causal_mask_function",
    "sliding_window_overlay",
    "sliding_window_causal_mask_function",
    "padding_mask_function",
    "packed_sequence_mask_function",
    "blockwise_overlay",
    "and_masks",
    "or_masks",
)
"""Functions that make masks, in a model's file and in transformers' own; neither has all, in any version."""


def is_known(function: Any) -> bool:
    """Whether the code of a function, and of all that it wraps, lies in torch, transformers, accelerate or here.

    Not by its name, which a wrapper may have taken over.

    >>> is_known(torch.nn.Linear.forward), is_known(lambda linear, x: linear.forward(x))
    (True, False)
    """
    while function is not None:
        if isinstance(function, nn.Module):
            function = function.forward
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        if not (code.co_filename.startswith(_KNOWN) if code else _is_built_in(function)):
            return False
        if isinstance(function, FunctionType) and not vars(function):
            return True  # most do not wrap anything
        function = next((inner for name in _INNER if (inner := getattr(function, name, None)) is not None), None)
    return True


def _is_built_in(function: Any) -> bool:
    """Of what has no code of Python's: whether it is torch's, or part of the language, as a bound method is."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] in ("torch", "builtins", "functools")


def hand_in(config: Any, family: Family, text: Any, forward: Any, whole: bool) -> str | None:
    """In words, who else has a hand in the sliding layers of a text model, or None.

    Args:
        config: of the text model.
        family: of the model.
        text: the text model.
        forward: what a patched attention layer runs.
        whole: whether global layers are patched as well.
    """
    if whole and (is_replaced() or not is_known(family.modeling.apply_rotary_pos_emb)):
        return "somebody's own function in the place of one that the backend computes by itself"
    shares = whole or bool(getattr(config, "num_kv_shared_layers", 0))
    shown = (SLIDING, GLOBAL) if shares else (SLIDING,)  # global layers see what sliding ones share with each other
    attended = (SLIDING, GLOBAL) if whole else (SLIDING,)
    return _in_functions(config, family) or next(_in_layers(config, text, forward, shown, attended, whole), None)


def has_hand_in_global(config: Any, text: Any, forward: Any) -> bool:
    """Whether somebody else has a hand in the global layers, where nobody has one in the sliding ones."""
    kinds = (GLOBAL,)
    return is_replaced() or any(_in_layers(config, text, forward, kinds, kinds, False))


def _in_functions(config: Any, family: Family) -> str | None:
    name = config._attn_implementation
    file = family.modeling
    used = [file.ALL_ATTENTION_FUNCTIONS.get_interface(name, file.eager_attention_forward)]
    if name == "eager":  # and what that calls
        used += [file.repeat_kv, torch.matmul, functional.softmax, functional.dropout]
    if not all(map(is_known, used)):
        return f"somebody's own function in the place of {name!r} attention"
    makers = [getattr(where, maker, None) for where in (file, masking_utils) for maker in _MASK_MAKERS]
    if not all(map(is_known, (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name], *makers))):
        return "somebody's own function in the place of one that makes masks"
    if is_replaced() and (name != "sdpa" or torch.compiler.is_compiling()):
        return "somebody's own function in the place of torch's, and eager attention or a compiled call"
    return None


def _in_layers(
    config: Any, text: Any, forward: Any, shown: tuple[str, ...], attended: tuple[str, ...], below: bool
) -> Iterator[str]:
    """Who has a hand in the layers of the kinds that are ``shown`` something of ours, and in their attention."""
    implementation = config._attn_implementation
    weights = implementation == "eager"
    if any(not is_known(hook) for hook in _global_hooks(weights)):
        yield "a hook on all modules that sees masks or weights"
    classes: set[type] = set()  # those found known so far: a model has two here, and many layers
    for index, (kind, layer) in enumerate(zip(config.layer_types, text.layers, strict=False)):
        if kind not in shown:
            continue
        attention = layer._modules.get("self_attn") or getattr(layer, "self_attn", None)
        if _has_own_forward(layer):
            yield f"somebody's own forward of layer {index}"
        if reason := _on(layer, False, classes):
            yield f"{reason} in layer {index}"
        if attention is None:
            continue
        if reason := _on(attention, weights, classes):
            yield f"{reason} in layer {index}"
        if kind not in attended:
            continue
        if below and (name := _below(attention)):
            yield f"somebody's own {name} in layer {index}, or a hook on it"
        if not _runs(attention, forward):
            yield f"somebody's own forward of the attention in layer {index}"
        if attention.config is not config and attention.config._attn_implementation != implementation:
            yield f"{attention.config._attn_implementation!r} attention in layer {index}"
        if attention.training and attention.attention_dropout:
            yield "attention dropout"
        if not attention.is_causal:
            yield f"is_causal=False in layer {index}"


def _below(attention: Any) -> str | None:
    """What is somebody's among the modules of an attention layer whose work a compiled region does."""
    for name, module in attention._modules.items():
        if module is None:
            continue
        own = vars(module)
        replaced = _has_own_forward(module) or ("norm" in name and not is_known(type(module).forward))
        if replaced or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return str(name)
    return None


def _on(module: Any, weights: bool, classes: set[type]) -> str | None:
    """What is somebody's on a module: its class, or a hook that is shown masks or ``weights``."""
    own, cls = vars(module), type(module)
    if cls not in classes:
        if not (hasattr(cls, "forward") and is_known(cls.forward) and is_known(cls.__call__)):
            return f"somebody's own {cls.__name__}"
        classes.add(cls)
    hooked = own["_forward_pre_hooks_with_kwargs"] or own["_forward_hooks_with_kwargs"] or "_hf_hook" in own
    if hooked or (weights and own["_forward_hooks"]):
        return "a hook that sees masks or weights" if not all(map(is_known, _hooks(module, weights))) else None
    return None


def sees_call(module: Any) -> bool:
    """Whether somebody is shown what a model is called with by name: by its class, its forward, or a hook."""
    return _has_own_forward(module) or _on(module, False, set()) is not None


def _has_own_forward(module: Any) -> bool:
    """Whether somebody has put a forward of his own on a module."""
    found = vars(module).get(forward_slot(module))
    return found is not None and not is_known(found)


def forward_slot(module: Any) -> str:
    """The attribute that holds the forward of a module: under a hook of accelerate that is another one."""
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def _runs(module: Any, forward: Any) -> bool:
    """Whether this function, compiled or not, is what runs when a module is called."""
    found = vars(module).get(forward_slot(module))
    if getattr(found, "__func__", None) is forward:
        return True
    return getattr(getattr(found, "_torchdynamo_orig_callable", None), "__func__", None) is forward


def _hooks(module: Any, weights: bool) -> Iterator[Any]:
    for name in module._forward_pre_hooks_with_kwargs:
        yield module._forward_pre_hooks[name]
    for name, hook in module._forward_hooks.items():
        if weights or name in module._forward_hooks_with_kwargs:
            yield hook
    if "_hf_hook" in vars(module):
        for hook in getattr(module._hf_hook, "hooks", (module._hf_hook,)):
            yield from (type(hook).pre_forward, type(hook).post_forward)


def _global_hooks(weights: bool) -> Iterator[Any]:
    for name, hook in modules._global_forward_hooks.items():
        if weights or name in modules._global_forward_hooks_with_kwargs:
            yield hook
