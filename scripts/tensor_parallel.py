"""Tensor parallel on the CPU: tiny random Gemmas, spread over all processes by transformers itself and patched in each.

    torchrun --nproc-per-node 2 scripts/tensor_parallel.py

They must generate the tokens that one process generates without the patch, past the window and past a roll of the
buffers. One line for each family; the exit code is 1 if anything differs. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from transformers.distributed import DistributedConfig

import swapatch

SLIDING, GLOBAL = "sliding_attention", "full_attention"
VOCABULARY = 120
TOLERANCE = 1e-3  # of the logits: what the order of a sum over processes may change


# -- the models --


def gemma3(**options: Any) -> Any:
    layers = [SLIDING, SLIDING, GLOBAL, SLIDING]
    return transformers.Gemma3TextConfig(layer_types=layers, query_pre_attn_scalar=4, **options)


def gemma4(**options: Any) -> Any:
    """With per-layer embeddings, and two layers that share the keys and values of others."""
    options |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 32}
    layers = [SLIDING, SLIDING, GLOBAL, SLIDING, GLOBAL]
    return transformers.Gemma4TextConfig(layer_types=layers, num_kv_shared_layers=2, **options)


FAMILIES: dict[str, Callable[..., Any]] = {"gemma3": gemma3, "gemma4": gemma4}


def save_model(name: str, folder: Path, window: int, processes: int) -> None:
    """A model with one head of keys for each process, and weights so wide that a wrong window changes the tokens."""
    heads, size = 2 * processes, 16
    config = FAMILIES[name](
        vocab_size=VOCABULARY,
        hidden_size=heads * size,
        intermediate_size=120,
        num_hidden_layers=4 if name == "gemma3" else 5,
        num_attention_heads=heads,
        num_key_value_heads=processes,
        head_dim=size,
        sliding_window=window,
        initializer_range=(heads * size) ** -0.5,
        pad_token_id=0,
    )
    torch.manual_seed(list(FAMILIES).index(name))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Input and output embeddings are one: behind a norm of one sign every token would predict itself.
        model.model.norm.weight += torch.randn(config.hidden_size) - 1
    model.save_pretrained(folder)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def generate(model: Any, options: argparse.Namespace) -> Any:
    """Greedy, and never ended early, from random tokens."""
    prompt = torch.randint(3, VOCABULARY, (1, options.prompt), generator=torch.Generator().manual_seed(0))
    new = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": False}
    return model.generate(prompt, **new, output_logits=True, return_dict_in_generate=True)


# -- comparing --


def check(name: str, folder: Path, stock: Any, options: argparse.Namespace) -> bool:
    """Generate in all processes, patched, and compare; the first one, which has ``stock``, prints what it found."""
    processes = distributed.get_world_size()
    # Every version that swapatch supports takes it this way; some take tp_plan="auto" by itself as well, and warn.
    model = load(folder, distributed_config=DistributedConfig(tp_size=processes))
    with swapatch.patch(model, layout=options.layout):
        found = generate(model, options)
    everybody: list[Any] = [None] * processes
    distributed.all_gather_object(everybody, found.sequences.tolist())
    verdict = [False]
    if stock is not None:
        verdict[0] = report(name, found, stock, everybody, model.config.num_key_value_heads)
    distributed.broadcast_object_list(verdict)
    return verdict[0]


def report(name: str, found: Any, stock: Any, everybody: list[Any], heads: int) -> bool:
    """Print the line, and say whether all is equal."""
    cache = next((value for value in found.values() if isinstance(value, swapatch.CompactCache)), None)
    if cache is None:
        print(f"{name}: NOT PATCHED: the cache is transformers' own; is SWAPATCH_DISABLE set?", flush=True)
        return False
    layer = cache.sliding[0]
    unequal = [rank for rank, tokens in enumerate(everybody) if tokens != stock.sequences.tolist()]
    count = len(stock.logits)
    off = (torch.cat(found.logits) - torch.cat(stock.logits)).abs().amax(-1)  # [new tokens]
    if unequal:
        outcome = f"DIFFERENT: the tokens of process {', '.join(map(str, unequal))} are not those of one process alone"
    elif bool((off > TOLERANCE).any()):
        outcome = f"DIFFERENT: the logits, from new token {int((off > TOLERANCE).nonzero()[0]) + 1} on"
    else:
        outcome = f"equal: {count} new tokens in {len(everybody)} processes and in one"
    print(
        f"{name}: {outcome}; logits differ by up to {off.max():.1g}; "
        f"a process has {layer.keys.shape[1]} of {heads} heads of keys, {layer.rows} rows for {layer.seen} tokens",
        flush=True,
    )
    return outcome.startswith("equal")


# -- command line --


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tensor_parallel", description="Tensor parallel, patched against stock.")
    parser.add_argument("--window", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--stock-window", metavar="W", type=int, help="another one for stock: shows what a fault does")
    parser.add_argument("--layout", choices=("anchored", "ring"), default="anchored", help="default: %(default)s")
    parser.add_argument("--prompt", metavar="N", type=int, default=50, help="tokens; default: %(default)s")
    parser.add_argument("--new-tokens", metavar="N", type=int, default=160, help="default: %(default)s")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        raise SystemExit("tensor_parallel: start it with: torchrun --nproc-per-node 2 scripts/tensor_parallel.py")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes a GPU wherever it sees one
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    stock: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own:
        if os.environ["RANK"] == "0":  # alone: there is no process group yet
            for name in FAMILIES:
                save_model(name, Path(own, name), options.window, int(os.environ["WORLD_SIZE"]))
                window = options.stock_window or options.window
                stock[name] = generate(load(Path(own, name), sliding_window=window), options)
        distributed.init_process_group("gloo")
        folder = [own]
        distributed.broadcast_object_list(folder)  # the first one's
        equal = [check(name, Path(folder[0], name), stock.get(name), options) for name in FAMILIES]
        distributed.barrier()
    distributed.destroy_process_group()
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
