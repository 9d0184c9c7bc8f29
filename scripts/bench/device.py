"""Where the models run: how time and memory are measured there, and what else differs between a CPU and a GPU.

This is the only module that knows; the cases ask the device of their options, or of their model.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

ATTENTIONS = ("sdpa", "eager", "flex_attention")


class Device(Protocol):
    """What a case needs to know.

    Attributes:
        attentions: stock's implementations that are measured here.
        graph_mode: of ``torch.compile``, for a decode step of fixed shapes.
    """

    name: str
    attentions: tuple[str, ...]
    graph_mode: str | None

    def why_not(self) -> str | None:
        """Why nothing can be measured here, or None."""

    def describe(self) -> str:
        """The hardware."""

    def timed(self, function: Callable[[], T]) -> tuple[float, T]:
        """Seconds, and the result."""

    def peak(self, work: Callable[[], Any]) -> float:
        """Memory at its peak while it works, in MiB above what is held before."""


class Cpu:
    """A clock, and the resident memory of this process."""

    name = "cpu"
    attentions = ATTENTIONS
    graph_mode = None

    def why_not(self) -> None:
        return None

    def describe(self) -> str:
        return cpu_name()

    def timed(self, function: Callable[[], T]) -> tuple[float, T]:
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result

    def peak(self, work: Callable[[], Any]) -> float:
        before = start_of_peak()
        result = work()
        peak = resident_peak()
        del result
        return (peak - before) / 2**20


class Cuda:
    """Events in the stream of the work, and what the allocator has handed out."""

    name = "cuda"
    attentions = (*ATTENTIONS, "flash_attention_2")
    graph_mode = "reduce-overhead"  # CUDA graphs

    def why_not(self) -> str | None:
        return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"

    def describe(self) -> str:
        return torch.cuda.get_device_name()

    def timed(self, function: Callable[[], T]) -> tuple[float, T]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # what is still in the stream is somebody else's
        start.record()
        result = function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def peak(self, work: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        del result
        return (peak - before) / 2**20


CPU = Cpu()
DEVICES: dict[str, Device] = {"cpu": CPU, "cuda": Cuda()}


def device_of(model: Any) -> Device:
    return DEVICES[model.device.type]


@once
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def start_of_peak() -> int:
    """Bytes resident now; from here on counts :func:`resident_peak`, where the system can begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")
    except OSError:
        return resident_peak()


def resident_peak() -> int:
    try:
        return resident("VmHWM")
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
