"""Where a call enters the model: a step begins before the text model's forward and ends after it.

The forward of the text model is replaced by one that looks at the call first. If swapatch computes it, the call goes
on with a :class:`~swapatch.step.Step` in the place of the sliding mask. If not (attention weights wanted, a ready-made
mask, another kernel, somebody who could look), the layers get a mask or None as ever, and run their stock code.

::

    ModelForward.__call__    is the call well formed, and the forward known?
      _rewrite               a cache where one is missing; masks, with the step among them
        _masks_for           open_cache (interrupted? same batch?), why_stock, begin_step, count
          begin_step         where the call stands, the global mask, and the backend's step
      the text model runs    its sliding layers: step.forward
      _leave or _take_back

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
from transformers.utils import ModelOutput

from ._compat import CACHE_NAME, CACHE_NAMES, cache_in
from ._errors import CacheStateError, explain
from .attention import is_traced
from .backends import Backend, ModelCall, choose
from .cache import CompactCache, make_cache
from .calls import Calls
from .compiled import is_compiled_alone
from .families import Family
from .foreign import forward_slot, hand_in, has_hand_in_global, is_known, sees_call
from .geometry import Span
from .masks import global_keys, global_mask, rule_name
from .plan import GLOBAL, SLIDING, text_config
from .rules import rule_of
from .step import FixedRowStep, RowStep, Step, forward
from .switch import is_disabled

logger = logging.getLogger("swapatch")

_TOKENS = ("input_ids", "inputs_embeds")
"""The arguments of a model of which it takes one."""

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
        whole: whether the attention of global layers is replaced as well.
        calls: counts what happens.
    """

    family: Family
    layout: str
    backend: str
    text: Any
    causal: bool
    whole: bool = False
    calls: Calls = field(default_factory=Calls)


class Left(str):
    """In words, why a call is left to stock; given in the place of masks."""

    __slots__ = ()


class ModelForward:
    """Replaces the forward of a model: puts a :class:`Step` into the call, and a cache where one is missing.

    It sits on the text model, and on the model around it, which makes the masks when there are images.

    Args:
        options: of the patch.
        module: that the forward is of: the text model, or the one around it.
    """

    def __init__(self, options: Options, module: nn.Module) -> None:
        self.options = options
        self.module = module
        self.is_text = module is options.text
        self.types_name = None if self.is_text or options.causal else options.family.types_name
        cls: Any = options.family.text_model if self.is_text else options.family.outer_model
        self.names = tuple(inspect.signature(cls.forward).parameters)[1:]  # without self
        own = vars(module).get(forward_slot(module))
        # None for that of the class, which a bound method in a pickle would not come back as.
        self.before = None if getattr(own, "__func__", None) is type(module).forward else own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """For who asks for the signature, or for what else is called."""
        return self._stock

    @property
    def _stock(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        return type(self.module).forward.__get__(self.module)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(self.names, args)), **kwargs}  # noqa: B905  # as many as were given
        given = [call[name] for name in _TOKENS if call.get(name) is not None]
        if len(given) != 1 or len(args) > len(self.names):
            return self._stock(*args, **kwargs)
        if is_known(self._stock):
            self._rewrite(call, given[0])
            args, kwargs = (), call
        elif self.is_text:  # whoever has wrapped it is shown the call as it is
            self.options.calls.count("stock", "somebody's own forward of the text model")
        if not self.is_text:
            return self._stock(*args, **kwargs)
        step = _sliding_mask(call)
        lead = step.lead if isinstance(step, Step) and not args else 0
        if lead:
            kwargs = _lengthened(call, lead)
        try:
            output = self._stock(*args, **kwargs)
        except BaseException:
            _take_back(call)
            raise
        _leave(call, output)
        return _shortened(output, given[0].shape[0], given[0].shape[1] + lead, lead) if lead else output

    def _rewrite(self, call: dict[str, Any], given: Tensor) -> None:
        """Change the arguments of a call to what it needs."""
        module, step = self.module, _sliding_mask(call)
        if isinstance(step, Step):  # begun ahead of the call, or by the model around this one
            # In this order: a compiled graph that looks at the masks' maker would be bound to what it holds.
            if self.is_text and _wanted(call, module.config, "output_attentions") and step.stock_masks is not None:
                call["attention_mask"] = step.stock_masks()
                self.options.calls.move(kind_of(step), "attention weights are wanted")
            return
        traced, cache = is_traced(given), cache_in(call)
        made = cache is None and self._makes_cache(module, call, given)
        if made:
            cache = make_cache(text_config(module), layout=self.options.layout)
            if cache is not None:
                for name in CACHE_NAMES:
                    call.pop(name, None)
                call[CACHE_NAME] = cache
        # A cache that holds tokens has positions, which are numbers: that begins outside of the graph.
        masks_for = self._masks_outside if isinstance(cache, CompactCache) and not made else self._masks_for
        masks = masks_for(module, call, given, traced)
        if not isinstance(masks, Left):
            call["attention_mask"] = masks
            step = masks[SLIDING]
            if traced and isinstance(step, FixedRowStep) and self.before is None and call.get("position_ids") is None:
                call["position_ids"] = step.place

    def _makes_cache(self, module: Any, call: dict[str, Any], given: Tensor) -> bool:
        """Whether the forward would make a cache where none was passed, and this module is the one to do it."""
        if module.training or not _uses_cache(module, call) or is_disabled():
            return False
        if self.is_text:
            return True
        # A vision model makes its masks before there is a cache: by the width of the 2D mask, and for packed sequences.
        padding, positions = call.get("attention_mask"), call.get("position_ids")
        if isinstance(padding, Tensor):
            return padding.ndim != 2 or padding.shape[1] == given.shape[1]
        return positions is None or not (is_traced(positions) or _packed(_segments(positions)))

    def _masks_for(self, module: Any, call: dict[str, Any], given: Tensor, traced: bool) -> dict[str, Any] | Left:
        """What goes into the call in the place of its attention mask, by layer type."""
        config, cache = text_config(module), cache_in(call)
        like = stand_in(self.options, given, _dtype(module, given, self.options.text))
        uneven = open_cache(cache, config, like.shape[0]) if isinstance(cache, CompactCache) else None
        positions = call.get("position_ids") if self._may_be_packed(module, call) else None
        between = () if self.is_text else (self.options.text,)
        if isinstance(reason := uneven or why_stock(call, config, self.options, between), Left):
            masks: dict[str, Any] | Left = reason
        else:
            types = call.get(self.types_name or "")
            asked = Request(cache, like, given.device, call.get("attention_mask"), types, positions, fixed=traced)
            masks = begin_step(self.options, config, asked)
        if isinstance(masks, Left):
            if self.is_text:  # else the text model finds it, too
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

    _masks_outside = torch.compiler.disable(_masks_for)  # type: ignore[no-untyped-call]

    def _may_be_packed(self, module: Any, call: dict[str, Any]) -> bool:
        """Whether the masks that this module makes take packed sequences apart, if the positions show any."""
        if call.get("attention_mask") is not None or cache_in(call) is not None:
            return False
        return not self.is_text or not _uses_cache(module, call)


class Request(NamedTuple):
    """A call of the model, before it is known what becomes of it.

    Attributes:
        cache: of the call, or None.
        like: stands for the embeddings, ``[batch, tokens, any]``: shape, dtype, and the device where masks are made.
        device: where the model is.
        padding: its 2D attention mask, ``[batch, positions]``.
        types: its token types, ``[batch, positions]``, where tokens of one image see each other both ways.
        positions: its position ids, ``[batch or 1, tokens]``, if they may show packed sequences.
        fixed: whether the call is compiled.
        ahead: whether ``generate`` makes the masks, ahead of the call.
    """

    cache: Any
    like: Tensor
    device: torch.device
    padding: Tensor | None
    types: Tensor | None
    positions: Tensor | None = None
    fixed: bool = False
    ahead: bool = False


def stand_in(options: Options, given: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands for the embeddings of given tokens, ``[batch, tokens, ...]``, where masks are made for them."""
    device = "cpu" if choose(options.backend, given.device).host_masks else given.device
    return torch.empty((*given.shape[:2], 0), dtype=dtype, device=device)


def begin_step(options: Options, config: Any, asked: Request) -> dict[str, Any] | Left:
    """Begin a step: what goes into a call in the place of its attention mask, by layer type.

    Raises:
        SpyreContractError: when the Spyre operator cannot be used.
    """
    cache, like, device, padding, types, positions, fixed, ahead = asked
    batch, tokens = like.shape[:2]
    place = _place_of(cache, config, tokens, fixed)
    if isinstance(place, Left):
        return place
    if padding is not None and not (isinstance(padding, Tensor) and padding.ndim == 2):
        return Left("a ready-made mask")
    seen, keys = place
    if like.device != device:
        padding, types, positions = (None if given is None else given.cpu() for given in (padding, types, positions))
    segments = None
    if cache is None and padding is not None and padding.shape[1] != tokens:
        return Left("a mask for other tokens than those of the call, and no cache")
    if positions is not None:
        segments = _segments(positions).expand(batch, -1)
        if types is not None and not fixed and _packed(segments):
            return Left("packed sequences with images")
    if torch.is_grad_enabled():  # what is kept for the way back must not be the caller's, who may write over it
        padding, types = (None if given is None else given.clone() for given in (padding, types))
    queries = Span(seen, seen + tokens)
    backend = choose(options.backend, device)
    call = ModelCall(
        family=options.family,
        config=config,
        cache=cache,
        queries=queries,
        keys=keys,
        like=like,
        device=device,
        rule=rule_of(config.sliding_window, padding, segments, rule_name(options.family, ahead), types),
        causal=options.causal,
        fixed=fixed,
        whole=options.whole,
    )
    masks: dict[str, Any] = {}
    if GLOBAL not in backend.kinds(call):
        # First: it reads how long the cache is, and a failure must leave the cache alone.
        masks[GLOBAL] = _begin_global(options, call, backend, positions, ahead)
    steps = backend.begin(call)
    if isinstance(steps, str):
        return Left(steps)
    if not fixed:
        logger.debug("positions %d to %d: %s, %s", *queries, type(steps[SLIDING]).__name__, backend.name)
    return {**masks, **steps}


def _begin_global(options: Options, call: ModelCall, backend: Backend, positions: Any, ahead: bool) -> Any:
    """What goes to the global layers: None where transformers makes no mask; a step where that would be a large one."""
    config, cache, queries = call.config, call.cache, call.queries
    if GLOBAL not in config.layer_types:
        return None
    keys = global_keys(cache, queries.start, queries.size)
    sdpa = config._attn_implementation == "sdpa"
    if queries.size == 1 and getattr(cache, "is_compileable", False):
        if sdpa and call.rule.types is None:  # the rows of all positions, so that decode steps have one shape
            rows = Span(keys.start, queries.stop)
            allowed = call.rule.rows_allowed(rows, [Span(0, rows.size)], keys.size, call.like.device)
            return allowed.expand(call.like.shape[0], -1, -1, -1).to(call.device)
    elif queries.size > 1 or not call.fixed:
        unread = any(map(is_traced, call.rule.tensors))
        alone = not call.fixed and is_compiled_alone(options.text.layers[0])
        if sdpa and not (alone or unread) and call.rule.is_plain(queries, keys):
            return None
        if not has_hand_in_global(config, options.text, forward) and (step := backend.begin_global(call, keys)):
            return step
    padding, types = call.rule.padding, call.rule.types
    full = global_mask(call.family, config, cache, queries.start, call.like, padding, types, positions, ahead)
    return full if full is None or call.like.device == call.device else full.to(call.device)


def _place_of(cache: Any, config: Any, tokens: int, traced: bool) -> tuple[int, Span] | Left:
    """Tokens that the sliding layers of a cache have seen, and the positions of the rows that they will return."""
    if cache is None:
        return 0, Span(0, tokens)
    if not hasattr(cache, "get_mask_sizes"):
        return Left(f"a {type(cache).__name__}, which does not say which rows it returns")
    if isinstance(cache, CompactCache) and (layers := cache.bounded):
        rows, first = layers[0].get_mask_sizes(tokens)
        return layers[0].seen, Span(first, first + rows)
    if tokens == 1 and getattr(cache, "is_compileable", False):
        return Left(f"one token over a {type(cache).__name__}, whose steps have one shape as they are")
    layer = list(config.layer_types).index(SLIDING)
    seen = cache.get_query_offset(layer)
    if isinstance(seen, Tensor) and traced:
        return Left(f"a {type(cache).__name__} that counts on the device, in a compiled graph")
    rows, first = cache.get_mask_sizes(tokens, layer)
    return int(seen) if isinstance(seen, Tensor) else seen, Span(first, first + rows)


def why_stock(call: dict[str, Any], config: Any, options: Options, between: tuple[nn.Module, ...] = ()) -> Left | None:
    """Why our attention does not stand in for stock's in a call, as far as its arguments and the model say.

    Args:
        call: its arguments.
        config: of the text model.
        options: of the patch.
        between: the modules that hand on the masks, from where they are made to the text model.
    """
    if not isinstance(cache_in(call), CompactCache) and is_disabled():
        return Left("swapatch is switched off")
    if config._attn_implementation not in KNOWN_ATTENTION:
        return Left(f"attention implementation {config._attn_implementation!r}")
    if _wanted(call, config, "output_attentions"):
        return Left("attention weights are wanted")
    if (getattr(config, "is_causal", True) if call.get("is_causal") is None else call["is_causal"]) is False:
        return Left("is_causal=False")
    if torch._C._get_tracing_state() is not None:
        return Left("torch.jit.trace")
    if any(map(sees_call, between)):
        return Left("somebody who sees the masks on their way")
    reason = hand_in(config, options.family, options.text, forward, options.whole)
    return None if reason is None else Left(reason)


def kind_of(step: Step) -> str:
    """Whether a step over a cache is a ``"prefill"`` or a ``"decode"``."""
    return "decode" if step.queries.size == 1 and step.queries.start else "prefill"


def open_cache(cache: CompactCache, config: Any, batch: int) -> Left | None:
    """Note that a forward begins on a cache. Says so if its layers have not seen the same tokens.

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
    own = [layer for layer in cache.own if layer.settle()]
    layers = cache.bounded
    if layers is None:
        return None
    lengths = cache.lengths()
    different = {(layer.seen, layer.origin): layer for layer in layers}.values()  # one, hardly ever more
    if cache.lengths_before not in (None, lengths) or any(layer.torn for layer in different):
        raise CacheStateError(
            explain(
                f"layers that have seen {sorted(set(lengths))} tokens, {sum(layer.torn for layer in layers)} of them "
                "lack rows",
                "a cache whose layers have seen all tokens of a call, or none",
                "start a new cache: an interrupted forward left this one half written",
            )
        )
    for layer in own:
        layer.leave_inference_mode()
    held = next((layer.key_rows.shape[0] for layer in layers if layer.seen), batch)
    if held != batch:
        raise CacheStateError(
            explain(
                f"{batch} sequences for a cache that holds {held}",
                "the same batch in every call on one cache",
                "start a new cache, or use batch_repeat_interleave or batch_select_indices",
            )
        )
    cache.lengths_before = lengths
    return None if len({layer.seen for layer in different}) == 1 else Left("layers that took no part in every call")


def _leave(call: dict[str, Any], output: Any) -> None:
    """After the text model's forward."""
    masks, cache = call.get("attention_mask"), cache_in(call)
    if isinstance(masks, dict) and (shared := getattr(output, "shared_kv_states", None)):
        for kind, step in masks.items():
            if isinstance(step, Step) and kind in shared:
                shared[kind] = step.time_order(cache, *shared[kind])
    if isinstance(cache, CompactCache):
        cache.lengths_before = None


def _take_back(call: dict[str, Any]) -> None:
    """The text model's forward failed: a token that was written in place was not seen."""
    masks, cache = call.get("attention_mask"), cache_in(call)
    if isinstance(masks, dict) and isinstance(cache, CompactCache):
        for step in masks.values():
            if isinstance(step, RowStep):  # others have written over rows that are visible without them
                for layer in cache.own:
                    layer.take_back(step)


def _lengthened(call: dict[str, Any], lead: int) -> dict[str, Any]:
    """A call of the text model with ``lead`` rows in front of its tokens, added on the CPU.

    There it is no work for a compiler, which a card would have for each number of tokens.
    """
    longer = dict(call)
    device = next(call[name] for name in _TOKENS if call.get(name) is not None).device
    if longer.get("position_ids") is None:
        longer["position_ids"] = torch.arange(*_sliding_mask(call).queries)[None]
    for name in (*_TOKENS, "per_layer_inputs", "position_ids"):
        if (rows := longer.get(name)) is not None:
            host = rows.cpu()
            # The first token again: whatever a model does with tokens, it can do with these.
            longer[name] = torch.cat([host[:, :1].expand(-1, lead, *host.shape[2:]), host], dim=1).to(device)
    if isinstance(kept := longer.get("logits_to_keep"), Tensor):
        longer["logits_to_keep"] = torch.where(kept < 0, kept, kept + lead)
    elif kept:
        longer["logits_to_keep"] = min(kept, _sliding_mask(call).queries.size)
    return longer


def _shortened(output: Any, batch: int, rows: int, lead: int) -> Any:
    """What the text model gives, of ``rows`` rows, without those that were put in front."""
    if isinstance(output, Tensor):
        if output.ndim == 2 and output.shape[0] == batch * rows:  # of a router: sequences in one
            return output.view(batch, rows, -1)[:, lead:].flatten(0, 1)
        return output[:, lead:] if output.ndim > 2 and output.shape[:2] == (batch, rows) else output
    if isinstance(output, tuple):
        return tuple(_shortened(part, batch, rows, lead) for part in output)
    if isinstance(output, ModelOutput):
        for name in list(output):
            output[name] = _shortened(output[name], batch, rows, lead)
    return output


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, ``self`` left out."""
    call = dict(kwargs)
    if args:  # else there is no need to look for names, which takes a while
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


_FLOWING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _dtype(module: Any, given: Tensor, text: Any) -> torch.dtype:
    """What the embeddings are in; of quantized ones that cannot be told from their weight, but from a norm's."""
    if given.is_floating_point():
        return given.dtype
    weights = (getattr(module.get_input_embeddings(), "weight", None), getattr(text.norm, "weight", None))
    return next(
        (weight.dtype for weight in weights if isinstance(weight, Tensor) and weight.dtype in _FLOWING),
        torch.get_default_dtype(),
    )
