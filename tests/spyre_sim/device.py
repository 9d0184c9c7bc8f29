"""A simulated Spyre card: the PyTorch device `spyre`, in host memory, with real Inductor code generation.

Simulated:

* Fresh memory is full of NaN (0xFF bytes; bool tensors are False, other integers -1): who reads before writing sees it.
* Only allocation, views and copies run "on the device" in eager mode. Everything else is computed by the CPU, and is
  counted by name; `scaled_dot_product_attention` is one operation. support.py tells what a card would compute itself.
* `torch.compile(backend="inductor")` generates Inductor's C++ for the device. What Inductor fuses is native there, an
  in-place `index_copy_` too. What it calls from outside (matrix products, for one) falls back, and is counted apart.
* `spyre::sliding_window_attention` raises unless a compiled graph calls it, and checks its contract (operator.py).
* Transfers between host and device are counted, except those within a fallback, which only add up to
  `fallback_bytes`. So are copies that stay on the device, and bytes alive.
* Two faults, as errors where a card is silently wrong: copying from the host into a slice of a device tensor
  ("host_slice_copy"), and a view with a storage offset as the input of a graph ("offset_input").
* Layouts, as marks on the memory that costs are counted by: `torch_spyre._C.SpyreTensorLayout`, and
  `tensor.to("spyre", device_layout=...)`. An `index_copy_` on a dimension that is not the device's first counts as a
  relayout, and so do copies between layouts of different kind.
* The work that a card would compile a binary for is told apart by operation, shapes, strides, offsets and types. How
  a constant (a factor, a dimension) enters its binary is unknown, and left out.
* Eager operations can be forbidden by name (`forbidden`), or by what a card runs (`strict`): what it does only in a
  graph or not at all is refused. There, a view may be made of anything and copied, but not computed with unless it is
  the whole of its memory.
* `compiled_ops` tells what a graph consists of, before Inductor's decompositions, for `support.not_compilable`.

Not simulated: time; the device's number format, and the order of elements that a layout means (float32 works); that a
relayout was wrong in older versions; that what the card cannot compile fails in a graph: `not_compilable` tells, by
the names of operations, not by sizes (`cat` with a part of size 1, tensors of zero size, bool masks); that a view
costs a binary of its own; that rolling a buffer into itself in a graph overwrites live rows; that a buffer updated in
a graph may come back as another tensor; streams, events, random numbers of its own.

The hooks into Inductor are private to PyTorch and made for 2.13: another version may need another inductor.py.

Use:

    device.load()                               # once a process; again is harmless. `load_or_skip` for fixtures
    model.to("spyre")
    with device.counting() as counts: ...       # `counts`, a Counts, is filled at the end
    with device.forbidden("cat"): ...           # also `forbidden_in(modules)`; default names: SLIDING_FORBIDDEN
    with device.strict(): ...                   # also `strict_in(modules)`
    with device.compiled_ops() as ops: ...      # `ops`, a set of Op, grows with each graph that is made or called
    with device.tolerated("host_slice_copy"):   # without that fault
    device.layout_of(tensor)                    # its SpyreTensorLayout; `first_dim(tensor)`: device dimension 0
    device.host_view(tensor)                    # a CPU tensor over the same memory, uncounted

A process that has loaded it has an accelerator from then on: `torch.accelerator` says so, to transformers as well.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import eager, graphs, layouts, operator
from .eager import Binary
from .layouts import first_dim, layout_of, same_kind
from .support import Op

__all__ = [
    "Binary",
    "Counts",
    "Op",
    "Transfer",
    "compiled_ops",
    "counting",
    "first_dim",
    "forbidden",
    "forbidden_in",
    "host_view",
    "in_compiled_region",
    "layout_of",
    "live_bytes",
    "load",
    "load_or_skip",
    "missing_tools",
    "same_kind",
    "strict",
    "strict_in",
    "tolerated",
]

SOURCE = Path(__file__).with_suffix(".cpp")

SLIDING_FORBIDDEN = (
    "roll",
    "index_copy",
    "index_put",
    "scatter",
    "cat",
    "where",
    "masked_fill",
    "masked_scatter",
    "masked_select",
    "nonzero",
    "arange",
    "tril",
    "triu",
    "cumsum",
    "isin",
)
"""What must not run eagerly on the path of a sliding layer. Names are without overload and trailing underscore."""


# -- what was counted --


@dataclass(frozen=True)
class Transfer:
    """One copy between host and device. `direction` is "h2d" or "d2h", `dtype` as in "BFloat16"."""

    direction: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass
class Counts:
    """What happened on the device within a `counting`. Empty until that ends."""

    transfers: list[Transfer] = field(default_factory=list)
    eager_fallbacks: Counter[str] = field(default_factory=Counter)
    compiled_fallbacks: Counter[str] = field(default_factory=Counter)
    fallback_bytes: int = 0
    device_copies: int = 0
    device_copy_bytes: int = 0
    native_ops: Counter[str] = field(default_factory=Counter)
    """Eager operations that a card runs itself, by the names of support.py."""
    cpu_fallbacks: Counter[str] = field(default_factory=Counter)
    """Eager operations that a card leaves to the CPU."""
    eager_binaries: Counter[Binary] = field(default_factory=Counter)
    """Eager work by what a card compiles for it: its length is how many binaries there must be."""
    relayouts: Counter[str] = field(default_factory=Counter)
    """In-place `index_copy_`, eager or compiled, on another dimension than the buffer's first on the device."""
    layout_copies: int = 0
    """Eager copies between device tensors whose layouts differ in kind."""
    regions: Counter[int] = field(default_factory=Counter)
    """Calls of each compiled graph, by its number (the n-th generated in this process). Two frames whose graphs are
    equal may share the generated code, and so the number; `graphs.watched` counts both."""

    @property
    def uploads(self) -> list[Transfer]:
        """Transfers from the host to the device."""
        return [t for t in self.transfers if t.direction == "h2d"]

    @property
    def downloads(self) -> list[Transfer]:
        """Transfers from the device to the host."""
        return [t for t in self.transfers if t.direction == "d2h"]


@contextmanager
def counting() -> Iterator[Counts]:
    """Count what happens within."""
    native, counts = _native(), Counts()
    first = native.transfer_count()
    before, regions, watched = native.counters(first), Counter(_regions), _watched()
    try:
        with eager.watching(native):
            yield counts
    finally:
        after = native.counters(first)
        counts.transfers = [Transfer(*transfer) for transfer in after["transfers"]]
        counts.eager_fallbacks = Counter(after["eager_fallbacks"]) - Counter(before["eager_fallbacks"])
        counts.compiled_fallbacks = Counter(after["compiled_fallbacks"]) - Counter(before["compiled_fallbacks"])
        for name in ("fallback_bytes", "device_copies", "device_copy_bytes"):
            setattr(counts, name, after[name] - before[name])
        counts.regions = _regions - regions
        for name, value in _watched().items():
            setattr(counts, name, value - watched[name])


def _watched() -> dict[str, Any]:
    from . import compiled

    return {
        "native_ops": Counter(eager.native_ops),
        "cpu_fallbacks": Counter(eager.cpu_fallbacks),
        "eager_binaries": Counter(eager.binaries),
        "relayouts": eager.relayouts + compiled.relayouts,
        "layout_copies": eager.layout_copies,
    }


@contextmanager
def compiled_ops() -> Iterator[set[Op]]:
    """The operations of all graphs for the device that are made or called within, before Inductor takes them apart."""
    _native()
    from . import compiled

    with compiled.watched() as ops:
        yield ops


def live_bytes() -> int:
    """Bytes of device memory in use."""
    return int(_native().live_bytes())


def host_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a device tensor. Counts as no transfer."""
    view: Tensor = _native().host_view(tensor)
    return view


# -- what is refused --


@contextmanager
def forbidden(*names: str, bool_tensors: bool = True) -> Iterator[None]:
    """Within, an eager fallback of such a name raises RuntimeError; without names, those of `SLIDING_FORBIDDEN`.

    Args:
        names: adds to what is forbidden already.
        bool_tensors: forbid any fallback that takes or gives a bool tensor as well.
    """
    native = _native()
    before, before_bool = native.forbidden()
    native.forbid(before | set(names or SLIDING_FORBIDDEN), before_bool or bool_tensors)
    try:
        yield
    finally:
        native.forbid(before, before_bool)


@contextmanager
def forbidden_in(modules: Iterable[nn.Module], *names: str, bool_tensors: bool = True) -> Iterator[None]:
    """`forbidden`, but only while one of these modules runs."""
    with _while_running(modules, lambda: forbidden(*names, bool_tensors=bool_tensors)):
        yield


@contextmanager
def strict() -> Iterator[None]:
    """Within, an eager operation that a card runs only in a graph, or not at all, raises RuntimeError.

    By the table of support.py. Views may be made, and copied, but nothing is computed from those that are not the
    whole of their memory. Compiled graphs are not concerned.
    """
    with eager.watching(_native(), strict=True):
        yield


@contextmanager
def strict_in(modules: Iterable[nn.Module]) -> Iterator[None]:
    """`strict`, but only while one of these modules runs eagerly."""
    with _while_running(modules, strict):
        yield


@contextmanager
def _while_running(modules: Iterable[nn.Module], make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    entered: list[Any] = []

    def begin(*_: object) -> None:
        if torch.compiler.is_compiling():  # the hook is part of a graph then
            return
        entered.append(make())
        entered[-1].__enter__()

    def end(*_: object) -> None:
        if torch.compiler.is_compiling():
            return
        entered.pop().__exit__(None, None, None)

    hooks = []
    for module in modules:
        hooks.append(module.register_forward_pre_hook(begin))
        hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


FAULTS = ("host_slice_copy", "offset_input")
_tolerated: set[str] = set()


@contextmanager
def tolerated(*names: str) -> Iterator[None]:
    """Within, these faults (all of `FAULTS` without a name) do what a sound device would do."""
    global _tolerated
    before, _tolerated = _tolerated, _tolerated | set(names or FAULTS)
    _native().refuse_slices("host_slice_copy" not in _tolerated)
    try:
        yield
    finally:
        _tolerated = before
        _native().refuse_slices("host_slice_copy" not in _tolerated)


# -- compiled graphs --

_regions: Counter[int] = Counter()
_generated = 0


def in_compiled_region() -> bool:
    """Whether the code of a compiled graph is running."""
    return bool(_native().in_region())


def compiled_region(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Wraps the entry of a generated module, which names it as `torch.spyre.compiled_region`."""
    global _generated
    _generated += 1
    number = _generated

    @functools.wraps(call)
    def run(args: list[Any]) -> Any:
        _refuse_offsets(args)
        _regions[number] += 1
        _native().enter_region()
        try:
            return call(args)
        finally:
            _native().exit_region()

    return run


def _refuse_offsets(args: list[Any]) -> None:
    if "offset_input" in _tolerated:
        return
    for position, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.device.type == "spyre" and arg.storage_offset():
            raise RuntimeError(
                f"spyre: input {position} of a compiled graph, {tuple(arg.shape)}, is a view with storage offset "
                f"{arg.storage_offset()}, which a card would lose: clone() it"
            )


# -- loading --

_module: Any = None


def load() -> None:
    """Build the device if need be (about 20 s the first time), and register it with this process.

    Raises:
        RuntimeError: where it cannot be built; the message says what is missing.
    """
    global _module
    if _module is not None:
        return
    if missing := missing_tools():
        raise RuntimeError(f"the simulated device cannot be built: {missing}")
    _module = _build()
    torch.utils.rename_privateuse1_backend("spyre")
    torch._register_device_module("spyre", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=False)
    operator.register()
    layouts.install()
    eager.install()
    _teach_inductor()


def load_or_skip() -> None:
    """`load` for fixtures: skips the test where the device cannot be built, but fails where the variable CI is set."""
    if _module is None and not os.environ.get("CI") and (missing := missing_tools()):
        pytest.skip(f"the simulated Spyre device cannot be built: {missing}")
    load()


def missing_tools() -> str | None:
    """What this machine lacks to build the device, or None."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python headers"
    with _scripts_on_path():
        if shutil.which("ninja") is None:
            return "no ninja"
    return None


def _native() -> Any:
    if _module is None:
        raise RuntimeError("the simulated device is not loaded: call spyre_sim.device.load()")
    return _module


def _build() -> Any:
    """The extension, from a folder for this source, torch and Python, so that a later process finds it built."""
    from torch.utils import cpp_extension

    about = (torch.__version__, sys.version, SOURCE.read_text())
    digest = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = _cache_root() / f"swapatch_spyre_sim_{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with _scripts_on_path(), _locked(folder / "swapatch.lock"):
        # Left behind by a build that was killed, torch's own lock would block for ever. Ours goes with its process.
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "swapatch_spyre_sim", [str(SOURCE)], extra_cflags=["-O1"], build_directory=str(folder)
        )


def _cache_root() -> Path:
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK):
            return root
    return Path(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """A ninja from pip sits beside the interpreter, which need not be on the path."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _device_module() -> types.ModuleType:
    """`torch.spyre`, with what torch asks of the module of a device."""
    module = types.ModuleType("torch.spyre", "The simulated Spyre device.")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device = nullcontext
    module.synchronize = lambda device=None: None
    module.empty_cache = lambda: None
    module.memory_allocated = lambda device=None: live_bytes()
    module._is_in_bad_fork = lambda: False
    # Random numbers come from the CPU's generator.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.compiled_region = compiled_region
    return module


def _teach_inductor() -> None:
    """Register a code generator: the C++ one, which need not know that its pointers belong to a device."""
    graphs.import_inductor()
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.fx_passes.joint_graph import lazy_init

    from . import compiled
    from .inductor import SourceInKey, SpyreScheduling, SpyreWrapper, schedule_like_the_cpu

    schedule_like_the_cpu()
    compiled.install()
    register_interface_for_device("spyre", type("SpyreInterface", (CpuInterface,), {}))
    register_device_op_overrides("spyre", CpuDeviceOpOverrides())
    register_backend_for_device("spyre", SpyreScheduling, SpyreWrapper, device_custom_pass=SourceInKey())
    # Inductor tries its patterns on tensors of a device when it first compiles for it. Not while somebody counts.
    lazy_init(torch.device("spyre", 0))
