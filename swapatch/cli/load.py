"""Loading configs, models and tokenizers for the command line, with errors that say what to do.

What is on disk is loaded without a look at the network. Anything else is the name of a model on the hub.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from .._errors import SwapatchError, explain
from ..families import plan_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The types that can be asked for, by name."""


def load_config(source: str) -> Any:
    """The config in a folder, in a file, or of a model on the hub. No weights are read.

    Raises:
        SwapatchError: there is none, or it cannot be read.
    """
    return _load(source, AutoConfig.from_pretrained, "a config that transformers can read", _CHECK_CONFIG)


def load_model(source: str, dtype: torch.dtype, device: str) -> Any:
    """The model in a folder or on the hub, in eval mode.

    Raises:
        UnsupportedModelError: swapatch cannot patch it; found out before any weight is read.
        SwapatchError: there is no model, or it cannot be read, or there is no such device.
    """
    plan_model(load_config(source))
    _check_device(device)
    do = "give a folder made by save_pretrained, or a model of the hub"
    model = _load(source, AutoModelForCausalLM.from_pretrained, "a folder with config and weights", do, dtype=dtype)
    return model.eval().to(device)


def load_tokenizer(source: str) -> Any:
    """The tokenizer beside a model.

    Raises:
        SwapatchError: there is none, or it cannot be read.
    """
    do = "leave the prompt out, and random tokens are compared"
    return _load(source, AutoTokenizer.from_pretrained, "a prompt as text needs a tokenizer beside the model", do)


_CHECK_CONFIG = "give a folder with a sound config.json, that file, or the name of a model on the hub"


def _load(source: str, loader: Callable[..., Any], supported: str, do: str, **options: Any) -> Any:
    path = Path(source).expanduser()
    local = path.exists()
    if not local and _is_path(source):
        raise SwapatchError(explain(f"no file or folder {source}", "paths that exist", _CHECK_CONFIG))
    if path.is_dir() and not (path / "config.json").is_file():
        raise SwapatchError(explain(f"no config.json in {source}", "a folder with a config.json", _CHECK_CONFIG))
    try:
        return loader(str(path) if local else source, local_files_only=local, **options)
    except Exception as error:  # transformers, its validators and the hub raise all kinds
        raise SwapatchError(explain(f"{source}: {one_line(error)}", supported, do)) from error


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # each backend has its own
        do = "see python -m swapatch env for the devices there are"
        raise SwapatchError(explain(f"device {device!r}: {one_line(error)}", "devices that torch has", do)) from error


def _is_path(source: str) -> bool:
    """Whether this can be no name on the hub, which is ``name`` or ``owner/name``."""
    return source.startswith((".", "~", os.sep)) or source.endswith(".json") or source.count("/") > 1


def one_line(error: Exception) -> str:
    """The message of an error, or its class if it has none, in one line that is not too long."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
