"""torch-spyre's ``spyre::sliding_window_attention``: its contract, and a sliding layer as one compiled region.

The operator has no eager form: it lives inside ``torch.compile``. So all of a layer's attention does, from the
projections to the output projection, as a pure function of tensors. Where to write and whom to see come in as tensors,
built on the CPU and moved once a step for all layers; no position is ever a number in there, and one graph serves all.

torch-spyre is not imported here: it registers itself with torch when it is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import SpyreContractError, explain
from ..families.family import Projected
from ..geometry import ALIGN

DEVICE = "spyre"
"""Type of the devices that torch-spyre adds."""

HIDDEN = -32752.0
"""Mask value of a hidden key: half of float16's minimum, which the device's number format still holds exactly."""

ARGUMENTS = ("query", "key", "value", "attention_mask", "window_size", "is_causal", "scale")
"""Arguments of the operator in the form that swapatch calls. An older form took ``cache_seqlen`` and more."""

SHAPES = 64
"""Shapes of one kind of layer that may be compiled: prefills come in any whole number of 64-row blocks."""

Projection = Callable[..., Projected]
"""``(attention, hidden, cos, sin) -> query, key, value``."""


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


def check_contract(
    query: Sequence[int], dtype: torch.dtype, key: Tensor, value: Tensor, mask: Tensor, causal: bool
) -> None:
    """Every rule of the operator's contract that can be seen from outside, also those it does not check itself.

    Args:
        query: shape of the query, ``[batch, heads, queries, head_dim]``.
        dtype: its dtype.
        key, value: ``[batch, kv_heads, keys, head_dim]``.
        mask: ``[batch, 1, queries, keys]``.
        causal: whether the operator may read each block's window only.

    Raises:
        SpyreContractError: names the first rule that is broken.
    """
    batch, heads, queries, dim = query
    keys = key.shape[2]
    check_dtype(dtype)
    if dim % ALIGN:
        raise SpyreContractError(
            explain(f"head_dim {dim}", f"a multiple of {ALIGN}", "patch with backend='reference' or 'windowed'")
        )
    rules: list[tuple[bool, str, str]] = [
        (key.dtype == value.dtype == dtype, f"keys in {key.dtype}, values in {value.dtype}", f"the query's {dtype}"),
        (key.shape == value.shape, f"keys {tuple(key.shape)}, values {tuple(value.shape)}", "one shape for both"),
        (key.shape[0] == batch, f"{key.shape[0]} sequences of keys", f"the query's {batch}"),
        (heads % key.shape[1] == 0, f"{heads} heads over {key.shape[1]}", "a whole number of heads for each key head"),
        (key.shape[3] == dim, f"head_dim {key.shape[3]} of the keys", f"the query's {dim}"),
        (keys % ALIGN == 0, f"{keys} rows of keys", f"a multiple of {ALIGN}"),
        (queries == 1 or queries % ALIGN == 0, f"{queries} queries", f"1 or a multiple of {ALIGN}"),
        (queries <= keys, f"{queries} queries for {keys} keys", "no more queries than keys"),
        (
            tuple(mask.shape) == (batch, 1, queries, keys),
            f"mask {tuple(mask.shape)}",
            f"(batch, 1, queries, keys)={(batch, 1, queries, keys)}",
        ),
        (mask.dtype == dtype, f"mask in {mask.dtype}", f"the query's {dtype}"),
        (mask.device == key.device == value.device, f"mask on {mask.device}, keys on {key.device}", "one device"),
        (not causal or queries == keys, f"causal access to {keys} keys by {queries} queries", "as many of each"),
    ]
    for kept, found, expected in rules:
        if not kept:
            raise SpyreContractError(explain(found, expected, "this is a fault of swapatch: please report it"))


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for a cache buffer; on the card with the positions outermost, so that one row can be written in place."""
    layout = getattr(sys.modules.get("torch_spyre._C"), "SpyreTensorLayout", None)
    if device.type != DEVICE or layout is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    host: Any = torch.zeros(shape, dtype=dtype)
    found: Tensor = host.to(device_layout=layout(list(shape), list(host.stride()), dtype, [2, 0, 1, 3]))
    return found


def additive(allowed: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask for a bool one: made on the CPU by one ``where``, moved once."""
    return torch.where(allowed, 0.0, HIDDEN).to(dtype).to(device)


def decode(
    project: Projection,
    attention: Any,
    hidden: Tensor,
    position: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor],
    index: Tensor,
    mask: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step of one layer: ``hidden [batch, 1, hidden]`` in and out, and the buffers as they are from now on."""
    _check(attention, hidden, *buffers, mask, False)
    out, keys, values = _run(_decode, project, attention, hidden, *position, *buffers, index, mask, window)
    return out, keys, values


def prefill(
    project: Projection,
    attention: Any,
    hidden: Tensor,
    position: tuple[Tensor, Tensor],
    before: tuple[Tensor, Tensor] | None,
    own: bool,
    mask: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Many tokens of one layer: its ``own`` keys and values behind those ``before`` them, or those of another layer.

    Returns:
        ``hidden [batch, queries, hidden]``, and all keys and values that were attended.
    """
    own_rows = hidden.shape[1] if own else 0
    # The layer's own keys are made inside the region: views of the same shape stand for them.
    if before is None:  # one head for each group of query heads
        keys = values = hidden[:, None, :1, :1].expand(-1, 1, own_rows, attention.head_dim)
    else:
        keys, values = (states[:, :, :1].expand(-1, -1, states.shape[2] + own_rows, -1) for states in before)
    _check(attention, hidden, keys, values, mask, causal)
    past = (None, None) if before is None else before
    out, keys, values = _run(_prefill, project, attention, hidden, *position, *past, mask, window, causal)
    return out, keys, values


def _check(attention: Any, hidden: Tensor, keys: Tensor, values: Tensor, mask: Tensor, causal: bool) -> None:
    heads = keys.shape[1] * attention.num_key_value_groups
    query = (hidden.shape[0], heads, hidden.shape[1], attention.head_dim)
    check_contract(query, hidden.dtype, keys, values, mask, causal)


def _decode(
    project: Projection,
    attention: Any,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    mask: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = project(attention, hidden, cos, sin)
    if key is not None and value is not None:
        keys = keys.index_copy_(2, index, key)
        values = values.index_copy_(2, index, value)
    return _attend(attention, query, keys, values, mask, window, False), keys, values


def _prefill(
    project: Projection,
    attention: Any,
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor | None,
    values: Tensor | None,
    mask: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = project(attention, hidden, cos, sin)
    keys, values = _behind(keys, key), _behind(values, value)
    return _attend(attention, query, keys, values, mask, window, causal), keys, values


def _behind(before: Tensor | None, new: Tensor | None) -> Tensor:
    parts = [part for part in (before, new) if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend(
    attention: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, window: int, causal: bool
) -> Tensor:
    out = torch.ops.spyre.sliding_window_attention(query, keys, values, mask, window, causal, attention.scaling)
    # [batch, heads, queries, head_dim] -> [batch, queries, hidden]
    result: Tensor = attention.o_proj(out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1))
    return result


@functools.cache
def _compiled(region: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(region, backend="inductor", dynamic=False, fullgraph=True)


def _run(region: Callable[..., Any], *arguments: Any) -> Any:
    with torch._dynamo.config.patch(recompile_limit=SHAPES):
        return _compiled(region)(*arguments)
