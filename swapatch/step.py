"""One forward of the model, seen from its sliding layers.

Before the text model runs, a hook looks at the call. If swapatch handles it, the call goes on with a :class:`Step` in
the place of the sliding mask, and each sliding layer finds there where to write and what to attend. If not (training,
a cache of another kind, attention weights wanted, a ready-made mask), the layers get a mask or None as ever, and run
their stock code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import CACHE_NAME, cache_in
from ._errors import CacheStateError, explain
from .attention import BACKENDS, Attention
from .attention.windowed import PREFILL_BLOCK
from .cache import CompactCache
from .geometry import Span, past_size
from .masks import CausalWindow, ImageWindow, MaskMaker, Rectangle, global_mask
from .plan import GLOBAL, SLIDING, text_config
from .switch import is_disabled

FAST_ATTENTION = ("sdpa", "eager")
"""Attention implementations that swapatch stands in for; with another one the stock code attends compact rows."""


class Step:
    """Some new tokens over a cache: where each sliding layer writes and what its queries see.

    Args:
        cache: the cache of this call.
        rule: who sees whom.
        queries: positions of the new tokens.
        attention: computes one rectangle.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        self.cache = cache
        self.rule = rule
        self.queries = queries
        self.attention = attention
        self.keys = self._keys(queries, rule.window)
        self.stock_masks: Callable[[], Any] | None = None
        self._rectangles: dict[tuple[object, ...], list[Rectangle]] = {}

    @staticmethod
    def _keys(queries: Span, window: int) -> Span:
        """Positions of the keys that :meth:`write` returns."""
        return Span(queries.start - past_size(queries.start, window), queries.stop)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # counters move here, and prompts come in any length
    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new rows, ``[batch, kv_heads, tokens, head_dim]``; return all keys and values to attend."""
        keys, values = self.cache.layers[layer].update(key, value)
        return keys, values

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Windowed attention.

        Args:
            query: ``[batch, heads, tokens, head_dim]``.
            keys, values: ``[batch, kv_heads, rows, head_dim]``, as :meth:`write` returned them.
            scale: multiplies the scores.

        Returns:
            ``[batch, tokens, heads, head_dim]``
        """
        rectangles = self.rectangles(query)
        if len(rectangles) == 1:
            _, seen, mask, causal = rectangles[0]
            part = self.attention(query, _rows(keys, seen), _rows(values, seen), mask, causal, scale)
            return part.transpose(1, 2)
        batch, heads, tokens, dim = query.shape
        out = query.new_empty((batch, tokens, heads, dim))
        for rows, seen, mask, causal in rectangles:
            part = self.attention(_rows(query, rows), _rows(keys, seen), _rows(values, seen), mask, causal, scale)
            out[:, rows.start : rows.stop] = part.transpose(1, 2)
        return out

    def rectangles(self, like: Tensor) -> list[Rectangle]:
        """What to compute, the same for every layer, made at the first one."""
        name = (like.dtype, like.device)
        if name not in self._rectangles:
            self._rectangles[name] = self._make_rectangles(like)
        return self._rectangles[name]

    def _make_rectangles(self, like: Tensor) -> list[Rectangle]:
        return self.rule.rectangles(self.queries, self.keys, like, PREFILL_BLOCK)

    def commit(self) -> None:
        """Called once the text model has run."""

    def __getitem__(self, index: tuple[Any, Any, slice, Any]) -> Step:
        """The step for some of its queries, sliced as the mask in whose place it stands, ``[:, :, queries]``.

        Gemma 4 drops queries that nobody needs before the layers that write nothing of their own.
        """
        start, stop, _ = index[2].indices(self.queries.size)
        part = copy(self)
        part.queries = Span(self.queries.start + start, self.queries.start + stop)
        part._rectangles = {}
        return part

    def shared(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What a caller gets who asked for the keys and values that layers shared: in time order, and his own."""
        return keys, values


class DecodeStep(Step):
    """One token: written in place into the buffers, which are attended as they lie.

    The counters of the layers move on only at :meth:`commit`, when every layer has written.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        super().__init__(cache, rule, queries, attention)
        layer = cache.sliding[0]
        self.row = layer.pieces(queries)[0].start
        parts = layer.pieces(self.keys)
        # Visible rows in one stretch are cut out; those that wrap around the end of a ring are attended with the rest.
        self.whole = len(parts) > 1
        self.rows = Span(0, layer.rows) if self.whole else parts[0]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        buffer: Any = self.cache.layers[layer]
        buffer.keys.select(2, self.row).copy_(key.select(2, 0))
        buffer.values.select(2, self.row).copy_(value.select(2, 0))
        return _rows(buffer.keys, self.rows), _rows(buffer.values, self.rows)

    def _make_rectangles(self, like: Tensor) -> list[Rectangle]:
        if not self.whole:
            return super()._make_rectangles(like)
        positions = self.cache.sliding[0].row_positions(self.queries.stop)
        if self.rows.size == self.rule.window and self.rule.hidden(self.keys) is None:
            mask = None
        else:
            mask = self.rule.row_mask(self.queries.start, positions, like)
        return [Rectangle(Span(0, 1), Span(0, self.rows.size), mask)]

    def commit(self) -> None:
        for layer in self.cache.sliding:
            layer.advance(1)

    def shared(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held_keys, held_values = self.cache.sliding[-1].read(self.keys)  # the last sliding owner is the one that shares
        return held_keys.clone(), held_values.clone()


class FixedStep(DecodeStep):
    """One token over buffers that are attended whole: where to write and what to see are tensors, for any position.

    Nothing that :meth:`write` and :meth:`attend` read is a number that changes, so a compiled layer has one graph.
    """

    def __init__(self, cache: CompactCache, rule: CausalWindow, queries: Span, attention: Attention) -> None:
        super().__init__(cache, rule, queries, attention)
        layer = cache.sliding[0]
        positions = layer.row_positions(queries.stop)
        self.index = torch.tensor([self.row]).to(layer.keys.device)
        self.mask = rule.row_mask(queries.start, positions, layer.keys)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        buffer: Any = self.cache.layers[layer]
        index = self.index.to(key.device)
        return buffer.keys.index_copy_(2, index, key), buffer.values.index_copy_(2, index, value)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        mask = self.mask.to(device=query.device, dtype=query.dtype)
        return self.attention(query, keys, values, mask, False, scale).transpose(1, 2)


def begin_step(cache: CompactCache, batch: int, tokens: int, rule: CausalWindow, attention: Attention) -> Step:
    """Ready the cache for ``tokens`` new tokens of ``batch`` sequences: check it, and roll the buffers if that is due.

    Raises:
        CacheStateError: when the cache is half written, or holds another number of sequences.
    """
    layers = cache.sliding
    seen = layers[0].seen
    if any(layer.seen != seen for layer in layers):
        raise CacheStateError(
            explain(
                f"sliding layers that have seen {sorted({layer.seen for layer in layers})} tokens",
                "a cache whose layers have all seen the same tokens",
                "start a new cache: an interrupted forward left this one half written",
            )
        )
    if seen and layers[0].keys.shape[0] != batch:
        raise CacheStateError(
            explain(
                f"{batch} sequences for a cache that holds {layers[0].keys.shape[0]}",
                "the same batch in every call on one cache",
                "start a new cache, or use batch_repeat_interleave or batch_select_indices",
            )
        )
    queries = Span(seen, seen + tokens)
    if tokens > 1 or not seen or isinstance(rule, ImageWindow):
        return Step(cache, rule, queries, attention)
    for layer in layers:
        layer.make_room(1)
    return (FixedStep if cache.fixed else DecodeStep)(cache, rule, queries, attention)


@dataclass
class StepHook:
    """The hook before a model's forward: puts a :class:`Step` into the call, and a cache where one is missing.

    It sits on the text model, and on the vision model around it, which makes the masks when there is one.

    Attributes:
        layout, backend: options of the patch.
        maker: makes masks as the module would; its first argument is the text config.
        types_name: the module's argument for token types, where tokens of one image see each other both ways.
    """

    layout: str
    backend: str
    maker: MaskMaker
    types_name: str | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # positions are numbers here, and only here
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _by_name(module, args, kwargs)
        given = [call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None]
        if len(given) != 1 or _needs_gradients(module, given[0]):
            return None
        config = text_config(module)
        if isinstance(step := _sliding_mask(call), Step):
            if step.stock_masks is not None and _wanted(call, config, "output_attentions"):
                call["attention_mask"] = step.stock_masks()
            return (), call
        cache = cache_in(call)
        if cache is None and _wanted(call, config, "use_cache") and not is_disabled():
            cache = call[CACHE_NAME] = CompactCache(config, layout=self.layout)
        if isinstance(cache, CompactCache) and is_fast(call, config):
            batch, tokens = given[0].shape[:2]
            like = torch.empty((batch, tokens, 0), dtype=_dtype(module, given[0]), device=given[0].device)
            types = call.get(self.types_name or "")
            maker = partial(self.maker, config)
            masks = begin(cache, like, call.get("attention_mask"), types, maker, self.backend)
            call["attention_mask"] = masks
            if call.get("position_ids") is None:
                # As stock counts them, but here: a compiled forward would take the length for a constant.
                positions = torch.arange(*masks[SLIDING].queries, device=given[0].device)
                call["position_ids"] = positions.unsqueeze(0)
        return (), call


def begin(
    cache: CompactCache, like: Tensor, padding: Tensor | None, types: Tensor | None, maker: MaskMaker, backend: str
) -> dict[str, Any]:
    """Begin a step: what goes into a call in the place of its attention mask, by layer type.

    Args:
        cache: the cache of the call.
        like: stands for the embeddings, ``[batch, tokens, any]``.
        padding: the 2D attention mask of the call.
        types: its token types, where tokens of one image see each other both ways.
        maker: makes the masks of the call as the model would.
        backend: who computes the attention.
    """
    # The global mask first: it reads how long the cache is, and a failure must leave the cache alone.
    full = global_mask(maker, cache, like, padding, types)
    window = cache.plan.window
    rule = CausalWindow(window, padding) if types is None else ImageWindow(window, padding, maker, types)
    return {GLOBAL: full, SLIDING: begin_step(cache, like.shape[0], like.shape[1], rule, BACKENDS[backend])}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def commit_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The hook after the text model's forward: the step is done, its tokens count."""
    step = _sliding_mask(kwargs)
    if not isinstance(step, Step):
        return
    step.commit()
    shared = getattr(output, "shared_kv_states", None)
    if shared and SLIDING in shared:
        shared[SLIDING] = step.shared(*shared[SLIDING])


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return dict(kwargs)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _sliding_mask(call: dict[str, Any]) -> Any:
    masks = call.get("attention_mask")
    return masks.get(SLIDING) if isinstance(masks, dict) else masks


def _needs_gradients(module: nn.Module, given: Tensor) -> bool:
    """Whether anybody may want to go backward through this call; then it is all stock's."""
    if module.training:
        return True
    return torch.is_grad_enabled() and (given.requires_grad or any(p.requires_grad for p in module.parameters()))


def is_fast(call: dict[str, Any], config: Any) -> bool:
    """Whether our attention stands in for stock's: not for attention weights, ready-made masks, or other kernels."""
    padding = call.get("attention_mask")
    flat = padding is None or (isinstance(padding, Tensor) and padding.ndim == 2)
    return flat and config._attn_implementation in FAST_ATTENTION and not _wanted(call, config, "output_attentions")


def _wanted(call: dict[str, Any], config: Any, name: str) -> bool:
    return bool(getattr(config, name, False) if call.get(name) is None else call[name])


def _dtype(module: nn.Module, given: Tensor) -> torch.dtype:
    if given.is_floating_point():
        return given.dtype
    return module.get_input_embeddings().weight.dtype  # type: ignore[operator, no-any-return]


def _rows(tensor: Tensor, rows: Span) -> Tensor:
    return tensor[:, :, rows.start : rows.stop]
