"""Docstrings: every public name has one, what a user calls has an example in it, and the examples are right."""

import doctest
import inspect
import pkgutil
from importlib import import_module

import pytest
import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import swapatch

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(swapatch.__path__, "swapatch.") if "__main__" not in module.name
)
CALLED = ("CompactCache", "PatchHandle", "disabled", "is_patched", "patch", "report", "status", "unpatch")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """What the examples call `model`: Gemma 3 as it comes, but small."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    config = Gemma3TextConfig(
        **sizes, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, sliding_window=64
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ("swapatch", *MODULES))
def test_examples(name: str, model: nn.Module) -> None:
    module = import_module(name)
    failed = doctest.testmod(
        module, extraglobs={"model": model, "torch": torch}, optionflags=doctest.NORMALIZE_WHITESPACE
    ).failed
    swapatch.unpatch(model)
    assert not failed


def test_public_names_are_documented() -> None:
    for name in swapatch.__all__:
        assert inspect.getdoc(getattr(swapatch, name)), name
    for name in CALLED:
        assert ">>> " in inspect.getdoc(getattr(swapatch, name)), name
