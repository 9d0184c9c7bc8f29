"""The models that are measured: the real checkpoint, and random ones of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from checkpoint import checkpoint_path
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

import swapatch

from .sizes import FULL, TOY


@dataclass
class Subject:
    """A model, and a prompt of any length for it."""

    name: str
    model: Any
    text: list[int]
    real: bool = False  # the checkpoint

    def prompt(self, tokens: int) -> Tensor:
        repeated = self.text * -(-tokens // len(self.text))
        return torch.tensor([repeated[:tokens]], device=self.model.device)


GEMMA3_270M = {**FULL.training, "vocab_size": 262144}


@once
def subject(quick: bool, dtype: torch.dtype, device: str = "cpu") -> Subject:
    """The real checkpoint with a real text, over and over; a toy with random tokens when it must be quick.

    Not on a GPU: the weights of the checkpoint overflow float16, and fetching them is one more thing that may fail.
    """
    if quick or device != "cpu":
        torch.manual_seed(0)
        config = TOY if quick else GEMMA3_270M
        model = random_model(config, dtype).to(device)
        return Subject(subject_name(quick, device), model, torch.randint(3, config["vocab_size"], (300,)).tolist())
    path = checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    text = Path(__file__).parents[1].joinpath("prompt.txt").read_text(encoding="utf-8")
    return Subject(subject_name(quick, device), model, AutoTokenizer.from_pretrained(path)(text).input_ids, real=True)


def subject_name(quick: bool, device: str = "cpu") -> str:
    if quick:
        return "random toy"
    return "Gemma 3 270M" if device == "cpu" else "Gemma 3 270M's shape, random weights"


def random_model(config: dict[str, int], dtype: torch.dtype) -> Any:
    made = Gemma3ForCausalLM(Gemma3TextConfig(**config, pad_token_id=0, eos_token_id=1, attn_implementation="sdpa"))
    return made.to(dtype).eval()


def random_gemma4(config: dict[str, int], dtype: torch.dtype) -> Any:
    """With per-layer embeddings, and a second half of its layers that shares the first one's keys and values."""
    half = ["sliding_attention", "sliding_attention", "full_attention"]
    shared = {"layer_types": half * 2, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    made = Gemma4ForCausalLM(Gemma4TextConfig(**config, **shared, pad_token_id=0, eos_token_id=1))
    return made.to(dtype).eval()


def random_name(config: Any) -> str:
    family = "Gemma 4 with PLE and sharing" if config.model_type == "gemma4_text" else "Gemma 3"
    layers = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, W={config.sliding_window}"
    return f"random {family}, {layers}"


def patched_if(wanted: bool, model: Any) -> AbstractContextManager[Any]:
    return swapatch.patch(model) if wanted else nullcontext()


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """The model with this attention implementation."""
    before = model.config._attn_implementation
    if before != implementation:
        model.set_attn_implementation(implementation)
    yield
    if before != implementation:
        model.set_attn_implementation(before)
