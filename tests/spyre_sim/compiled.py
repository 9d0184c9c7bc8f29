"""What the graphs for the simulated device consist of, before Inductor takes them apart.

Only imported by `device`: it takes Inductor along. torch.compile hands each graph over to Inductor's backend even if
Inductor's own cache knows it: there it is run once on tensors without data, and its operations are noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import layouts, support
from .eager import is_composite, on_device

relayouts: Counter[str] = Counter()
_watchers: list[set[support.Op]] = []

TURNS = support.CUTS | {"cat", "flip"}


@dataclass(frozen=True)
class Write:
    """An `index_copy_` in a graph: into which input (None: into none), or a view of it, and along which dimension."""

    position: int | None
    dim: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def relays(self, inputs: tuple[Any, ...]) -> bool:
        """Whether the buffer must be laid out in another way for it."""
        if self.position is None:
            layout = layouts.default(self.size, self.stride, self.dtype)
        else:
            layout = layouts.layout_of(inputs[self.position])
        return layouts.device_dims(layout, self.size, self.stride)[0] != self.dim


@dataclass
class _Recorder(TorchDispatchMode):
    inputs: list[Any]
    ops: set[support.Op] = field(default_factory=set)
    writes: list[Write] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = support.plain(func._schema.name)
        if name not in support.WHOLE and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # a question about a tensor
            return result
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if on_device((args, kwargs, result)) and not _cuts_nothing(name, args, result):
            self.ops.add(support.Op(name, _on_last(name, named)))
        if name == "index_copy" and func._schema.is_mutable:
            target = named["self"]
            dim = named["dim"] % max(target.dim(), 1)
            self.writes.append(Write(self._position(target), dim, tuple(target.shape), target.stride(), target.dtype))
        return result

    def _position(self, target: Tensor) -> int | None:
        memory = target.untyped_storage()._cdata
        for position, value in enumerate(self.inputs):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata == memory:
                return position
        return None


def _cuts_nothing(name: str, args: Any, result: Any) -> bool:
    return name == "slice" and isinstance(result, Tensor) and result.shape == args[0].shape


def _on_last(name: str, named: dict[str, Any]) -> bool:
    if name not in TURNS:
        return False
    tensor = named["self"] if "self" in named else named["tensors"][0]
    dims = named["dims"] if "dims" in named else [named.get("dim", 0)]
    return tensor.dim() - 1 in {dim % tensor.dim() for dim in dims}


def _record(graph: Callable[..., Any], inputs: Sequence[Any]) -> _Recorder:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder([fake.from_tensor(value) if isinstance(value, Tensor) else value for value in inputs])
    with torch.no_grad(), fake, recorder:
        graph(*recorder.inputs)
    return recorder


@contextmanager
def watched() -> Iterator[set[support.Op]]:
    """The operations of every graph for the device that is made or called within."""
    ops: set[support.Op] = set()
    _watchers.append(ops)
    try:
        yield ops
    finally:
        _watchers[:] = [other for other in _watchers if other is not ops]  # two empty sets are equal


def install() -> None:
    """See each graph on its way to Inductor."""
    backend = torch._TorchCompileInductorWrapper
    compile_graph = backend.__call__

    def compile_and_note(self: Any, graph: Any, inputs: Any, **rest: Any) -> Any:
        if not on_device(inputs):
            return compile_graph(self, graph, inputs, **rest)
        recorder = _record(graph, inputs)
        note(recorder.ops)
        call = compile_graph(self, graph, inputs, **rest)

        def run(*args: Any) -> Any:
            note(recorder.ops)
            relayouts["index_copy"] += sum(write.relays(args) for write in recorder.writes)
            return call(*args)

        return run

    def note(ops: set[support.Op]) -> None:
        for watcher in _watchers:
            watcher |= ops

    backend.__call__ = compile_and_note
