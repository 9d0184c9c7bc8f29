"""What ``env`` shows: the facts that a bug report needs. Imports nothing that is not imported already."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from typing import Any

import torch

from .._errors import SpyreContractError
from .._text import aligned
from ..backends import BACKENDS
from ..switch import VARIABLE, is_disabled

PACKAGES = ("torch", "transformers", "accelerate", "wrapt", "tokenizers", "safetensors", "peft", "bitsandbytes", "rich")
"""Packages whose version may matter."""

SPYRE_PACKAGE, OPERATOR = "torch_spyre", ("spyre", "sliding_window_attention")


def environment() -> dict[str, Any]:
    """Versions, devices, and the state of the Spyre operator, as plain values; None for what is not there."""
    from .. import __version__

    return {
        "swapatch": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        SPYRE_PACKAGE: _version(SPYRE_PACKAGE),
        "devices": _devices(),
        "operator": _schemas(*OPERATOR),
        "operator_fits": _operator_fits(),
        "disabled": is_disabled(),
        VARIABLE: os.environ.get(VARIABLE),
    }


def show(found: dict[str, Any]) -> None:
    """Print what :func:`environment` found."""
    rows = [[name, found[name] or "not installed"] for name in ("swapatch", "python", "platform", *PACKAGES)]
    rows.append([SPYRE_PACKAGE, found[SPYRE_PACKAGE] or "not installed"])
    rows += [["device", device] for device in found["devices"]]
    fits = "as swapatch calls it" if found["operator_fits"] else "not as swapatch calls it"
    operator = [f"{schema} ({fits})" for schema in found["operator"] or ()] or ["not registered"]
    rows += [["::".join(OPERATOR), line] for line in operator]
    shown = "is not set" if found[VARIABLE] is None else f"is {found[VARIABLE]!r}"
    rows.append(["switched", f"{'off' if found['disabled'] else 'on'} ({VARIABLE} {shown})"])
    print(aligned(rows[0], rows[1:], left="ll"))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        # A checkout on the path has no metadata. Finding it does not import it.
        return "installed, version unknown" if importlib.util.find_spec(name) else None


def _devices() -> list[str]:
    devices = [f"cpu, {torch.get_num_threads()} of {os.cpu_count()} threads"]
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator()) is not None:
        for index in range(torch.accelerator.device_count()):
            name = f", {torch.cuda.get_device_name(index)}" if kind.type == "cuda" else ""
            devices.append(f"{kind.type}:{index}{name}")
    return devices


def _schemas(namespace: str, name: str) -> list[str] | None:
    """The registered forms of an operator, None if there is none."""
    operator = getattr(getattr(torch.ops, namespace), name, None)
    return None if operator is None else [str(getattr(operator, form)._schema) for form in operator.overloads()]


def _operator_fits() -> bool:
    try:
        BACKENDS["spyre"].check()
    except SpyreContractError:
        return False
    return True
