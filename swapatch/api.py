"""Patching and undoing: what a user calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType, TracebackType
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_masks_for_generate

from ._compat import CACHE_NAME, check_signatures, check_version
from ._errors import AlreadyPatchedError, PatchConflictError, UnsupportedModelError, explain
from ._undo import UndoLog
from .backends import ADAPTED, BACKENDS, NAMES, choose
from .calls import CallCounts, Calls
from .compiled import COMPILED, CompiledLayer
from .entry import ModelForward, Options
from .families import Family, family_of, plan_model
from .foreign import forward_slot, is_known
from .generate import MAKE_MASKS, PREPARE_CACHE, CacheMaker, MethodWrapper, StepMaker
from .layers import LAYOUTS, check_layout
from .plan import ModelPlan
from .step import forward
from .switch import is_disabled

logger = logging.getLogger("swapatch")

_HANDLE = "_swapatch_handle"


def patch(
    model: Any,
    *,
    layout: str = "anchored",
    backend: str = "auto",
    compile_layers: bool | Mapping[str, Any] = False,
    strict: bool = False,
) -> PatchHandle:
    """Patch a loaded Gemma model in place, so that its sliding layers keep and attend only their window.

    All checks come before the first change, and a failure on the way takes back what was done. Patching again with the
    same options gives the same handle. Nothing is changed while swapatch is switched off.

    Args:
        model: a loaded transformers model, with or without a language modeling head.
        layout: how the sliding buffers are laid out: ``"anchored"`` (time order, rolled every 64 tokens) or ``"ring"``.
        backend: who computes the attention. ``"auto"`` is ``"spyre"``, torch-spyre's operator, on a Spyre device and
            ``"windowed"``, our own code, elsewhere; ``"reference"`` is slow, for debugging.
        compile_layers: compile the decoder layers by ``torch.compile``, each by itself. They leave their graphs to
            attend, so all layers and all lengths share a few. Or the options of ``torch.compile``, as
            ``{"mode": "max-autotune"}``.
        strict: treat a version of transformers that was not tested as an error, not as a warning.

    Returns:
        The handle that undoes it, also a context manager.

    Raises:
        UnsupportedModelError: the model is not one that swapatch knows.
        UnsupportedVersionError: transformers does not fit, or, with ``strict``, was not tested.
        AlreadyPatchedError: patched before with other options.
        PatchConflictError: somebody else has replaced what swapatch would replace.
        SpyreContractError: the Spyre operator is asked for and is missing, or has an older form.
        ValueError: an unknown layout or backend.

    >>> with patch(model, layout="ring") as handle:
    ...     handle
    <swapatch: Gemma3ForCausalLM, 5 of 6 layers, window 64, ring 64 rows, windowed/cpu, active>
    >>> is_patched(model)
    False
    """
    check_layout(layout)
    if backend not in NAMES:
        raise ValueError(explain(f"backend={backend!r}", ", ".join(map(repr, NAMES)), "pass one of these"))
    if is_disabled():
        logger.info("switched off: %s stays as it is", type(model).__name__)
        return PatchHandle(model, None, layout, backend, compile_layers, UndoLog())
    if (existing := _find_handle(model)) is not None:
        options = f"layout={layout!r}, backend={backend!r}, compile_layers={compile_layers!r}"
        wanted = f"one patch at a time, wanted {options} on {type(model).__name__}"
        same = (existing.layout, existing.backend, existing.compile_layers) == (layout, backend, compile_layers)
        if same and _covers(existing, model):
            return existing
        raise AlreadyPatchedError(
            explain(repr(existing), wanted, "call handle.undo() or swapatch.unpatch(model) first")
        )
    plan = plan_model(model)
    _check_transformers(plan, strict)
    if backend in BACKENDS:
        BACKENDS[backend].check()
    parts = _locate(model, plan, backend)
    handle = PatchHandle(model, plan, layout, backend, compile_layers, UndoLog())
    try:
        _apply(handle, plan, parts)
    except BaseException:
        handle._log.undo()
        raise
    logger.info("patched: %r", handle)
    return handle


def unpatch(model: Any) -> bool:
    """Undo the patch of a model, if it has one; says whether it had.

    Raises:
        PatchConflictError: somebody has wrapped a replaced method since; nothing is changed.

    >>> handle = patch(model)
    >>> unpatch(model), unpatch(model)
    (True, False)
    """
    handle = _find_handle(model)
    if handle is None:
        return False
    handle.undo()
    return True


def is_patched(model: Any) -> bool:
    """Whether the model is patched at the moment.

    >>> is_patched(nn.Linear(1, 1))
    False
    """
    return _find_handle(model) is not None


def status(model: Any) -> Status:
    """What the patch of a model is, what happened to its calls, and whether anybody has changed anything since.

    >>> status(model).patched
    False
    >>> with patch(model):
    ...     status(model).sliding_layers
    ...     logits = model(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    ...     logits = model(torch.tensor([[5, 6, 7]]), output_attentions=True).logits
    ...     status(model).calls
    (0, 1, 2, 3, 4)
    CallCounts(windowed={'uncached': 1}, stock={'attention weights are wanted': 1})
    """
    handle = _find_handle(model)
    if handle is None or handle.plan is None:
        return Status(patched=False)
    return Status(
        patched=True,
        layout=handle.layout,
        backend=handle.backend,
        window=handle.plan.window,
        sliding_layers=handle.plan.sliding,
        layers=len(handle.plan.layers),
        irregular=tuple(handle._log.irregular()),
        calls=handle._calls.now(),
    )


@dataclass(frozen=True)
class Status:
    """The state of a model.

    Attributes:
        patched: whether it is patched.
        layout, backend: the options it was patched with.
        window: keys that a query of a sliding layer sees.
        sliding_layers: indices of the layers that were replaced.
        layers: how many layers the model has.
        irregular: replaced attributes that somebody has changed since; undo refuses while there are any.
        calls: what happened to its calls since the patch.
    """

    patched: bool
    layout: str | None = None
    backend: str | None = None
    window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    layers: int = 0
    irregular: tuple[str, ...] = ()
    calls: CallCounts = field(default_factory=CallCounts)


class PatchHandle:
    """What :func:`patch` returns. As a context manager it undoes the patch on leaving the block.

    Attributes:
        model: the patched model.
        plan: what was found in its config; None when swapatch was switched off.
        layout, backend, compile_layers: the options of the patch.

    >>> handle = patch(model)
    >>> handle.active, handle.plan.window
    (True, 64)
    >>> handle.undo()
    >>> handle
    <swapatch: Gemma3ForCausalLM, 5 of 6 layers, window 64, anchored 128 rows, windowed/cpu, inactive>
    """

    def __init__(
        self, model: Any, plan: ModelPlan | None, layout: str, backend: str, compile_layers: Any, log: UndoLog
    ) -> None:
        self.model = model
        self.plan = plan
        self.layout = layout
        self.backend = backend
        self.compile_layers = compile_layers
        self._log = log
        self._calls = Calls()

    @property
    def active(self) -> bool:
        """Whether the patch is in place."""
        return bool(self._log.slots)

    def undo(self) -> None:
        """Put the model back exactly as it was. Calling it again does nothing.

        Raises:
            PatchConflictError: somebody has wrapped a replaced method since; nothing is changed.
        """
        if self.active:
            self._log.undo()
            logger.info("undone: %r", self)

    def __enter__(self) -> PatchHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        name, state = type(self.model).__name__, "active" if self.active else "inactive"
        if self.plan is None:
            return f"<swapatch: {name}, switched off, {state}>"
        layers = f"{len(self.plan.sliding)} of {len(self.plan.layers)} layers"
        rows = f"window {self.plan.window}, {self.layout} {LAYOUTS[self.layout].base_rows(self.plan.window)} rows"
        compiled = ", compiled layers" if self.compile_layers else ""
        return f"<swapatch: {name}, {layers}, {rows}, {_in_force(self.backend, self.model)}{compiled}, {state}>"


@dataclass
class _Parts:
    """The modules of a model that are touched, with their names; ``whole`` where a backend computes global layers."""

    family: Family
    text: tuple[str, nn.Module]
    layers: list[tuple[str, nn.Module]]
    attentions: list[tuple[str, nn.Module]]
    whole: bool
    outer: list[tuple[str, nn.Module]]
    generators: list[tuple[str, nn.Module]]


def _check_transformers(plan: ModelPlan, strict: bool) -> None:
    family = family_of(plan.model_type)
    check_version(strict)
    check_signatures(
        {
            family.attention.forward: ("hidden_states", "position_embeddings", "attention_mask"),
            family.text_model.forward: ("attention_mask", "position_ids", CACHE_NAME),
            getattr(GenerationMixin, PREPARE_CACHE): ("model_kwargs",),
            create_masks_for_generate: ("config", "inputs_embeds", "attention_mask", CACHE_NAME),
        }
    )


def _find_handle(model: Any) -> PatchHandle | None:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((vars(module)[_HANDLE] for module in modules if _HANDLE in vars(module)), None)


def _covers(handle: PatchHandle, model: nn.Module) -> bool:
    """Whether the patch reaches all of a model, and not only a part of it that was patched by itself."""
    patched = {id(slot.owner) for slot in handle._log.slots}
    return all(id(module) in patched for module in model.modules() if isinstance(module, GenerationMixin))


def _locate(model: Any, plan: ModelPlan, backend: str) -> _Parts:
    """Find what to touch, and refuse what does not look as expected."""
    family = family_of(plan.model_type)
    named = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    for name, module in named.items():
        if left := [attribute for attribute in vars(module) if attribute.startswith(ADAPTED)]:
            raise UnsupportedModelError(
                explain(
                    f"{left[0]} on {name or type(model).__name__}: a model that was prepared for Spyre already",
                    "a model as transformers loads it: a prepared one calls neither self_attn.forward nor a cache, "
                    "so that a patch would change nothing",
                    "load it by transformers and patch that, or go on with the adapter alone",
                )
            )
    texts = [name for name, module in named.items() if isinstance(module, family.text_model)]
    if len(texts) != 1:
        raise UnsupportedModelError(
            explain(
                f"{len(texts)} modules of class {family.text_model.__name__} in {type(model).__name__}",
                "a loaded model with exactly one",
                "pass the model itself, not its config or a collection",
            )
        )
    prefix = f"{texts[0]}.layers" if texts[0] else "layers"
    whole = choose(backend, next(model.parameters()).device).whole
    names = [f"{prefix}.{i}" for i in range(len(plan.layers))]
    if lacking := [f"{name}.self_attn" for name in names if f"{name}.self_attn" not in named]:
        raise UnsupportedModelError(
            explain(
                f"no module {lacking[0]} of its own, and {len(plan.layers)} layers in the config",
                "a model whose layers are those of its config, each with attention of its own",
                "set num_hidden_layers and layer_types to what the model has, and share no layer",
            )
        )
    layers = [(name, named[name]) for name in names]
    attentions = [(f"{name}.self_attn", named[f"{name}.self_attn"]) for name in names]
    for name, attention in attentions:
        _check_attention(name, attention, family)
    generators = [(name, module) for name, module in named.items() if isinstance(module, GenerationMixin)]
    around = family.outer_model
    outer = [(name, module) for name, module in named.items() if around and isinstance(module, around)]
    return _Parts(family, (texts[0], named[texts[0]]), layers, attentions, whole, outer, generators)


def _check_attention(name: str, attention: nn.Module, family: Family) -> None:
    stock = family.attention.forward
    if type(attention).forward is not stock:
        raise UnsupportedModelError(
            explain(
                f"{name} of class {type(attention).__name__}, with a forward of its own",
                f"{family.attention.__name__}, or a class that leaves its forward alone",
                "use the model as it is, unpatched",
            )
        )
    slot = forward_slot(attention)
    found = vars(attention).get(slot, MethodType(type(attention).forward, attention))
    if getattr(found, "__func__", found) is not stock or not is_known(stock):
        raise PatchConflictError(
            explain(
                f"{name}.{slot} is {getattr(found, '__qualname__', found)!s}",
                f"{stock.__qualname__} as transformers has it",
                "take that replacement off before patching",
            )
        )


def _apply(handle: PatchHandle, plan: ModelPlan, parts: _Parts) -> None:
    log = handle._log
    text = parts.text[1]
    log.set(_HANDLE, text, _HANDLE, handle)  # taken off last: an undo that was interrupted finds it again
    for name, attention in parts.attentions:
        slot = forward_slot(attention)
        log.set(f"{name}.{slot}", attention, slot, MethodType(forward, attention))
        shown = partial(_describe, attention, plan.window, handle.layout, handle.backend)
        log.set(f"{name}.extra_repr", attention, "extra_repr", shown)  # for print(model)
    if compiled := handle.compile_layers:
        options_of_torch = {} if compiled is True else compiled
        for name, layer in parts.layers:
            log.set(f"{name}.{COMPILED}", layer, COMPILED, CompiledLayer(layer, options_of_torch))
    options = Options(
        parts.family, handle.layout, handle.backend, text, not plan.bidirectional, parts.whole, handle._calls
    )
    inner = [module for _, module in (*parts.outer, parts.text)]
    for name, generator in parts.generators:
        prefix = f"{name}." if name else ""
        wrapper = MethodWrapper(getattr(generator, PREPARE_CACHE), CacheMaker(handle.layout))
        log.set(f"{prefix}{PREPARE_CACHE}", generator, PREPARE_CACHE, wrapper)
        stock = getattr(generator, MAKE_MASKS, create_masks_for_generate)
        log.set(f"{prefix}{MAKE_MASKS}", generator, MAKE_MASKS, StepMaker(stock, options, (generator, *inner)))
    for name, module in (*parts.outer, parts.text):
        slot = forward_slot(module)
        log.set(f"{name}.{slot}" if name else slot, module, slot, ModelForward(options, module))


def _describe(attention: nn.Module, window: int, layout: str, backend: str) -> str:
    """What ``print(model)`` shows of a patched layer."""
    return f"swapatch: window {window}, {layout}, {_in_force(backend, attention)}"


def _in_force(backend: str, module: nn.Module) -> str:
    """The backend that computes where a module is now, and the type of that device: ``"windowed/cpu"``."""
    device = next(module.parameters()).device
    return f"{choose(backend, device).name}/{device.type}"
