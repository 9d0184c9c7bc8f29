"""The hooks around the text model's forward, where a step begins and ends.

Before the text model runs, a hook looks at the call. If swapatch handles it, the call goes on with a
:class:`~swapatch.step.Step` in the place of the sliding mask. If not (training, a cache of another kind, attention
weights wanted, a ready-made mask), the layers get a mask or None as ever, and run their stock code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import CACHE_NAME, CACHE_NAMES, cache_in
from ._errors import CacheStateError, explain
from .attention import BACKENDS, choose, spyre
from .cache import CompactCache, make_cache
from .geometry import Span
from .masks import CausalWindow, ImageWindow, MaskMaker, global_mask
from .plan import GLOBAL, SLIDING, text_config
from .spyre_step import SpyreDecode, SpyrePrefill
from .step import DecodeStep, FixedStep, Step
from .switch import is_disabled

logger = logging.getLogger("swapatch")

FAST_ATTENTION = ("sdpa", "eager")
"""Attention implementations that swapatch stands in for; with another one the stock code attends compact rows."""


@dataclass(frozen=True)
class Options:
    """How a model is patched.

    Attributes:
        layout: how the sliding buffers are laid out.
        backend: who computes the attention.
        causal: whether no token ever sees a later one; else tokens of one image see each other both ways.
    """

    layout: str
    backend: str
    causal: bool


@dataclass
class StepHook:
    """The hook before a model's forward: puts a :class:`Step` into the call, and a cache where one is missing.

    It sits on the text model, and on the vision model around it, which makes the masks when there is one.

    Attributes:
        options: of the patch.
        maker: makes masks as the module would; its first argument is the text config.
        types_name: the module's argument for token types, where tokens of one image see each other both ways.
    """

    options: Options
    maker: MaskMaker
    types_name: str | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # positions are numbers here, and only here
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _by_name(module, args, kwargs)
        given = [call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None]
        if len(given) != 1:
            return None
        config, cache = text_config(module), cache_in(call)
        if _needs_gradients(module, given[0]):
            _leave_to_stock(cache, config, given[0], "gradients are on")
            return None
        if isinstance(step := _sliding_mask(call), Step):
            if step.stock_masks is not None and _wanted(call, config, "output_attentions"):
                call["attention_mask"] = step.stock_masks()
            return (), call
        if cache is None and self._makes_cache(module, call) and not is_disabled():
            cache = make_cache(config, layout=self.options.layout)
            if cache is not None:
                call = {name: value for name, value in call.items() if name not in CACHE_NAMES}
                call[CACHE_NAME] = cache
        if isinstance(cache, CompactCache) and is_fast(call, config):
            batch, tokens = given[0].shape[:2]
            like = torch.empty((batch, tokens, 0), dtype=_dtype(module, given[0]), device=given[0].device)
            types = call.get(self.types_name or "")
            masks = begin(cache, config, like, call.get("attention_mask"), types, self.maker, self.options)
            call["attention_mask"] = masks
            if call.get("position_ids") is None:
                # As stock counts them, but here: a compiled forward would take the length for a constant.
                positions = torch.arange(*masks[SLIDING].queries, device=given[0].device)
                call["position_ids"] = positions.unsqueeze(0)
        else:
            _leave_to_stock(cache, config, given[0], config._attn_implementation)
        return (), call

    def _makes_cache(self, module: Any, call: dict[str, Any]) -> bool:
        """Whether the forward would make a cache where none was passed, and this hook is the one to do it."""
        config = text_config(module)
        asked = _wanted(call, config, "use_cache")
        if not asked or (call.get("use_cache") is None and getattr(module.config, "use_cache", True) is False):
            return False
        # A vision model makes its masks before there is a cache, and takes sequences apart that positions show packed.
        return module.config is config or call.get("attention_mask") is not None or not _packed(call)


def begin(
    cache: CompactCache,
    config: Any,
    like: Tensor,
    padding: Tensor | None,
    types: Tensor | None,
    maker: MaskMaker,
    options: Options,
) -> dict[str, Any]:
    """Begin a step: what goes into a call in the place of its attention mask, by layer type.

    Args:
        cache: the cache of the call.
        config: of the text model that is called.
        like: stands for the embeddings, ``[batch, tokens, any]``.
        padding: the 2D attention mask of the call.
        types: its token types, where tokens of one image see each other both ways.
        maker: makes the masks of the call as the model would; its first argument is the config.
        options: of the patch.

    Raises:
        CacheStateError: when the cache is half written, or made for another window or number of sequences.
        SpyreContractError: when the Spyre operator cannot be used.
    """
    batch, tokens = like.shape[:2]
    backend = choose(options.backend, like.device)
    _enter(cache, config, batch)
    maker = partial(maker, config)
    if backend == "spyre":
        spyre.operator()
        spyre.check_dtype(like.dtype)
    # The global mask first: it reads how long the cache is, and a failure must leave the cache alone.
    full = global_mask(maker, cache, like, padding, types)
    if backend == "spyre":  # masks are made on the CPU
        padding, types = (None if given is None else given.cpu() for given in (padding, types))
    layers = cache.sliding
    window, seen = cache.plan.window, layers[0].seen
    rule = CausalWindow(window, padding) if types is None else ImageWindow(window, padding, maker, types)
    queries = Span(seen, seen + tokens)
    attention = BACKENDS.get(backend, BACKENDS["windowed"])
    many = tokens > 1 or not seen or types is not None
    if not many:
        for layer in layers:
            layer.make_room(1)
    step: Step
    if many and backend == "spyre":
        step = SpyrePrefill(cache, rule, queries, attention, batch=batch, dtype=like.dtype, causal=options.causal)
    elif many:
        step = Step(cache, rule, queries, attention)
    elif backend == "spyre":
        step = SpyreDecode(cache, rule, queries, attention)
    else:
        step = (FixedStep if cache.fixed else DecodeStep)(cache, rule, queries, attention)
    logger.debug("positions %d to %d: %s, %s, %r", *queries, type(step).__name__, backend, layers[0])
    return {GLOBAL: full, SLIDING: step}


def _packed(call: dict[str, Any]) -> bool:
    """Whether the positions of a call, ``[batch, tokens]``, start anew in the middle of a row."""
    positions = call.get("position_ids")
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _leave_to_stock(cache: Any, config: Any, given: Tensor, why: str) -> None:
    if isinstance(cache, CompactCache):
        _enter(cache, config, given.shape[0])
    logger.debug("left to stock: %s cache, %s", type(cache).__name__, why)


def _enter(cache: CompactCache, config: Any, batch: int) -> None:
    """Refuse a cache that is another model's or that an interrupted forward left half written; note that one begins."""
    if cache.plan.window != config.sliding_window:
        raise CacheStateError(
            explain(
                f"a cache for a window of {cache.plan.window}, and a model with {config.sliding_window}",
                "a cache that was made for the model",
                "make one from it: swapatch.CompactCache(model)",
            )
        )
    layers, lengths = cache.sliding, cache.lengths()
    if len(lengths) > 1 or any(layer.torn for layer in layers):
        raise CacheStateError(
            explain(
                f"layers that have seen {lengths} tokens, {sum(layer.torn for layer in layers)} of them lack rows",
                "a cache whose layers have all seen the same tokens",
                "start a new cache: an interrupted forward left this one half written",
            )
        )
    cache.begun = lengths[0]
    if lengths[0] and layers[0].keys.shape[0] != batch:
        raise CacheStateError(
            explain(
                f"{batch} sequences for a cache that holds {layers[0].keys.shape[0]}",
                "the same batch in every call on one cache",
                "start a new cache, or use batch_repeat_interleave or batch_select_indices",
            )
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def commit_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The hook after the text model's forward: the step is done, its tokens count."""
    step, cache = _sliding_mask(kwargs), cache_in(kwargs)
    if isinstance(step, Step):
        step.commit()
        shared = getattr(output, "shared_kv_states", None)
        if shared and SLIDING in shared:
            shared[SLIDING] = step.shared(*shared[SLIDING])
    if isinstance(cache, CompactCache):
        cache.begun = None


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return by_name(type(module).forward, (module, *args), kwargs) if args else dict(kwargs)


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, ``self`` left out."""
    call = {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
    call.pop("self", None)
    return call


def _sliding_mask(call: dict[str, Any]) -> Any:
    masks = call.get("attention_mask")
    return masks.get(SLIDING) if isinstance(masks, dict) else masks


def _needs_gradients(module: nn.Module, given: Tensor) -> bool:
    """Whether anybody may want to go backward through this call; then it is all stock's."""
    if module.training:
        return True
    return torch.is_grad_enabled() and (given.requires_grad or any(p.requires_grad for p in module.parameters()))


def is_fast(call: dict[str, Any], config: Any) -> bool:
    """Whether our attention stands in for stock's: not for weights wanted, ready-made masks, other kernels or rules."""
    padding = call.get("attention_mask")
    flat = padding is None or (isinstance(padding, Tensor) and padding.ndim == 2)
    causal = getattr(config, "is_causal", True) if call.get("is_causal") is None else call["is_causal"]
    known = config._attn_implementation in FAST_ATTENTION and causal is not False
    return flat and known and not _wanted(call, config, "output_attentions")


def _wanted(call: dict[str, Any], config: Any, name: str) -> bool:
    return bool(getattr(config, name, False) if call.get(name) is None else call[name])


def _dtype(module: nn.Module, given: Tensor) -> torch.dtype:
    if given.is_floating_point():
        return given.dtype
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]
