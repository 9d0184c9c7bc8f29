"""torch-spyre's ``spyre::sliding_window_attention``: its contract, and the attention of a layer as one compiled region.

The operator has no eager form: it lives inside ``torch.compile``. So all of a layer's attention does, from the
projections to the output projection and the rows that the cache keeps, as a pure function of tensors. Where to write
and whom to see come in as tensors, built on the CPU and moved once a step for all layers; no position is ever a number
in there, and one graph serves all.

What a card does, and what it cannot do, is from torch-spyre's and its adapters' sources, autumn 2026. torch-spyre is
not imported here: it registers itself with torch when it is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._errors import SpyreContractError, explain
from ..families import Family
from ..geometry import ALIGN

DEVICE = "spyre"
"""Type of the devices that torch-spyre adds."""

HIDDEN = -32752.0
"""Mask value of a hidden key: half of float16's minimum, which the device's number format still holds exactly."""

ARGUMENTS = ("query", "key", "value", "attention_mask", "window_size", "is_causal", "scale")
"""Arguments of the operator in the form that swapatch calls. An older form took ``cache_seqlen`` and more."""

ADAPTED = "_spyre_"
"""How the attributes begin that the public adapters for Spyre leave on a model (torch-spyre/hf-adapters, 2026)."""

GRAPHS = 1024
"""Graphs of one region that may be compiled, unless more are configured: torch-spyre's own limit."""


def operator() -> Any:
    """The registered operator.

    Raises:
        SpyreContractError: when there is none, or it has an older form.
    """
    found = getattr(torch.ops.spyre, "sliding_window_attention", None)
    names = () if found is None else tuple(argument.name for argument in found.default._schema.arguments)
    if names != ARGUMENTS:
        raise SpyreContractError(
            explain(
                "no operator spyre::sliding_window_attention" if not names else f"the operator with {', '.join(names)}",
                f"spyre::sliding_window_attention with {', '.join(ARGUMENTS)}",
                "install a torch-spyre that has it, or patch with backend='reference' or 'windowed'",
            )
        )
    return found


def check_dtype(dtype: torch.dtype) -> None:
    """The operator computes in half precision only.

    Raises:
        SpyreContractError: for any other dtype.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise SpyreContractError(explain(f"a model in {dtype}", "bfloat16 (or float16)", "load it in bfloat16"))


def check_head_dim(dim: int) -> None:
    """Heads fill whole sticks.

    Raises:
        SpyreContractError: for any other size.
    """
    if dim % ALIGN:
        raise SpyreContractError(
            explain(f"head_dim {dim}", f"a multiple of {ALIGN}", "patch with backend='reference' or 'windowed'")
        )


def check_contract(
    query: Sequence[int], key: Sequence[int], dtype: torch.dtype, keys: torch.dtype, mask: Tensor, causal: bool
) -> None:
    """Every rule of the operator's contract that can be seen from outside, also those it does not check itself.

    Args:
        query: shape of the query, ``[batch, heads, queries, head_dim]``.
        key: shape of keys and values, ``[batch, kv_heads, keys, head_dim]``.
        dtype: of the query.
        keys: dtype of keys and values.
        mask: ``[batch, 1, queries, keys]``.
        causal: whether the operator may read each block's window only.

    Raises:
        SpyreContractError: names the first rule that is broken.
    """
    batch, heads, queries, dim = query
    rows = key[2]
    check_dtype(dtype)
    check_head_dim(dim)
    rules: list[tuple[bool, str, str]] = [
        (keys == dtype, f"keys and values in {keys}", f"the query's {dtype}"),
        (key[0] == batch, f"{key[0]} sequences of keys", f"the query's {batch}"),
        (heads % key[1] == 0, f"{heads} heads over {key[1]}", "a whole number of heads for each key head"),
        (key[3] == dim, f"head_dim {key[3]} of the keys", f"the query's {dim}"),
        (rows % ALIGN == 0, f"{rows} rows of keys", f"a multiple of {ALIGN}"),
        (queries == 1 or queries % ALIGN == 0, f"{queries} queries", f"1 or a multiple of {ALIGN}"),
        (queries <= rows, f"{queries} queries for {rows} keys", "no more queries than keys"),
        (
            tuple(mask.shape) == (batch, 1, queries, rows),
            f"mask {tuple(mask.shape)}",
            f"(batch, 1, queries, keys)={(batch, 1, queries, rows)}",
        ),
        (mask.dtype == dtype, f"mask in {mask.dtype}", f"the query's {dtype}"),
        (not causal or queries == rows, f"causal access to {rows} keys by {queries} queries", "as many of each"),
    ]
    for kept, found, expected in rules:
        if not kept:
            raise SpyreContractError(explain(found, expected, "this is a fault of swapatch: please report it"))


# -- memory --


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a buffer ``[batch, kv_heads, rows, head_dim]``; on a card with the rows outermost.

    Then a row is written in place by one program for all positions. In any other layout the compiler would copy the
    whole buffer there and back.
    """
    layouts = sys.modules.get("torch_spyre._C")
    if device.type != DEVICE or layouts is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    batch, heads, rows, dim = shape
    layout = layouts.SpyreTensorLayout(
        device_size=[rows, heads, -(-dim // ALIGN), batch, ALIGN],
        stride_map=[dim, rows * dim, ALIGN, heads * rows * dim, 1],
        device_dtype=layouts.get_device_dtype(dtype),
    )
    host: Any = torch.zeros(shape, dtype=dtype)
    found: Tensor = host.to(device, device_layout=layout)
    return found


def laid_out(rows: Tensor) -> Tensor:
    """A buffer that holds these rows, ``[batch, kv_heads, rows, head_dim]``, and lies as :func:`zeros` lays it."""
    buffer = zeros(rows.shape, rows.dtype, rows.device)
    found: Tensor = _run(_fill, buffer, rows, every_row(rows.shape[2], rows.device))
    return found


def _fill(buffer: Tensor, rows: Tensor, every: Tensor) -> Tensor:
    return buffer.index_copy_(2, every, rows)


def shift(buffer: Tensor, by: int) -> Tensor:
    """Row ``r`` takes over row ``r + by`` of a buffer, in place; the last ``by`` rows keep what they hold."""
    rows = buffer.shape[2]
    found: Tensor = _run(_shift, buffer, _shifted(by, rows, buffer.device), every_row(rows, buffer.device))
    return found


def _shift(buffer: Tensor, source: Tensor, every: Tensor) -> Tensor:
    return buffer.index_copy_(2, every, buffer.index_select(2, source))


@functools.lru_cache(maxsize=64)  # moved to the card once
def _shifted(by: int, rows: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return (torch.arange(rows) + by).clamp(max=rows - 1).to(device)


def every_row(rows: int, device: torch.device) -> Tensor:
    """The numbers of all rows of a buffer, ``[rows]``."""
    return _shifted(0, rows, device)


@functools.lru_cache(maxsize=16)
def quarter_turn(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What rotary embeddings multiply their sines by, as a product with a constant matrix, ``[head_dim, head_dim]``.

    It swaps the halves and negates the first: one entry in each column, so the product is exact. Slicing and joining
    the last dimension compiles to wrong numbers on a card (torch-spyre issue 3133).
    """
    half = dim // 2
    turn = torch.zeros(dim, dim, dtype=dtype)
    turn[half:, :half] = -torch.eye(half, dtype=dtype)
    turn[:half, half:] = torch.eye(dim - half, dtype=dtype)[:half]
    with torch.inference_mode(False):
        return turn.to(device)


def additive(allowed: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask for a bool one: made on the CPU by one ``where``, moved once."""
    return torch.where(allowed, 0.0, HIDDEN).to(dtype).to(device)


# -- regions --


def decode(
    family: Family,
    attention: Any,
    hidden: Tensor,
    position: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor],
    own: bool,
    index: Tensor,
    mask: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step of one layer: ``hidden [batch, 1, hidden]`` in and out, and the buffers as they are from now on."""
    _check(attention, hidden, buffers[0].shape, buffers[0].dtype, mask, False)
    turn = quarter_turn(attention.head_dim, hidden.dtype, hidden.device)
    out, keys, values = _run(
        _decode, family, attention, hidden, *position, turn, *buffers, index if own else None, mask, window
    )
    return out, keys, values


def prefill(
    family: Family,
    attention: Any,
    hidden: Tensor,
    position: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor] | None,
    buffers: tuple[Tensor, Tensor] | None,
    source: Tensor | None,
    mask: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Many tokens of one layer.

    Args:
        family: of the model.
        attention: the layer.
        hidden: ``[batch, tokens, hidden]``; rows of zeros come in front of them, up to the rows of the mask.
        position: cosines and sines, ``[batch, tokens, head_dim]``.
        before: keys and values that are attended in front of the layer's own, or, without buffers, alone.
        buffers: of the layer's cache, if it has keys and values of its own.
        source: which of the attended rows each row of the buffers takes over, ``[rows]``.
        mask: ``[batch, 1, queries, keys]``.
        window: keys that a query sees.
        causal: whether the operator may read each block's window only.

    Returns:
        ``hidden [batch, tokens, hidden]``, the keys and values that were attended, and the buffers from now on.
    """
    queries = mask.shape[2]
    if buffers is not None:
        batch, heads, _, dim = buffers[0].shape
        key: Sequence[int] = (batch, heads, queries + (0 if before is None else before[0].shape[2]), dim)
        dtype = buffers[0].dtype
    else:
        assert before is not None, "a layer without keys and values of its own attends another's"
        key, dtype = before[0].shape, before[0].dtype
    _check(attention, hidden, key, dtype, mask, causal)
    turn = quarter_turn(attention.head_dim, hidden.dtype, hidden.device)
    every = None if buffers is None else every_row(buffers[0].shape[2], hidden.device)
    given = (before or (None, None), buffers or (None, None))
    out, keys, values, *kept = _run(
        _prefill, family, attention, hidden, *position, turn, *given[0], *given[1], source, every, mask, window, causal
    )
    return out, keys, values, (kept[0], kept[1]) if kept else None


def _check(attention: Any, hidden: Tensor, key: Sequence[int], dtype: torch.dtype, mask: Tensor, causal: bool) -> None:
    query = (hidden.shape[0], key[1] * attention.num_key_value_groups, mask.shape[2], attention.head_dim)
    check_contract(query, key, hidden.dtype, dtype, mask, causal)


def _decode(
    family: Family,
    attention: Any,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    turn: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor | None,
    mask: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _project(family, attention, hidden, cos, sin, turn)
    if index is not None and key is not None and value is not None:
        keys, values = keys.index_copy_(2, index, key), values.index_copy_(2, index, value)
    return _attend(attention, query, keys, values, mask, window, False, 0), keys, values


def _prefill(
    family: Family,
    attention: Any,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    turn: Tensor,
    before_keys: Tensor | None,
    before_values: Tensor | None,
    key_rows: Tensor | None,
    value_rows: Tensor | None,
    source: Tensor | None,
    every: Tensor | None,
    mask: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, ...]:
    lead = mask.shape[2] - hidden.shape[1]
    if lead:
        hidden, cos, sin = (functional.pad(states, (0, 0, lead, 0)) for states in (hidden, cos, sin))
    query, key, value = _project(family, attention, hidden, cos, sin, turn)
    keys, values = _behind(before_keys, key), _behind(before_values, value)
    out = _attend(attention, query, keys, values, mask, window, causal, lead)
    if key_rows is None or value_rows is None or source is None or every is None:
        return out, keys, values
    key_rows = key_rows.index_copy_(2, every, keys.index_select(2, source))
    value_rows = value_rows.index_copy_(2, every, values.index_select(2, source))
    return out, keys, values, key_rows, value_rows


def _project(
    family: Family, attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor, turn: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    def norm(module: Any, states: Tensor) -> Tensor:
        # In float32, which a card has for a norm: with a reduction or a weight in half precision logits stray further.
        wide = states.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + module.eps)
        weight = family.norm_weight(module)
        return (wide if weight is None else wide * weight).to(states.dtype)

    def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return states * cos + (states @ turn) * sin

    return family.project(attention, hidden, cos, sin, norm, rotate)


def _behind(before: Tensor | None, new: Tensor | None) -> Tensor:
    parts = [part for part in (before, new) if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend(
    attention: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, window: int, causal: bool, lead: int
) -> Tensor:
    """The output of the layer, ``[batch, queries - lead, hidden]``."""
    out = torch.ops.spyre.sliding_window_attention(query, keys, values, mask, window, causal, attention.scaling)
    # [batch, heads, queries, head_dim] -> [batch, queries, hidden]
    result: Tensor = attention.o_proj(out[:, :, lead:].transpose(1, 2).flatten(2))
    return result


@functools.cache
def _compiled(region: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(region, backend="inductor", dynamic=False, fullgraph=True)


def _run(region: Callable[..., Any], *arguments: Any) -> Any:
    limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=limit):
        return _compiled(region)(*arguments)
