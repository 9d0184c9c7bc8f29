"""Layouts of the simulated device's tensors: what `torch_spyre._C` and `Tensor.to(..., device_layout=)` offer.

A layout says how a card would lay the elements out. Here it is a mark on the memory that costs are counted by: the
elements themselves stay as PyTorch has them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from math import prod
from typing import Any

import torch
from torch import Tensor

_FORMATS = {  # the device's name, and the elements of a stick of 128 bytes
    torch.float16: ("SEN169_FP16", 64),
    torch.bfloat16: ("BFLOAT16", 64),
    torch.float32: ("IEEE_FP32", 32),
    torch.int32: ("IEEE_INT32", 32),
    torch.int64: ("IEEE_INT64", 32),  # which travels as int32
    torch.bool: ("BOOL", 64),
}


def get_device_dtype(dtype: torch.dtype) -> str:
    """The device's format of these numbers, a name here."""
    return _format(dtype)[0]


def _format(dtype: torch.dtype) -> tuple[str, int]:
    if dtype not in _FORMATS:
        raise RuntimeError(f"spyre: the card has no format for {dtype}")
    return _FORMATS[dtype]


class SpyreTensorLayout:
    """Sizes of the device's dimensions, and how far apart their steps lie in the logical tensor.

    Either of `(size, stride, dtype, dim_order)`, whose device dimensions are `dim_order[1:]`, the last of them in
    sticks, then `dim_order[0]`, then a stick; or of `(device_size=, stride_map=, device_dtype=)`.
    """

    def __init__(
        self,
        size: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        dim_order: Sequence[int] | None = None,
        *,
        device_size: Sequence[int] | None = None,
        stride_map: Sequence[int] | None = None,
        device_dtype: str | None = None,
    ) -> None:
        logical, explicit = (size, stride, dtype, dim_order), (device_size, stride_map, device_dtype)
        if all(x is None for x in logical) and None not in explicit:
            self.device_size, self.stride_map, self.device_dtype = list(device_size), list(stride_map), device_dtype
        elif all(x is None for x in explicit) and None not in logical:
            self.device_size, self.stride_map, self.device_dtype = _ordered(*logical)
        else:
            raise TypeError("expected (size, stride, dtype, dim_order) or (device_size=, stride_map=, device_dtype=)")
        if len(self.device_size) != len(self.stride_map):
            raise RuntimeError(f"{len(self.device_size)} sizes and {len(self.stride_map)} strides")

    def _key(self) -> tuple[Any, ...]:
        return tuple(self.device_size), tuple(self.stride_map), self.device_dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpyreTensorLayout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        about = f"device_size={self.device_size}, stride_map={self.stride_map}, device_dtype={self.device_dtype!r}"
        return f"SpyreTensorLayout({about})"


def _ordered(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, dim_order: Sequence[int]
) -> tuple[list[int], list[int], str]:
    device_dtype, stick = _format(dtype)
    if sorted(dim_order) != list(range(len(size))) or len(size) != len(stride):
        raise RuntimeError(f"dim_order {list(dim_order)} and strides {list(stride)} do not fit the sizes {list(size)}")
    if not dim_order:
        return [1, stick], [-1, -1], device_dtype
    in_sticks = dim_order[-1]
    device_size, stride_map = [], []
    for dim in (*dim_order[1:], dim_order[0]):
        sticks = dim == in_sticks
        device_size.append(-(-size[dim] // stick) if sticks else size[dim])
        step = min(stick, size[dim]) * stride[dim] if sticks else stride[dim]
        stride_map.append(-1 if size[dim] == 1 else step)
    if len(dim_order) == 1:  # there is nothing else than the dimension in sticks
        device_size, stride_map = device_size[:1], stride_map[:1]
    last = -1 if size[in_sticks] == 1 else stride[in_sticks]
    return [*device_size, stick], [*stride_map, last], device_dtype


# -- which logical dimension a device dimension is --


def device_dims(layout: SpyreTensorLayout, size: Sequence[int], stride: Sequence[int]) -> list[int | None]:
    """For each device dimension the logical one of a tensor of these sizes and strides.

    None for a device dimension of size 1, and for one that the tensor, a view perhaps, cannot step along.
    """
    stick, within = layout.device_size[-1], layout.stride_map[-1]

    def find(extent: int, step: int) -> int | None:
        if extent == 1 or step <= 0:
            return None
        here = [dim for dim in range(len(size)) if stride[dim] == step]
        here.sort(key=lambda dim: (size[dim] != extent, size[dim] == 1))
        return here[0] if here else None

    last = find(stick, within)
    dims = []
    for extent, step in zip(layout.device_size[:-1], layout.stride_map[:-1], strict=True):
        dim = find(extent, step)
        sticks = extent > 1 and step == stick * within and last is not None and size[last] > stick
        dims.append(last if dim is None and sticks else dim)
    return [*dims, last]


def alike(left: Sequence[int | None], right: Sequence[int | None]) -> bool:
    """Whether two layouts, as `device_dims` gives them, are of one kind: sizes do not matter."""
    both = set(left) & set(right) - {None}

    def places(dims: Sequence[int | None]) -> list[tuple[int, int | None]]:
        kept = [(place, dim) for place, dim in enumerate(dims) if dim in both]
        return kept if len(left) == len(right) else list(enumerate(dim for _, dim in kept))

    return places(left) == places(right)


def misfit(layout: SpyreTensorLayout, tensor: Tensor) -> str | None:
    """What is wrong with the layout for a whole tensor, or None."""
    device_dtype = get_device_dtype(tensor.dtype)
    if layout.device_dtype != device_dtype:
        return f"it holds {layout.device_dtype}, the tensor {device_dtype}"
    dims = device_dims(layout, tensor.shape, tensor.stride())
    extents: dict[int, list[int]] = {}
    for place, (dim, extent) in enumerate(zip(dims, layout.device_size, strict=True)):
        if dim is not None:
            extents.setdefault(dim, []).append(extent)
        elif extent > 1 and place < len(dims) - 1:
            return f"device dimension {place} is none of the tensor's"
    for dim, size in enumerate(tensor.shape):
        found = extents.get(dim, [1])
        stick = layout.device_size[-1] if dim == dims[-1] else 1
        if prod(found) != -(-size // stick) * stick:
            return f"dimension {dim} has size {size}, its device dimensions have {found}"
    return None


# -- which layout a tensor has --

_given: list[SpyreTensorLayout] = []
"""Layouts that were given to tensors: the n-th has number n + 1."""


def layout_of(tensor: Tensor) -> SpyreTensorLayout:
    """The layout of a device tensor, or of that which it is a view of.

    The default is upstream's `dim_order` of 0, 1, 2, ...: device dimensions `[H, L, D/64, B, 64]` for `[B, H, L, D]`.
    """
    from . import device

    number, size, stride = device._native().allocation(tensor)
    return _given[number - 1] if number else default(size, stride, tensor.dtype)


def default(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> SpyreTensorLayout:
    """The layout of a tensor that was made without one."""
    return SpyreTensorLayout(size, stride, dtype, list(range(len(size))))


def first_dim(tensor: Tensor) -> int | None:
    """The logical dimension of a device tensor that is device dimension 0; None where that has size 1."""
    return device_dims(layout_of(tensor), tensor.shape, tensor.stride())[0]


def same_kind(left: Tensor, right: Tensor) -> bool:
    """Whether two device tensors of one shape have layouts of one kind, whatever their sizes."""
    return alike(*(device_dims(layout_of(t), t.shape, t.stride()) for t in (left, right)))


def _give(tensor: Tensor, layout: SpyreTensorLayout) -> None:
    from . import device

    if wrong := misfit(layout, tensor):
        raise RuntimeError(f"spyre: {layout} does not fit {tuple(tensor.shape)} in {tensor.dtype}: {wrong}")
    if layout not in _given:
        _given.append(
            SpyreTensorLayout(
                device_size=layout.device_size, stride_map=layout.stride_map, device_dtype=layout.device_dtype
            )
        )
    device._native().set_layout(tensor, _given.index(layout) + 1)


# -- the package --


def install() -> None:
    """Let `torch_spyre._C` be imported, and `Tensor.to` take a `device_layout`.

    `torch_spyre._C` is in `sys.modules` from now on, its parent once somebody imports that.
    """
    module = types.ModuleType("torch_spyre._C", "The simulated device's layouts.")
    module.SpyreTensorLayout = SpyreTensorLayout
    module.get_device_dtype = get_device_dtype
    sys.modules["torch_spyre._C"] = module
    sys.meta_path.append(_Finder())
    torch.Tensor.to = _patched(torch.Tensor.to)


class _Finder:
    """Finds the package `torch_spyre`, which is empty but for `_C`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name == "torch_spyre" else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module._C = sys.modules["torch_spyre._C"]


def _patched(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Tensor, *args: Any, device_layout: SpyreTensorLayout | None = None, **kwargs: Any) -> Tensor:
        if device_layout is None:
            return original(self, *args, **kwargs)
        if "device" not in kwargs and not any(isinstance(arg, (str, torch.device)) for arg in args):
            kwargs["device"] = "spyre"
        moved = original(self, *args, **kwargs)
        if moved.device.type != "spyre":
            raise RuntimeError(f"spyre: a tensor on {moved.device} has no device_layout")
        if moved is self and layout_of(self) == device_layout:
            return self
        if moved is self:  # which keeps its own layout
            moved = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            _give(moved, device_layout)
            return moved.copy_(self)
        _give(moved, device_layout)
        return moved

    return to
