"""How much memory a piece of work takes at its peak, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .sizes import Options


def peak_in_child(what: str, name: str, tokens: int, options: Options) -> float:
    """MiB of ``python scripts/bench --child``: what was held before can make no difference."""
    child = ["--child", what, name, str(tokens), "--threads", str(options.threads), "--device", options.device.name]
    command = [sys.executable, str(Path(__file__).parent), *child, *["--quick"] * options.quick]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
