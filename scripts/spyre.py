"""A whole decoder on a Spyre card: prepare a model, generate with stock ``generate``, say what the card was asked for.

    python scripts/spyre.py --model PATH            on a card, with torch-spyre installed
    python scripts/spyre.py --simulate              a tiny Gemma 3 on the simulated device of the tests
    python scripts/spyre.py --simulate gemma4       a tiny Gemma 4 E, with shared keys and per-layer embeddings

swapatch computes the attention of all layers. What is left is compiled here, module by module: the same graphs serve
all layers. Never run on a card: what the simulated device does not know, this does not show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import swapatch

BESIDE = ("embed_tokens", "embed_tokens_per_layer", "per_layer_projection_norm", "rotary_emb", "norm")
"""What a text model has beside its layers that does not run eagerly on a card."""

TESTS = Path(__file__).parents[1] / "tests"


def prepare(model: Any, device: str = "spyre") -> swapatch.PatchHandle:
    """Move a model to the card, compile all but its attention there, and patch it.

    ``dynamic=False``, as the card wants it. The decoder layers are not one graph each: their attention is one of its
    own, which swapatch makes.
    """
    model.to(device)
    handle = swapatch.patch(model)
    text = model.get_decoder()
    for layer in text.layers:
        layer.register_forward_pre_hook(from_start)
    for module in (*text.layers, *(getattr(text, name) for name in BESIDE if hasattr(text, name))):
        module.compile(dynamic=False)
    return handle


def from_start(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A view that begins further on would lose its offset as the input of a graph: it is copied, on the card."""
    return tuple(
        torch.empty(arg.shape, dtype=arg.dtype, device=arg.device).copy_(arg)
        if isinstance(arg, Tensor) and arg.storage_offset()
        else arg
        for arg in args
    )


def tiny(name: str) -> Any:
    """A tiny random model with heads of 64, as the operator wants them."""
    sys.path.insert(0, str(TESTS))
    import zoo

    options = {"head_dim": 64, "hidden_size": 64}
    if name == "gemma3":
        config, architecture = zoo._gemma3_text(64, query_pre_attn_scalar=64, **options), "Gemma3ForCausalLM"
    else:
        config, architecture = zoo._gemma4_ple_shared(64, global_head_dim=64, **options), "Gemma4ForCausalLM"
    return zoo.Species(name, architecture, lambda window: config).build(64, dtype=torch.bfloat16)


@contextmanager
def counted(simulate: bool) -> Iterator[dict[str, Any]]:
    """What happens within: graphs anywhere; the rest where the device counts it."""
    found: dict[str, Any] = {}
    before = counters["stats"]["unique_graphs"]
    if not simulate:
        yield found
    else:
        from spyre_sim import device

        with device.counting() as counts:
            yield found
        found["relayouts"] = sum(counts.relayouts.values())
        found["copies between layouts"] = counts.layout_copies
        found["transfers"] = len(counts.transfers)
        found["operations that fell back to the CPU"] = dict(counts.cpu_fallbacks)
        found["programs of eager operations"] = len(counts.eager_binaries)
    found["graphs"] = counters["stats"]["unique_graphs"] - before


def generate(model: Any, ids: Tensor, new: int) -> Tensor:
    """Stock ``generate``, greedily."""
    tokens: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new, max_new_tokens=new
    )
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint that transformers can load")
    parser.add_argument("--simulate", nargs="?", const="gemma3", choices=("gemma3", "gemma4"))
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the random prompt")
    parser.add_argument("--new", type=int, default=80, help="tokens to generate")
    args = parser.parse_args()
    if bool(args.model) == bool(args.simulate):
        parser.error("either --model PATH or --simulate")
    if args.simulate:
        model = tiny(args.simulate)
        from spyre_sim import device, graphs

        graphs.import_inductor()
        device.load()
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    handle = prepare(model)
    print(handle)
    torch.manual_seed(0)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (1, args.prompt)).to("spyre")
    for title in ("first call, with everything compiled", "second call, nothing new"):
        with counted(bool(args.simulate)) as found:
            tokens = generate(model, ids, args.new)
        print(f"\n{title}: {tokens.shape[1] - ids.shape[1]} new tokens")
        for name, value in found.items():
            print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
