"""The real Gemma 3 270M: what a user does, with the weights and the tokenizer of the checkpoint."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same_logits, greedy, sliding_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import swapatch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture(scope="module")
def checkpoint(pytestconfig: pytest.Config) -> tuple[Any, torch.Tensor]:
    """The model in float32, and 1,500 tokens of a real text."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the checkpoint's packages are not installed (dependency group demo)")
    from checkpoint import checkpoint_path

    path = checkpoint_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(path)((SCRIPTS / "prompt.txt").read_text(), return_tensors="pt").input_ids
    return model, ids[:, :1500]


@pytest.mark.slow
def test_hundred_greedy_tokens(checkpoint: tuple[Any, torch.Tensor]) -> None:
    model, ids = checkpoint
    want = greedy(model, ids, 100)
    with swapatch.patch(model) as handle:
        got = greedy(model, ids, 100)
    assert len(handle.plan.sliding) == 15
    assert torch.equal(got.tokens, want.tokens)
    assert set(sliding_rows(got.cache)) == {576}
    # The logits of this checkpoint are some ten times larger than those of the tiny models, and so is their rounding.
    assert_same_logits(got.logits, want.logits, tol=1e-3)
