"""A wrong token, and how to find where it comes from: a worked example on a tiny random model, offline, in seconds.

    python scripts/debug.py

The fault is planted: an attention kernel whose decode steps forget the oldest key of the window. What follows is what
one would do with a fault of one's own: see what is patched, switch the patch off and on, let `verify` find the position
and the layer, and exchange the kernel for the slow reference.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from unittest import mock

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import swapatch
from swapatch.attention import KERNELS

PROMPT = torch.randint(5, 99, (1, 90), generator=torch.Generator().manual_seed(0))


def make_model() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=16,
        initializer_range=0.3,  # wide: with the usual 0.02 no token looks far back
        tie_word_embeddings=False,
    )
    return Gemma3ForCausalLM(config).eval()


def faulty(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The planted fault: a single query does not see the oldest key."""
    if query.shape[2] == 1:
        key, value = key[:, :, 1:], value[:, :, 1:]
    return KERNELS["reference"](query, key, value, mask, causal, scale)


def generate(model: Gemma3ForCausalLM) -> list[int]:
    tokens: Tensor = model.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    return tokens[0, PROMPT.shape[1] :].tolist()


def say(text: str) -> None:
    print(f"\n== {text}")


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="debug", description="A planted fault, and the way to it.").parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    log = logging.getLogger("swapatch")
    model = make_model()

    say("logging at INFO says what was patched; print(model) shows the layers")
    log.setLevel(logging.INFO)
    handle = swapatch.patch(model)
    print(model.model.layers[0].self_attn)

    say("logging at DEBUG says what every call did")
    log.setLevel(logging.DEBUG)
    with torch.no_grad():
        model(PROMPT)
    log.setLevel(logging.WARNING)

    with mock.patch.dict(KERNELS, windowed=faulty):
        say("one process, patched and stock: a block, or the environment, switches the patch off")
        print("patched          ", generate(model))
        with swapatch.disabled():
            print("disabled()       ", generate(model))
        with mock.patch.dict(os.environ, SWAPATCH_DISABLE="1"):
            print("SWAPATCH_DISABLE ", generate(model))

        say("verify: where does it begin?")
        print(swapatch.verify.compare(model, PROMPT))

        say("backend='reference': is it the kernel?")
        handle.undo()
        print(swapatch.verify.compare(model, PROMPT, backend="reference"))
        print("\nThe same model, cache and masks without the kernel are right: the fault is in the kernel.")


if __name__ == "__main__":
    main()
