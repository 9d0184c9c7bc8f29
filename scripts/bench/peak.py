"""How much memory a piece of work takes at its peak, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .sizes import Options


def peak_in_child(what: str, name: str, tokens: int, options: Options) -> float:
    """MiB of ``python scripts/bench --child``: what was resident before can make no difference."""
    child = ["--child", what, name, str(tokens), "--threads", str(options.threads)]
    command = [sys.executable, str(Path(__file__).parent), *child, *["--quick"] * options.quick]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def peak_of(work: Callable[[], Any]) -> float:
    """Peak resident memory of this process while it works, in MiB above what is resident before."""
    before = start_of_peak()
    result = work()
    peak = resident_peak()
    del result
    return (peak - before) / 2**20


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
