"""``swapatch::window_attention``: what a compiler or an exporter sees of a sliding layer's attention.

The operator is opaque, so a graph is the same for any number of blocks, and the mask of a block may depend on what the
tensors hold. In eager mode the same kernel is called without the operator's detour.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..geometry import Span
from ..rules import Rule, rule_of
from . import reference, windowed

KERNELS: dict[str, windowed.Attend] = {"windowed": windowed.attend, "reference": reference.attend}
"""Who computes a rectangle: torch's fused kernel, or the slow definition of attention."""


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    queries: Span,
    keys: Span,
    scale: float,
    *,
    kernel: str = "windowed",
    block: int | None = None,
) -> Tensor:
    """Attention that scores each block of queries against the keys it can reach; differentiable.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key, value: ``[batch, kv_heads, keys, head_dim]``, ``heads`` a whole multiple of ``kv_heads``; in time order.
        rule: who sees whom.
        queries, keys: their positions.
        scale: multiplies the scores.
        kernel: one of :data:`KERNELS`.
        block: queries in one block, each of which reads ``window - 1`` old keys and its own; None for what was
            measured to be the fastest.

    Returns:
        ``[batch, queries, heads, head_dim]``; zeros for a query that sees nothing.

    >>> query, key = torch.ones(1, 4, 100, 8), torch.ones(1, 2, 100, 8)
    >>> window_attention(query, key, key, Rule(16), Span(0, 100), Span(0, 100), 1.0).shape
    torch.Size([1, 100, 4, 8])
    """
    query, key, value = _as_autocast(query, key, value)
    data = (rule.padding, rule.segments, rule.types)
    if is_traced(query):
        settings = (rule.images, rule.window, queries.start, keys.start, scale, kernel, block)
        out: Tensor = _operator(query, key, value, *data, *settings)
        return out
    differentiable = torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None
    if differentiable and not windowed.is_replaced():
        return _Windowed.apply(query, key, value, *data, rule, queries, keys, scale, kernel, block)  # type: ignore[no-any-return, no-untyped-call]
    return windowed.forward(KERNELS[kernel], query, key, value, rule, queries, keys, scale, block)


def is_traced(tensor: Tensor) -> bool:
    """Whether nobody can ask what a tensor holds: it stands for any of its shape."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor) or tensor.is_meta


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as torch casts the arguments of its own attention where autocast is on."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


# -- the operator --

_SETTINGS = (
    "Tensor? padding, Tensor? segments, Tensor? types, str images, int window, "
    "SymInt first_query, SymInt first_key, float scale, str kernel, int? block"
)
"""Everything but query, key and value: the rule as tensors and numbers, the places, and how to compute."""


@torch.library.custom_op(
    "swapatch::window_attention",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> Tensor",
)
def _operator(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> Tensor:
    rule, queries, keys, scale, kernel, block = _read(query, key, *settings)
    return windowed.forward(KERNELS[kernel], query, key, value, rule, queries, keys, scale, block)


@torch.library.custom_op(
    "swapatch::window_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
)
def _backward_operator(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rule, queries, keys, scale, _, block = _read(query, key, *settings)
    return windowed.backward(grad, query, key, value, rule, queries, keys, scale, block)


def _read(
    query: Tensor,
    key: Tensor,
    padding: Tensor | None,
    segments: Tensor | None,
    types: Tensor | None,
    images: str,
    window: int,
    first_query: int,
    first_key: int,
    *rest: Any,
) -> tuple[Any, ...]:
    rule = rule_of(window, padding, segments, images, types)
    queries = Span(first_query, first_query + query.shape[2])
    return rule, queries, Span(first_key, first_key + key.shape[2]), *rest


@_operator.register_fake
def _(query: Tensor, *rest: Any) -> Tensor:
    batch, heads, tokens, dim = query.shape
    return query.new_empty((batch, tokens, heads, dim))


@_backward_operator.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), *(rows.new_empty(rows.shape) for rows in (key, value))  # type: ignore[return-value]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_operator(grad, *ctx.saved_tensors, *ctx.settings), *_NO_GRADIENTS, None


_operator.register_autograd(_operator_backward, setup_context=_keep_for_backward)


# -- eager mode: the same, with the rule at hand, and under the transforms of torch.func --


class _Windowed(torch.autograd.Function):
    """Arguments: query, key, value, the three tensors of the rule, the rule, spans of queries and keys, settings."""

    setup_context = staticmethod(_keep_for_backward)

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        rule, queries, keys, scale, kernel, block = _unwrapped(*rest)
        out = windowed.forward(KERNELS[kernel], query, key, value, rule, queries, keys, scale, block)
        return out.clone() if out._is_view() else out  # or nobody could write into it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = _WindowedBackward.apply(grad, *ctx.saved_tensors, *ctx.settings)  # type: ignore[no-untyped-call]
        return *grads, *_NO_GRADIENTS

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        out = _Windowed.apply(*_folded(info.batch_size, dims, arguments))  # type: ignore[no-untyped-call]
        return out.unflatten(0, (info.batch_size, -1)), 0


class _WindowedBackward(torch.autograd.Function):
    """The gradient of the output before the arguments of :class:`_Windowed`."""

    @staticmethod
    def forward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        rule, queries, keys, scale, _, block = _unwrapped(*rest)
        return windowed.backward(grad, query, key, value, rule, queries, keys, scale, block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:7])
        ctx.settings = inputs[7:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The second derivative, which hardly anybody wants: by torch, from the definition, block by block."""
        rule, queries, keys, scale, _, block = _unwrapped(*ctx.saved_tensors[4:], *ctx.settings)
        with torch.enable_grad():
            grad, query, key, value = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:4])
            out = windowed.forward(reference.attend, query, key, value, rule, queries, keys, scale, block)
            first = torch.autograd.grad(out, (query, key, value), grad, create_graph=True)
            second = torch.autograd.grad(first, (grad, query, key, value), grads, allow_unused=True)
        return *second, *_NO_GRADIENTS

    @staticmethod
    def vmap(info: Any, dims: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        grads = _WindowedBackward.apply(*_folded(info.batch_size, dims, arguments))  # type: ignore[no-untyped-call]
        return tuple(grad.unflatten(0, (info.batch_size, -1)) for grad in grads), (0, 0, 0)


_NO_GRADIENTS = (None,) * 9
"""For what is no query, key or value among the arguments of :class:`_Windowed`."""


def _unwrapped(
    padding: Tensor | None, segments: Tensor | None, types: Tensor | None, rule: Rule, *rest: Any
) -> tuple[Any, ...]:
    """The rule with these tensors: under a transform of torch.func its own ones are wrapped."""
    if (rule.padding, rule.segments, rule.types) != (None, None, None) and not (
        rule.padding is padding and rule.segments is segments and rule.types is types
    ):
        rule = rule_of(rule.window, padding, segments, rule.images, types)
    return rule, *rest


def _folded(size: int, dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments with the dimension that is mapped over folded into the batch."""

    def fold(argument: Any, dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        moved = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
        return moved.flatten(0, 1)

    return [fold(*pair) for pair in zip(arguments, dims, strict=True)]
