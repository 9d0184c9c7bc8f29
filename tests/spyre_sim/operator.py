"""`spyre::sliding_window_attention` as torch-spyre defines it, computed on the CPU, with its contract checked.

Simulated: the schema; the result (float32 arithmetic, rounded once to the query's dtype); that the mask alone decides
who attends; that `is_causal=True` on a square reads only each 64-row block's window, so that a broken promise gives
wrong numbers; that an eager call on the simulated device raises.

Not simulated: the device's number format and its order of summation; its time; the padding of query lengths that are
neither 1 nor a multiple of 64, which is refused here; that the eager body is empty, for CPU tensors: there an eager
call computes.

    operator.register()                       # once a process; again is harmless
    with operator.recorded() as calls: ...    # the calls that ran, as `Call`
    with operator.unchecked("head_dim_64"):   # switch rules of the contract off; their names are in RULES

A broken rule raises `ContractError`, whose `rule` is the name. The rules on shapes are also checked while a graph is
traced; torch.compile then wraps the error into its own, and the message still begins with the rule in brackets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

NAME = "sliding_window_attention"
SCHEMA = (
    f"{NAME}(Tensor query, Tensor key, Tensor value, Tensor attention_mask, int window_size, bool is_causal, "
    "float? scale=None) -> Tensor"
)
OLD_SCHEMA = (
    f"{NAME}(Tensor query, Tensor key, Tensor value, int window_size, int cache_seqlen, int buffer_origin=0, "
    "int valid_start=0, float? scale=None) -> Tensor"
)
FILL = -32752.0
BLOCK = 64


class ContractError(AssertionError):
    """A call of the operator that breaks its contract."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule


@dataclass(frozen=True)
class Call:
    """One call of the operator that ran."""

    device: str
    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    window_size: int
    is_causal: bool
    scale: float | None


@dataclass(frozen=True)
class _Arguments:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    window_size: int
    is_causal: bool
    scale: float | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"query": self.query, "key": self.key, "value": self.value, "attention_mask": self.mask}

    @property
    def square(self) -> bool:
        """Whether only windows are read."""
        return self.is_causal and self.query.shape[2] == self.key.shape[2]

    def call(self) -> Call:
        query, key = tuple(self.query.shape), tuple(self.key.shape)
        device = self.query.device.type
        return Call(device, self.query.dtype, query, key, self.window_size, self.is_causal, self.scale)


# -- the contract --

Rule = Callable[[_Arguments], str | None]
"""Says what is wrong, or None."""


def _rank(a: _Arguments) -> str | None:
    wrong = {name: tuple(t.shape) for name, t in a.tensors.items() if t.ndim != 4}
    return f"expected four dimensions each, found {wrong}" if wrong else None


def _static(a: _Arguments) -> str | None:
    sizes = [size for t in a.tensors.values() for size in t.shape]
    if all(isinstance(size, int) for size in sizes):
        return None
    return f"expected fixed sizes (torch.compile with dynamic=False), found symbolic ones: {sizes}"


def _device(a: _Arguments) -> str | None:
    found = {name: str(t.device) for name, t in a.tensors.items()}
    return None if len(set(found.values())) == 1 else f"expected one device, found {found}"


def _dtype(a: _Arguments) -> str | None:
    if a.query.dtype in (torch.float16, torch.bfloat16):
        return None
    return f"expected float16 or bfloat16, found a query in {a.query.dtype}"


def _equal_dtype(a: _Arguments) -> str | None:
    found = {name: t.dtype for name, t in a.tensors.items() if name != "attention_mask"}
    return None if len(set(found.values())) == 1 else f"expected one dtype, found {found}"


def _key_value(a: _Arguments) -> str | None:
    if a.key.shape == a.value.shape:
        return None
    return f"expected key and value of one shape, found {tuple(a.key.shape)} and {tuple(a.value.shape)}"


def _batch(a: _Arguments) -> str | None:
    found = a.query.shape[0], a.key.shape[0]
    return None if found[0] == found[1] else f"expected one batch size, found {found[0]} queries and {found[1]} keys"


def _heads(a: _Arguments) -> str | None:
    query, key = a.query.shape[1], a.key.shape[1]
    return None if query % key == 0 else f"expected query heads a multiple of {key} key heads, found {query}"


def _head_dim(a: _Arguments) -> str | None:
    query, key = a.query.shape[3], a.key.shape[3]
    return None if query == key else f"expected one head size, found {query} and {key}"


def _head_dim_64(a: _Arguments) -> str | None:
    dim = a.query.shape[3]
    return None if dim % BLOCK == 0 else f"expected a head size that is a multiple of {BLOCK}, found {dim}"


def _lengths(a: _Arguments) -> str | None:
    query, key = a.query.shape[2], a.key.shape[2]
    return None if 1 <= query <= key else f"expected 1 <= query rows <= key rows, found {query} and {key}"


def _query_rows(a: _Arguments) -> str | None:
    rows = a.query.shape[2]
    return None if rows == 1 or rows % BLOCK == 0 else f"expected 1 query row or a multiple of {BLOCK}, found {rows}"


def _key_rows(a: _Arguments) -> str | None:
    rows = a.key.shape[2]
    return None if rows % BLOCK == 0 else f"expected key rows a multiple of {BLOCK}, found {rows}"


def _mask_shape(a: _Arguments) -> str | None:
    expected = (a.query.shape[0], 1, a.query.shape[2], a.key.shape[2])
    found = tuple(a.mask.shape)
    return None if found == expected else f"expected a mask of exactly {expected}, found {found}"


def _mask_dtype(a: _Arguments) -> str | None:
    if a.mask.dtype == a.query.dtype:
        return None
    return f"expected an additive mask in the query's {a.query.dtype}, found {a.mask.dtype}"


def _window(a: _Arguments) -> str | None:
    return None if a.window_size >= 1 else f"expected a window of at least 1, found {a.window_size}"


def _finite(a: _Arguments) -> str | None:
    for name, tensor in (("key", a.key), ("value", a.value)):
        bad = ~tensor.isfinite()
        if bad.any():
            rows = bad.any(dim=3).any(dim=1).any(dim=0).nonzero().flatten().tolist()
            return f"expected finite numbers in every row, masked ones too; {name} has NaN or inf in rows {rows}"
    return None


def _fill(a: _Arguments) -> str | None:
    fill = torch.tensor(FILL, dtype=a.mask.dtype)  # bfloat16 rounds it, to -32768
    bad = a.mask[(a.mask != 0) & (a.mask != fill)]
    return f"expected a mask of 0 and {fill.item()}, found {bad.unique()[:4].tolist()}" if bad.numel() else None


def _promise(a: _Arguments) -> str | None:
    if not a.square:
        return None
    rows = torch.arange(a.query.shape[2])
    distance = rows[:, None] - rows  # from the query back to the key
    seen = (a.mask == 0).any(dim=0)[0]
    if (seen & (distance < 0)).any():
        return "is_causal=True on a square promises that no future key is allowed, but the mask allows one"
    if (seen & (distance >= a.window_size)).any():
        return f"is_causal=True on a square promises no key more than {a.window_size - 1} back, the mask allows one"
    return None


SHAPE_RULES: dict[str, Rule] = {
    "rank": _rank,
    "static": _static,
    "device": _device,
    "dtype": _dtype,
    "equal_dtype": _equal_dtype,
    "key_value": _key_value,
    "batch": _batch,
    "heads": _heads,
    "head_dim": _head_dim,
    "head_dim_64": _head_dim_64,
    "lengths": _lengths,
    "query_rows": _query_rows,
    "key_rows": _key_rows,
    "mask_shape": _mask_shape,
    "mask_dtype": _mask_dtype,
    "window": _window,
}
DATA_RULES: dict[str, Rule] = {"finite": _finite, "fill": _fill, "promise": _promise}
RULES = SHAPE_RULES | DATA_RULES

_off: set[str] = set()


@contextmanager
def unchecked(*names: str) -> Iterator[None]:
    """Switch these rules off; without a name, all of them."""
    global _off
    unknown = set(names) - set(RULES)
    if unknown:
        raise ValueError(f"no such rules: {sorted(unknown)}; there are {sorted(RULES)}")
    before, _off = _off, _off | set(names or RULES)
    try:
        yield
    finally:
        _off = before


def _check(arguments: _Arguments, rules: dict[str, Rule]) -> None:
    for name, rule in rules.items():
        if name not in _off and (wrong := rule(arguments)):
            raise ContractError(name, wrong)


# -- the computation --


def reads(query_rows: int, key_rows: int, window: int, is_causal: bool) -> list[tuple[slice, slice]]:
    """The rows that are computed at a time, and the keys that are read for them."""
    if not (is_causal and query_rows == key_rows):
        return [(slice(0, query_rows), slice(0, key_rows))]
    width = -(-(window + BLOCK - 1) // BLOCK) * BLOCK
    stops = range(BLOCK, query_rows + 1, BLOCK)
    return [(slice(stop - BLOCK, stop), slice(max(0, stop - width), stop)) for stop in stops]


def _attend(a: _Arguments) -> Tensor:
    heads = a.key.shape[1]
    scale = a.query.shape[3] ** -0.5 if a.scale is None else a.scale
    query = (a.query.float() * scale).unflatten(1, (heads, -1))  # [batch, kv_heads, group, rows, dim]
    key, value = a.key.float()[:, :, None], a.value.float()[:, :, None]
    mask = a.mask.float()[:, :, None]
    parts = []
    for rows, keys in reads(a.query.shape[2], a.key.shape[2], a.window_size, a.is_causal):
        scores = query[..., rows, :] @ key[..., keys, :].transpose(-1, -2) + mask[..., rows, keys]
        parts.append(scores.softmax(dim=-1) @ value[..., keys, :])
    return torch.cat(parts, dim=-2).flatten(1, 2).to(a.query.dtype)


# -- the calls --

_recorders: list[list[Call]] = []


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collect the calls that run within. Tracing a graph is not a call."""
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: two empty lists are equal.
        _recorders[:] = [other for other in _recorders if other is not calls]


def _on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    window_size: int,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    arguments = _Arguments(query, key, value, attention_mask, window_size, is_causal, scale)
    _check(arguments, RULES)
    _record(arguments.call())
    return _attend(arguments)


def _on_spyre(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    window_size: int,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    from . import device

    if not device.in_compiled_region():
        raise RuntimeError(f"spyre::{NAME} has no eager body: it must be called inside torch.compile")
    given = _Arguments(query, key, value, attention_mask, window_size, is_causal, scale)
    _check(given, SHAPE_RULES)
    views = (device.host_view(tensor) for tensor in given.tensors.values())
    arguments = _Arguments(*views, window_size, is_causal, scale)
    _check(arguments, DATA_RULES)
    _record(given.call())
    result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    device.host_view(result).copy_(_attend(arguments))
    return result


def _record(call: Call) -> None:
    for calls in _recorders:
        calls.append(call)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    window_size: int,
    is_causal: bool,
    scale: float | None = None,
) -> Tensor:
    _check(_Arguments(query, key, value, attention_mask, window_size, is_causal, scale), SHAPE_RULES)
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def _no_gradient(context: object, gradient: Tensor) -> None:
    raise RuntimeError(f"spyre::{NAME} has no gradient")


# -- registration --

_library: torch.library.Library | None = None


def register() -> None:
    """Define the operator in this process, as the current torch-spyre does."""
    global _library
    if _library is not None:
        return
    library = _define(SCHEMA)
    library.impl(NAME, _on_cpu, "CPU")
    library.impl(NAME, _on_spyre, "PrivateUse1")
    torch.library.register_fake(f"spyre::{NAME}", _fake, lib=library)
    torch.library.register_autograd(f"spyre::{NAME}", _no_gradient, lib=library)
    _library = library


def register_old() -> None:
    """Define only the schema of older versions. A process cannot take that back: see `run_python`."""
    global _library
    _library = _define(OLD_SCHEMA)


def _define(schema: str) -> torch.library.Library:
    if hasattr(torch.ops.spyre, NAME):
        raise RuntimeError(f"spyre::{NAME} is defined in this process already")
    library = torch.library.Library("spyre", "FRAGMENT")
    library.define(schema)
    return library


def run_python(code: str, *, timeout: float = 120) -> str:
    """Run code in a fresh process that can import `spyre_sim`; its standard output, or an error with its stderr.

    For what cannot be undone in a process: no operator at all, or the older one after
    `from spyre_sim import operator; operator.register_old()`.
    """
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stderr}")
    return done.stdout
