"""How large everything is that is measured: in full, and in toy sizes that show that it works."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .device import CPU, Device

HEAD_DIM = 256


@dataclass(frozen=True)
class Shape:
    """One sliding layer."""

    window: int
    heads: int
    kv_heads: int
    dim: int = HEAD_DIM

    def __str__(self) -> str:
        return f"W={self.window}, {self.heads}/{self.kv_heads} heads, D={self.dim}"


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how many seconds each comparison may go on once it has its first round."""

    seconds: float
    layer_prefill: tuple[Shape, ...]
    layer_lengths: tuple[int, ...]
    blocks: tuple[int, ...]  # queries in one
    layer_decode: tuple[Shape, ...]
    layer_context: int
    layer_steps: int  # in a round; 64 of them, so that each round has one roll of an anchored buffer
    full_rows: int  # of the full cache that a bounded one is compared with
    prefill: dict[torch.dtype, tuple[int, ...]]
    chunk: int
    chunk_to: int  # chunked prefill is measured up to this length
    eager_to: int
    flex_at: int
    parts: int  # prompt length
    contexts: tuple[int, ...]
    few_contexts: tuple[int, ...]  # of the other models
    batch_context: int
    batch: int  # beside 1: the more sequences, the more the cache weighs against the weights
    gemma4: dict[str, int]
    decode_steps: int
    memory: dict[str, tuple[int, ...]]
    gemma3: dict[str, int]
    compiled_tokens: int
    python: dict[str, int]  # so small a model that a step of it is hardly more than the calls it makes
    patch_layers: int
    layer_training: Shape
    layer_training_lengths: tuple[int, ...]
    scoring: dict[torch.dtype, tuple[int, ...]]
    training: dict[str, int]
    training_lengths: tuple[int, ...]
    training_memory: tuple[int, int]  # layers, tokens
    host_tokens: tuple[int, int]  # of the prompt, and new ones in a round
    peers: dict[torch.dtype, tuple[int, ...]]  # prompt lengths
    peers_compiled: tuple[int, ...]  # those of them that are compiled for, which takes a minute each
    peers_context: int  # the one that decode steps come after
    peers_steps: int
    roofline: int  # prompt length
    copy_bytes: int
    matmul: int


TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "sliding_window": 64,
    "vocab_size": 512,
}

FULL = Sizes(
    seconds=2.0,
    layer_prefill=(Shape(512, 4, 1), Shape(1024, 8, 4)),
    layer_lengths=(2048, 4096, 8192, 16384),
    blocks=(64, 128, 256),
    layer_decode=(Shape(512, 4, 1), Shape(1024, 4, 2)),
    layer_context=4096,
    layer_steps=64,
    full_rows=8192,
    prefill={torch.bfloat16: (512, 1024, 2048, 4096, 8192, 16384), torch.float32: (512, 2048)},
    chunk=512,
    chunk_to=4096,
    eager_to=2048,
    flex_at=2048,
    parts=8192,
    contexts=(1, 512, 2048, 8192, 16384),
    few_contexts=(1, 2048, 16384),
    batch_context=2048,
    batch=8,
    # As wide as Gemma 4 E2B, with fewer layers and tokens.
    gemma4={
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "sliding_window": 512,
        "vocab_size": 40000,
        "vocab_size_per_layer_input": 40000,
    },
    decode_steps=2,
    memory={"stock": (4096, 8192, 16384), "swapatch": (4096, 8192, 16384, 32768)},
    # As wide as Gemma 3 4B. The vocabulary is smaller in the same proportion as the layers are fewer, so that the head
    # weighs what it does there.
    gemma3={
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 46000,
    },
    compiled_tokens=1500,
    python={**TOY, "num_hidden_layers": 18},
    layer_training=Shape(512, 4, 1),
    layer_training_lengths=(1024, 2048, 4096),
    scoring={torch.float32: (2048, 8192), torch.bfloat16: (2048, 8192)},
    # Gemma 3 270M but for its vocabulary of 262,144: with it a loss over 4,096 tokens alone takes about 16 GiB.
    training={
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "vocab_size": 32768,
    },
    training_lengths=(2048, 4096),
    training_memory=(6, 8192),  # all 18 layers of stock might not fit into 24 GiB
    host_tokens=(128, 64),
    patch_layers=60,
    peers={torch.bfloat16: (512, 2048, 8192)},
    peers_compiled=(512, 2048, 8192),
    peers_context=2048,
    peers_steps=16,
    roofline=4096,
    copy_bytes=2**30,
    matmul=2048,
)

QUICK = Sizes(
    seconds=0.1,
    layer_prefill=(Shape(64, 4, 1, 32),),
    layer_lengths=(128, 256),
    blocks=(64, 256),
    layer_decode=(Shape(64, 4, 2, 32),),
    layer_context=200,
    layer_steps=8,
    full_rows=512,
    prefill={torch.bfloat16: (32, 256), torch.float32: (256,)},
    chunk=64,
    chunk_to=256,
    eager_to=256,
    flex_at=0,
    parts=256,
    contexts=(1, 200),
    few_contexts=(200,),
    batch_context=200,
    batch=2,
    gemma4={
        **{name: size for name, size in TOY.items() if name != "num_hidden_layers"},
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": TOY["vocab_size"],
    },
    decode_steps=4,
    memory={"stock": (1024, 2048), "swapatch": (1024, 2048)},
    gemma3=TOY,
    compiled_tokens=100,
    python=TOY,
    layer_training=Shape(64, 4, 1, 32),
    layer_training_lengths=(128, 256),
    scoring={torch.float32: (256,), torch.bfloat16: (256,)},
    training=TOY,
    training_lengths=(256,),
    training_memory=(6, 2048),
    host_tokens=(100, 16),
    patch_layers=12,
    peers={torch.bfloat16: (128,)},
    peers_compiled=(128,),
    peers_context=128,
    peers_steps=4,
    roofline=256,
    copy_bytes=2**24,
    matmul=256,
)


ON_CUDA = replace(
    FULL,
    seconds=1.0,
    peers={torch.bfloat16: (2048, 8192, 32768, 131072), torch.float16: (2048, 32768)},
    peers_compiled=(8192,),
    peers_context=8192,
    peers_steps=32,
    memory={"stock": (8192, 32768), "swapatch": (8192, 32768, 131072)},
)
"""For a run of a few minutes on a data center's GPU."""


@dataclass(frozen=True)
class Options:
    """Of a run."""

    sizes: Sizes = FULL
    quick: bool = False
    long: bool = False
    rounds: int = 12
    threads: int = field(default_factory=torch.get_num_threads)
    device: Device = CPU
