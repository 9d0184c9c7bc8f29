"""How long it takes to import swapatch and to patch a model."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

import swapatch

from .models import random_model
from .rows import Row
from .sizes import TOY, Options
from .timing import timed

GEMMA3 = "transformers.models.gemma3.modeling_gemma3"
IMPORTED = {
    "transformers and its Gemma 3": GEMMA3,
    "transformers and its Gemma 3 and 4": ", ".join(
        [GEMMA3, *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma4", "gemma4_unified"))]
    ),
}
"""What is there before ``import swapatch``: transformers alone imports no model, and not even torch."""


def startup(options: Options) -> Iterator[Row]:
    """How long ``patch`` and ``import swapatch`` take."""
    about = {"case": "startup", "tokens": None, "unit": "s", "rounds": 5, "patched": "swapatch"}
    layers = options.sizes.patch_layers
    model = random_model({**TOY, "num_hidden_layers": layers}, torch.float32)
    about["patched_value"] = statistics.median(patch_and_undo(model) for _ in range(5))
    yield Row(model=f"random toy, {layers} layers", setting="patch(model)", dtype="float32", **about)
    for said, loaded in IMPORTED.items():
        about["patched_value"] = statistics.median(import_time(loaded) for _ in range(3))
        about["rounds"] = 3
        yield Row(model="", setting=f"import swapatch, after {said}", dtype="", **about)


def patch_and_undo(model: Any) -> float:
    seconds, handle = timed(lambda: swapatch.patch(model))
    handle.undo()
    return seconds


def import_time(loaded: str) -> float:
    code = f"import time, {loaded}; start = time.perf_counter(); import swapatch; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)
