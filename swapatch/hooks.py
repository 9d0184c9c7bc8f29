"""The hooks around the text model's forward, where a step begins and ends.

Before the text model runs, a hook looks at the call. If swapatch computes it, the call goes on with a
:class:`~swapatch.step.Step` in the place of the sliding mask. If not (attention weights wanted, a ready-made mask,
another kernel), the layers get a mask or None as ever, and run their stock code.

A compiler reads all of this like any other code of the model. Only a call on a compact cache begins outside of the
graph: there positions are numbers, and rows may have to move.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._compat import CACHE_NAME, CACHE_NAMES, cache_in
from ._errors import CacheStateError, explain
from .attention import is_traced
from .attention.windowed import is_replaced
from .backends import ModelCall, choose
from .cache import CompactCache, make_cache
from .calls import Calls
from .families import Family
from .geometry import Span
from .masks import global_mask, rule_name
from .plan import GLOBAL, SLIDING, text_config
from .step import FixedRowStep, Step
from .switch import is_disabled

logger = logging.getLogger("swapatch")

KNOWN_ATTENTION = ("sdpa", "eager")
"""Attention implementations that swapatch stands in for; with another one the stock code attends compact rows."""


@dataclass(frozen=True)
class Options:
    """How a model is patched.

    Attributes:
        family: of the model.
        layout: how the sliding buffers are laid out.
        backend: who computes the attention.
        text: the text model.
        causal: whether no token ever sees a later one; else tokens of one image see each other both ways.
        calls: counts what happens.
    """

    family: Family
    layout: str
    backend: str
    text: Any
    causal: bool
    calls: Calls = field(default_factory=Calls)


class Left(str):
    """In words, why a call is left to stock."""

    __slots__ = ()


class EntryHook:
    """The hook before a model's forward: puts a :class:`Step` into the call, and a cache where one is missing.

    It sits on the text model, and on the model around it, which makes the masks when there are images.

    Args:
        options: of the patch.
        module: that the hook is for: the text model, or the one around it.
    """

    def __init__(self, options: Options, module: nn.Module) -> None:
        self.options = options
        self.is_text = module is options.text
        self.types_name = None if self.is_text or options.causal else options.family.types_name
        self.names = tuple(inspect.signature(type(module).forward).parameters)[1:]  # without self

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = {**dict(zip(self.names, args)), **kwargs}  # noqa: B905  # as many as were given
        given = [call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None]
        if len(given) != 1:
            return None
        step = _sliding_mask(call)
        if isinstance(step, Step):  # begun outside, or by the hook of the model around this one
            weights = self.is_text and _wanted(call, module.config, "output_attentions")
            if weights and step.stock_masks is not None:
                call["attention_mask"] = step.stock_masks()
                self.options.calls.move(kind_of(step), "attention weights are wanted")
            return (), call
        traced, cache = is_traced(given[0]), cache_in(call)
        made = cache is None and self._makes_cache(module, call, given[0])
        if made:
            cache = make_cache(text_config(module), layout=self.options.layout)
            if cache is not None:
                call = {name: value for name, value in call.items() if name not in CACHE_NAMES}
                call[CACHE_NAME] = cache
        # A cache that holds tokens has positions, which are numbers: that begins outside of the graph.
        begin = self._begin_outside if isinstance(cache, CompactCache) and not made else self._begin
        masks = begin(module, call, given[0], traced)
        if not isinstance(masks, Left):
            call["attention_mask"] = masks
            if traced and isinstance(masks[SLIDING], FixedRowStep):
                self._place(module, call, masks[SLIDING])
        return (), call

    def _makes_cache(self, module: Any, call: dict[str, Any], given: Tensor) -> bool:
        """Whether the forward would make a cache where none was passed, and this hook is the one to do it."""
        if module.training or not _uses_cache(module, call) or is_disabled():
            return False
        if self.is_text:
            return True
        # A vision model makes its masks before there is a cache: by the width of the 2D mask, and for packed sequences.
        padding, positions = call.get("attention_mask"), call.get("position_ids")
        if isinstance(padding, Tensor):
            return padding.ndim != 2 or padding.shape[1] == given.shape[1]
        return positions is None or not (is_traced(positions) or _packed(_segments(positions)))

    def _begin(self, module: Any, call: dict[str, Any], given: Tensor, traced: bool) -> dict[str, Any] | Left:
        """What goes into the call in the place of its attention mask, by layer type."""
        config, cache = text_config(module), cache_in(call)
        like = torch.empty((*given.shape[:2], 0), dtype=_dtype(module, given), device=given.device)
        if isinstance(cache, CompactCache):
            enter(cache, config, like.shape[0])
        positions = call.get("position_ids") if self._may_be_packed(module, call) else None
        if isinstance(reason := why_stock(call, config, self.options.text), Left):
            masks: dict[str, Any] | Left = reason
        else:
            types = call.get(self.types_name or "")
            asked = Request(cache, like, call.get("attention_mask"), types, positions, fixed=traced)
            masks = begin(self.options, config, asked)
        if isinstance(masks, Left):
            if self.is_text:  # else the hook of the text model finds it, too
                self.options.calls.count("stock", masks)
                if not traced:
                    logger.debug("left to stock: %s", masks)
            return masks
        if module.training and torch.is_grad_enabled():
            kind = "training"
        elif cache is None and not _uses_cache(module, call):
            kind = "uncached"
        else:
            kind = kind_of(masks[SLIDING])
        self.options.calls.count("windowed", kind)
        return masks

    _begin_outside = torch.compiler.disable(_begin)  # type: ignore[no-untyped-call]

    def _may_be_packed(self, module: Any, call: dict[str, Any]) -> bool:
        """Whether the masks that this module makes take packed sequences apart, if the positions show any."""
        if call.get("attention_mask") is not None or cache_in(call) is not None:
            return False
        return not self.is_text or not _uses_cache(module, call)

    def _place(self, module: Any, call: dict[str, Any], step: FixedRowStep) -> None:
        """Give the position as a tensor, for stock would count it from a number, which would make a graph of its own.

        Not where somebody who comes after this hook could still want to place the tokens.
        """
        last = next(reversed(module._forward_pre_hooks.values())) is self
        if call.get("position_ids") is None and last and "forward" not in vars(module):
            call["position_ids"] = step.place


class Request(NamedTuple):
    """A call of the model, before it is known what becomes of it.

    Attributes:
        cache: of the call, or None.
        like: stands for the embeddings, ``[batch, tokens, any]``: shape, dtype and device.
        padding: its 2D attention mask, ``[batch, positions]``.
        types: its token types, ``[batch, positions]``, where tokens of one image see each other both ways.
        positions: its position ids, ``[batch or 1, tokens]``, if they may show packed sequences.
        fixed: whether the call is compiled.
        ahead: whether ``generate`` makes the masks, ahead of the call.
    """

    cache: Any
    like: Tensor
    padding: Tensor | None
    types: Tensor | None
    positions: Tensor | None = None
    fixed: bool = False
    ahead: bool = False


def begin(options: Options, config: Any, asked: Request) -> dict[str, Any] | Left:
    """Begin a step: what goes into a call in the place of its attention mask, by layer type.

    Raises:
        SpyreContractError: when the Spyre operator cannot be used.
    """
    cache, like, padding, types, positions, fixed, ahead = asked
    batch, tokens = like.shape[:2]
    place = _place_of(cache, config, tokens, fixed)
    if isinstance(place, Left):
        return place
    if padding is not None and not (isinstance(padding, Tensor) and padding.ndim == 2):
        return Left("a ready-made mask")
    seen, first_key = place
    segments = None
    if cache is None and padding is not None and padding.shape[1] != tokens:
        return Left("a mask for other tokens than those of the call, and no cache")
    if positions is not None:
        segments = _segments(positions).expand(batch, -1)
        if types is not None and not fixed and _packed(segments):
            return Left("packed sequences with images")
    # The global mask first: it reads how long the cache is, and a failure must leave the cache alone.
    full = global_mask(options.family, config, cache, seen, like, padding, types, positions, ahead)
    if torch.is_grad_enabled():  # what is kept for the way back must not be the caller's, who may write over it
        padding, types = (None if given is None else given.clone() for given in (padding, types))
    queries = Span(seen, seen + tokens)
    backend = choose(options.backend, like.device)
    call = ModelCall(
        family=options.family,
        window=config.sliding_window,
        cache=cache,
        queries=queries,
        first_key=first_key,
        like=like,
        padding=padding,
        segments=segments,
        types=types,
        images=rule_name(options.family, ahead),
        causal=options.causal,
        fixed=fixed,
    )
    step = backend.begin(call)
    if isinstance(step, str):
        return Left(step)
    if not fixed:
        logger.debug("positions %d to %d: %s, %s", *queries, type(step).__name__, backend.name)
    return {GLOBAL: full, SLIDING: step}


def _place_of(cache: Any, config: Any, tokens: int, traced: bool) -> tuple[int, int] | Left:
    """Tokens that the sliding layers of a cache have seen, and the position of the first row they will return."""
    if cache is None:
        return 0, 0
    if not hasattr(cache, "get_mask_sizes"):
        return Left(f"a {type(cache).__name__}, which does not say which rows it returns")
    if isinstance(cache, CompactCache):
        seen = cache.sliding[0].seen
        return seen, cache.sliding[0].get_mask_sizes(tokens)[1]
    if tokens == 1 and getattr(cache, "is_compileable", False):
        return Left(f"one token over a {type(cache).__name__}, whose steps have one shape as they are")
    layer = list(config.layer_types).index(SLIDING)
    seen = cache.get_query_offset(layer)
    if isinstance(seen, Tensor) and traced:
        return Left(f"a {type(cache).__name__} that counts on the device, in a compiled graph")
    return int(seen) if isinstance(seen, Tensor) else seen, cache.get_mask_sizes(tokens, layer)[1]


def why_stock(call: dict[str, Any], config: Any, text: Any) -> Left | None:
    """Why our attention does not stand in for stock's in a call, as far as its arguments and the layers say."""
    if not isinstance(cache_in(call), CompactCache) and is_disabled():
        return Left("swapatch is switched off")
    if config._attn_implementation not in KNOWN_ATTENTION:
        return Left(f"attention implementation {config._attn_implementation!r}")
    if _wanted(call, config, "output_attentions"):
        return Left("attention weights are wanted")
    if (getattr(config, "is_causal", True) if call.get("is_causal") is None else call["is_causal"]) is False:
        return Left("is_causal=False")
    if torch.compiler.is_compiling() and is_replaced():
        return Left("torch's attention was replaced, and the call is compiled")
    for attention in sliding_attentions(text):
        if attention.training and attention.attention_dropout:
            return Left("attention dropout")
        if not attention.is_causal:
            return Left("a layer with is_causal=False")
    return None


def sliding_attentions(text: Any) -> list[Any]:
    """The attention modules of the sliding layers of a text model."""
    attentions = [getattr(layer, "self_attn", None) for layer in text.layers]
    return [attention for attention in attentions if getattr(attention, "is_sliding", False)]


def kind_of(step: Step) -> str:
    """Whether a step over a cache is a ``"prefill"`` or a ``"decode"``."""
    return "decode" if step.queries.size == 1 and step.queries.start else "prefill"


def enter(cache: CompactCache, config: Any, batch: int) -> None:
    """Note that a forward begins on a cache.

    Raises:
        CacheStateError: it is another model's, or one that an interrupted forward left half written.
    """
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
    for layer in layers:
        layer.leave_inference_mode()
    cache.begun = lengths[0]
    if lengths[0] and layers[0].keys.shape[0] != batch:
        raise CacheStateError(
            explain(
                f"{batch} sequences for a cache that holds {layers[0].keys.shape[0]}",
                "the same batch in every call on one cache",
                "start a new cache, or use batch_repeat_interleave or batch_select_indices",
            )
        )


def exit_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The hook after the text model's forward: the step is done, its tokens count."""
    step, cache = _sliding_mask(kwargs), cache_in(kwargs)
    if isinstance(step, Step):
        step.done = True
        shared = getattr(output, "shared_kv_states", None)
        if shared and SLIDING in shared:
            shared[SLIDING] = step.time_order(cache, *shared[SLIDING])
    if isinstance(cache, CompactCache):
        cache.begun = None


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, ``self`` left out."""
    call = {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
    call.pop("self", None)
    return call


def _sliding_mask(call: dict[str, Any]) -> Any:
    masks = call.get("attention_mask")
    return masks.get(SLIDING) if isinstance(masks, dict) else masks


def _wanted(call: dict[str, Any], config: Any, name: str) -> bool:
    return bool(getattr(config, name, False) if call.get(name) is None else call[name])


def _uses_cache(module: Any, call: dict[str, Any]) -> bool:
    """Whether the text model will make a cache where none is passed."""
    if getattr(module, "gradient_checkpointing", False) and module.training and torch.is_grad_enabled():
        return False
    asked = call.get("use_cache")
    if asked is None:  # a model around the text model asks its own config first
        asked = getattr(module.config, "use_cache", True) is not False and getattr(
            text_config(module), "use_cache", True
        )
    return bool(asked)


def _segments(positions: Tensor) -> Tensor:
    """The number of the packed sequence that each token belongs to: a new one begins where positions do not go on."""
    return (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def _packed(segments: Tensor) -> bool:
    return bool((segments != 0).any())


def _dtype(module: Any, given: Tensor) -> torch.dtype:
    """What the embeddings are in."""
    if given.is_floating_point():
        return given.dtype
    weight = getattr(module.get_input_embeddings(), "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point():
        return weight.dtype
    return module.dtype  # type: ignore[no-any-return]
