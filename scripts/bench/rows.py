"""What comes out: one figure a row, kept as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers

import swapatch

from .device import cpu_name

SCHEMA = 1
"""Of the JSON file; goes up when a field changes its meaning."""


@dataclass
class Row:
    """One figure: stock and swapatch doing the same, or one of them alone.

    Attributes:
        setting: what was run besides ``model``.
        tokens: of the prompt, or the context of a decode step.
        error: largest difference of the two results, as a part of the largest number in them.
        ratio: stock over swapatch, median of the rounds; for a figure that is no comparison, None.
        ratio_of_sums: the same of the sums over all rounds, which rare work such as a roll counts in.
        device: that the models were on: the hardware's name.
    """

    case: str
    model: str
    setting: str
    tokens: int | None
    dtype: str
    unit: str
    stock: str = ""
    stock_value: float | None = None
    patched: str = ""
    patched_value: float | None = None
    ratio: float | None = None
    ratio_of_sums: float | None = None
    rounds: int = 1
    error: float | None = None
    tolerance: float | None = None
    note: str = ""
    device: str = ""
    threads: int = 0
    cpu: str = ""
    torch: str = torch.__version__
    transformers: str = transformers.__version__
    swapatch: str = swapatch.__version__

    def __post_init__(self) -> None:
        self.threads = self.threads or torch.get_num_threads()
        self.cpu = self.cpu or cpu_name()


def failed(error: Exception, **about: Any) -> Row:
    """Instead of a figure, for what is compiled: that does not succeed everywhere."""
    text = " ".join(str(error).split()) or type(error).__name__
    said = text if len(text) <= 200 else text[:197] + "..."
    return Row(unit="s", note=f"does not run here: {said}", **about)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write(rows: list[Row], names: Sequence[str], order: Sequence[str], out: Path) -> None:
    """The rows of these cases, in the order of all there are.

    Rows of other cases that an earlier run left there stay; every row says what it was measured with.
    """
    out.mkdir(parents=True, exist_ok=True)
    new = [asdict(row) for row in rows]
    kept = [row for row in earlier(out / "bench.json") if row["case"] not in names]
    found = sorted(kept + new, key=lambda row: order.index(row["case"]))
    document = {"schema": SCHEMA, "environment": environment(), "rows": found}
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with (out / "bench.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [column.name for column in fields(Row)])
        table.writeheader()
        table.writerows(found)


def earlier(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["rows"] if document.get("schema") == SCHEMA else []


def environment() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "swapatch": swapatch.__version__,
        "system": platform.system(),
    }
