"""Eager operations on the simulated device: what they cost, and what a card would refuse.

Only imported by `device`, whose `counting` and `strict` switch it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from . import layouts, support


class Binary(NamedTuple):
    """What a card must compile once for a piece of eager work."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


native_ops: Counter[str] = Counter()
cpu_fallbacks: Counter[str] = Counter()
binaries: Counter[Binary] = Counter()
relayouts: Counter[str] = Counter()
layout_copies = 0

COPIES = frozenset({"copy", "clone", "to"})
UNCOUNTED = frozenset({"empty", "resize", "set", "local_scalar_dense"}) | support.VIEWS
"""Neither computed on the card nor fetched from it by a fallback: memory, views, a number that is read."""


class _Eager(TorchDispatchMode):
    """Sees every eager operation of this thread, but none that is compiled."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _native.in_region() or _native.in_whole():
            return func(*args, **kwargs)
        name = support.plain(func._schema.name)
        if name not in support.WHOLE and is_composite(func):  # in inference mode: elsewhere its parts come one by one
            with self:
                return func.decompose(*args, **kwargs)
        given = on_device((args, kwargs))
        if _strict:
            _refuse_arguments(name, func, args, kwargs, given)
        copied = args[1] if name == "copy" else args[0] if name in COPIES else None
        result = func(*args, **kwargs)
        made = on_device(result)
        if _strict and any(not t.numel() for t in made):
            raise RuntimeError(f"spyre: eager '{name}' makes a tensor of zero size, which a card crashes on")
        if name in COPIES:
            _count_copy(name, copied, result)
        elif given or made:
            _count(name, given or made)
            if name == "index_copy" and func._schema.is_mutable:
                dim = args[1] % max(args[0].dim(), 1)
                relayouts[name] += layouts.first_dim(args[0]) != dim
        return result


def install() -> None:
    """While a graph is traced, what is one operation to the card falls apart as on any other device."""
    for name in sorted(support.WHOLE - {"scaled_dot_product_attention"}):
        op = getattr(torch.ops.aten, name).default
        op.py_impl(torch._C.DispatchKey.AutogradPrivateUse1)(op.decompose)


def is_composite(func: Any) -> bool:
    """Whether PyTorch knows the operation as nothing but a sequence of others."""
    return func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def on_device(values: Any) -> list[Tensor]:
    """The device tensors among these."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type == "spyre"]


# -- counting --


def _binary(name: str, tensors: list[Tensor]) -> Binary:
    return Binary(
        name,
        tuple(tuple(t.shape) for t in tensors),
        tuple(t.stride() for t in tensors),
        tuple(t.storage_offset() for t in tensors),
        tuple(t.dtype for t in tensors),
    )


def _count(name: str, given: list[Tensor]) -> None:
    where = support.where(name)
    if name in UNCOUNTED:
        return
    if where == support.EAGER:
        native_ops[name] += 1
        binaries[_binary(name, given)] += 1
    elif where == support.FALLBACK:
        cpu_fallbacks[name] += 1


def _count_copy(name: str, source: Tensor, target: Tensor) -> None:
    global layout_copies
    if source.device.type != "spyre" or target.device.type != "spyre" or source is target:
        return
    binaries[_binary("copy", [target, source])] += 1
    layout_copies += name == "copy" and not layouts.same_kind(source.expand(target.shape), target)


# -- refusing --


def _refuse_arguments(name: str, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
    """Raise where a card does not run this, or not right."""
    target = torch.device(kwargs.get("device") or "cpu").type
    if not given and target != "spyre":
        return
    where = support.where(name)
    if any(not t.numel() for t in given):
        raise RuntimeError(f"spyre: eager '{name}' takes a tensor of zero size, which a card crashes on")
    if where == support.BROKEN:
        raise RuntimeError(f"spyre: '{name}' is missing or broken on a card")
    if name in support.VIEWS or name in UNCOUNTED:
        return
    if name in COPIES:
        _refuse_copy(name, args, kwargs)
        return
    if where == support.COMPILED:
        raise RuntimeError(f"spyre: eager '{name}' is compiled-only")
    if where == support.EAGER and name not in support.MOVES and any(t.dtype == torch.bool for t in given):
        raise RuntimeError(f"spyre: eager '{name}' computes with a bool tensor, which a card gets wrong")
    if func.name() == "aten::cat" and any(part.shape[_dim(args, kwargs)] == 1 for part in args[0]):
        raise RuntimeError("spyre: 'cat' with a part of size 1 on that dimension was wrong on a card")
    for tensor in given:
        if not _native.is_whole(tensor):
            raise RuntimeError(
                f"spyre: eager '{name}' of a view: shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset "
                f"{tensor.storage_offset()}; a view of a slice is compiled-only"
            )


def _refuse_copy(name: str, args: Any, kwargs: Any) -> None:
    if name == "copy":
        target, source = args[:2]
        stays = source.device == target.device
        cast = source.dtype != target.dtype
    else:
        (source, *_) = args
        stays = source.device.type == torch.device(kwargs.get("device") or source.device).type
        cast = (kwargs.get("dtype") or source.dtype) != source.dtype
    if stays and cast:
        raise RuntimeError(f"spyre: an eager cast ('{name}' to another dtype) is compiled-only")
    if stays and name != "copy":
        raise RuntimeError(f"spyre: eager '{name}', a copy (clone, contiguous, reshape, to), is compiled-only")


def _dim(args: Any, kwargs: Any) -> int:
    return int(args[1] if len(args) > 1 else kwargs.get("dim", 0))


def _whole(name: str, tensors: list[Tensor]) -> None:
    """One operation to the card is about to run in parts."""
    if _mode not in _get_current_dispatch_mode_stack():
        return  # it is being traced
    given = on_device(tensors)
    if _strict:
        _refuse_arguments(name, getattr(torch.ops.aten, name).default, tensors, {}, given)
    _count(name, given)


# -- switching on and off --

_mode = _Eager()
_users = 0
_strict = False
_native: Any = None


@contextmanager
def watching(native: Any, *, strict: bool = False) -> Iterator[None]:
    """Count what runs eagerly within; with `strict`, refuse what a card would. Contexts may nest."""
    global _users, _strict, _native
    before, _native = _strict, native
    _users, _strict = _users + 1, _strict or strict
    if _users == 1:
        _mode.__enter__()
        native.hook_whole(_whole)
    try:
        yield
    finally:
        _users, _strict = _users - 1, before
        if not _users:
            native.hook_whole(None)
            _mode.__exit__(None, None, None)
