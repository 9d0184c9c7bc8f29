"""Everything that can be measured, and one run over some of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .compiled import compiled
from .decode import decode
from .host import host
from .layer_decode import layer_decode
from .layer_prefill import choices, chosen, layer_prefill
from .layer_training import layer_training
from .memory import memory, prefill_peak
from .parts import parts
from .peers import peers
from .prefill import prefill
from .roofline import roofline
from .rows import Row, write
from .scoring import scoring
from .screen import progress
from .sizes import Options
from .startup import startup
from .table import markdown
from .training import training, training_peak

CASES: dict[str, Callable[[Options], Iterator[Row]]] = {
    "layer-prefill": layer_prefill,
    "choices": choices,
    "layer-decode": layer_decode,
    "layer-training": layer_training,
    "prefill": prefill,
    "parts": parts,
    "scoring": scoring,
    "decode": decode,
    "memory": memory,
    "training": training,
    "compiled": compiled,
    "host": host,
    "startup": startup,
    "roofline": roofline,
    "peers": peers,
}

ON_DEVICE = {"cpu": tuple(CASES), "cuda": ("peers", "memory")}
"""What can be measured where: the other cases make their tensors on the CPU."""

PEAKS: dict[str, Callable[[str, int, Options], float]] = {"prefill": prefill_peak, "training": training_peak}
"""What :func:`bench.peak.peak_in_child` can ask a child for."""


def run(names: list[str], options: Options, out: Path) -> list[Row]:
    """These cases; what is done is written after each row, so that a run cut short leaves something."""
    rows: list[Row] = []
    with progress(len(names)) as show, torch.no_grad():
        for number, name in enumerate(names):
            show(number, name, None)
            for row in CASES[name](options):
                row.device = options.device.describe()
                rows.append(row)
                show(number, name, row)
                write(rows, names[: number + 1], list(CASES), out)
                (out / "bench.md").write_text(markdown(rows), encoding="utf-8")
        show(len(names), "done", None)
    if "choices" in names:
        (out / "table.json").write_text(json.dumps(chosen(rows), indent=2) + "\n", encoding="utf-8")
    return rows
