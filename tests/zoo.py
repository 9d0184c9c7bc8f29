"""Tiny random models of every supported species: the one list that drives the parametrised tests.

The weights are wide on purpose. A freshly initialised transformer attends almost evenly, and then a window that is one
too long changes the logits by less than rounding does; here it changes them by 1e-2 and more (see `test_zoo.py`).
All weights are values that bfloat16 holds exactly, so that the float32 and the bfloat16 model of a seed are the same.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Whether transformers is older than the newest that the suite is for.
OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)

PAD, EOS, BOS = 0, 1, 2
VOCAB = 97
# Ids from here on are left to images and their neighbours; random text ids stay below.
FIRST_SPECIAL = 88
IMAGE_TOKEN = 90

DEVICE = torch.device("cpu")
"""Where models and their inputs are made; the fixture `device` moves it."""

SLIDING, FULL = "sliding_attention", "full_attention"

Config = Any
Model = Any


@dataclass(frozen=True)
class Species:
    """One architecture: how to configure it, and which of the special cases it has."""

    name: str
    architecture: str
    make_config: Callable[[int], Config]
    vision: bool = False  # takes images
    bidirectional: bool = False  # and lets the tokens of one image see each other both ways
    shared_kv: bool = False
    ple: bool = False
    moe: bool = False

    def __str__(self) -> str:
        return self.name

    def build(
        self, window: int, *, dtype: torch.dtype = torch.float32, seed: int = 0, attn_implementation: str = "sdpa"
    ) -> Model:
        """A model in eval mode. The weights depend on `seed` alone: not on the window, the dtype or the attention."""
        cls = getattr(transformers, self.architecture)
        with torch.random.fork_rng(devices=[]):  # construction draws from the global generator
            model = cls._from_config(self.make_config(window), attn_implementation=attn_implementation, dtype=dtype)
        _widen(model, torch.Generator().manual_seed(seed))
        return model.eval().to(DEVICE)

    def with_window(self, model: Model, window: int) -> Model:
        """A new model with the weights, dtype and attention of `model` and another window."""
        other = self.build(window, dtype=model.dtype, attn_implementation=text_config(model)._attn_implementation)
        other.load_state_dict(model.state_dict())
        return other

    def inputs(
        self,
        model: Model,
        lengths: Sequence[int],
        seed: int = 0,
        *,
        images: Sequence[Sequence[tuple[int, int]]] | None = None,
        pixels: bool = False,
    ) -> dict[str, Tensor]:
        """A left-padded batch, ready for `generate(**inputs)`: `input_ids` and `attention_mask`, [batch, max(lengths)].

        `images` gives for each row its image blocks as (start, length), counted from the row's first real token. It
        adds the token types that make a block attend to itself both ways. The masks depend on the types alone, so the
        ids there stay ordinary ones, which are all different. With `pixels` they are image ids instead, and the pixels
        of as many images come with them, to go through the vision tower.
        """
        width = max(lengths)
        mask = torch.zeros(len(lengths), width, dtype=torch.long, device=DEVICE)
        for row, length in enumerate(lengths):
            mask[row, width - length :] = 1
        ids = named_ids(model, len(lengths), width, seed).masked_fill(mask == 0, PAD)
        batch = {"input_ids": ids, "attention_mask": mask}
        if images is not None:
            types = token_types(lengths, images)
            batch[token_type_key(model)] = types
            if pixels:
                batch["input_ids"] = ids.masked_fill(types == 1, IMAGE_TOKEN)
                sizes = [size for row in images for _, size in sorted(row)]
                batch |= image_pixels(model, sizes, seed)
        return batch


def text_config(model_or_config: Any) -> Config:
    """The text part of a model's config, which is the config itself for text models."""
    return getattr(model_or_config, "config", model_or_config).get_text_config()


def text_model(model: Model) -> nn.Module:
    """The module that owns the decoder layers."""
    inner: nn.Module = model.model
    language_model: nn.Module = getattr(inner, "language_model", inner)
    return language_model


def token_type_key(model: Model) -> str:
    """The keyword for token types: `token_type_ids` for Gemma 3, `mm_token_type_ids` for Gemma 4."""
    names = inspect.signature(type(model).forward).parameters
    for key in ("mm_token_type_ids", "token_type_ids"):
        if key in names:
            return key
    raise TypeError(f"{type(model).__name__} takes no token types: it has no image input")


def token_types(lengths: Sequence[int], images: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """1 on image tokens, 0 elsewhere, [batch, max(lengths)]; blocks are (start, length) from the first real token."""
    width = max(lengths)
    types = torch.zeros(len(lengths), width, dtype=torch.long, device=DEVICE)
    for row, (length, blocks) in enumerate(zip(lengths, images, strict=True)):
        for start, size in blocks:
            if start + size > length:
                raise ValueError(f"image block ({start}, {size}) ends after the row's {length} tokens")
            first = width - length + start
            types[row, first : first + size] = 1
    return types


def image_pixels(model: Model, sizes: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Random pixels of images that take `sizes` tokens each.

    Gemma 3: whole pictures, [images, 3, height, width], of `mm_tokens_per_image` tokens; a larger block is several
    pictures that touch. Gemma 4: patches and their places in the picture, [images, patches, values] and
    [images, patches, 2], filled up with patches at (-1, -1); the pictures are one token high.
    """
    generator = torch.Generator().manual_seed(seed)
    vision = model.config.vision_config
    if hasattr(model.config, "mm_tokens_per_image"):
        count, rest = divmod(sum(sizes), model.config.mm_tokens_per_image)
        if rest or any(size % model.config.mm_tokens_per_image for size in sizes):
            raise ValueError(
                f"image blocks must be multiples of {model.config.mm_tokens_per_image} tokens. Got {sizes}"
            )
        pixels = torch.rand(count, 3, vision.image_size, vision.image_size, generator=generator)
        return {"pixel_values": pixels.to(DEVICE)}
    # An encoder-free model gets patches that are merged already; a vision tower merges side x side of them to a token.
    merged = getattr(vision, "model_patch_size", None)
    side = 1 if merged else vision.pooling_kernel_size
    values = 3 * (merged or vision.patch_size) ** 2
    width = max(sizes) * side
    across, down = torch.meshgrid(torch.arange(width), torch.arange(side), indexing="xy")  # each [side, width]
    places = torch.stack((across, down), dim=-1).flatten(0, 1).repeat(len(sizes), 1, 1)
    used = places[..., 0] < torch.tensor(sizes)[:, None] * side
    return {
        "pixel_values": torch.rand(len(sizes), side * width, values, generator=generator).to(DEVICE),
        "image_position_ids": torch.where(used[..., None], places, -1).to(DEVICE),
    }


def named_ids(model: Model, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random text ids, [batch, length], none of which is a padding, end or image id."""
    del model  # every entry has the same vocabulary; the argument keeps room for one that has not
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(BOS + 1, FIRST_SPECIAL, (batch, length), generator=generator).to(DEVICE)


def _widen(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter anew, wide enough that attention is peaky and no token dominates the logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_wide(name, parameter.float(), noise).bfloat16())


def _wide(name: str, current: Tensor, noise: Tensor) -> Tensor:
    if name.endswith("bias"):
        return 0.1 * noise
    if noise.ndim == 1:
        # A norm's neutral weight is 0 for Gemma 3 and 1 elsewhere: whatever it was constructed with. The last norm acts
        # with about -1.5 instead of 1: the embeddings are tied, and every token would otherwise predict itself.
        if name.endswith(("model.norm.weight", "language_model.norm.weight")):
            return current.mean() - 2.5 + noise
        # Gemma 4 does not scale its scores: with neutral weights one key would take all. And the output of its
        # per-layer gate can be nearly zero: the norm after it then magnifies rounding.
        gain = 0.6 if name.endswith(("q_norm.weight", "k_norm.weight", "per_layer_input_norm.weight")) else 1.0
        return gain * current.mean() + 0.2 * noise
    fan_in = noise.shape[-1] if noise.ndim == 3 else noise[0].numel()
    # Small embeddings against the unit-sized outputs of the layers: the next token then hangs on the whole context.
    gain = 0.5 if "embed_tokens" in name else 1.0
    return gain / math.sqrt(fan_in) * noise


def _gemma3_text(window: int, **changes: Any) -> Config:
    options: dict[str, Any] = {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 6,  # not the head size, so that a wrong scale shows
    }
    return transformers.Gemma3TextConfig(**_text_options(window, options | changes))


def _gemma4_text(window: int, **changes: Any) -> Config:
    options: dict[str, Any] = {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
    }
    return transformers.Gemma4TextConfig(**_text_options(window, options | changes))


def _text_options(window: int, options: dict[str, Any]) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": len(options["layer_types"]),
        "max_position_embeddings": 4096,
        "sliding_window": window,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
    return shared | options


def _gemma3_mqa(window: int) -> Config:
    return _gemma3_text(
        window,
        layer_types=[FULL, SLIDING, SLIDING, FULL, SLIDING],
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=3,
    )


def _gemma4_ple_shared(window: int, **changes: Any) -> Config:
    # The first half owns its keys; the second reads those of layers 1 (sliding) and 2 (full).
    return _gemma4_text(
        window,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_key_value_heads=1,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        **changes,
    )


def _gemma4_keqv(window: int, **changes: Any) -> Config:
    return _gemma4_text(window, attention_k_eq_v=True, num_global_key_value_heads=1, **changes)


def _gemma4_moe(window: int) -> Config:
    return _gemma4_keqv(
        window,
        layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
    )


def _gemma3_vision(window: int) -> Config:
    vision = transformers.SiglipVisionConfig(
        **_VISION, num_attention_heads=2, image_size=12, patch_size=2, vision_use_head=False
    )
    tokens: dict[str, Any] = {"image_token_index": IMAGE_TOKEN, "boi_token_index": 93, "eoi_token_index": 94}
    return transformers.Gemma3Config(
        text_config=_gemma3_text(window), vision_config=vision, mm_tokens_per_image=9, **tokens
    )


def _gemma4_multimodal(text: Config) -> Config:
    vision = transformers.Gemma4VisionConfig(
        **_VISION,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        patch_size=2,
        pooling_kernel_size=2,
        position_embedding_size=512,
    )
    return transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **_GEMMA4_TOKENS)


def _gemma4_vision(window: int) -> Config:
    return _gemma4_multimodal(_gemma4_text(window, use_bidirectional_attention="vision"))


def _gemma4_vision_ple_shared(window: int) -> Config:
    return _gemma4_multimodal(_gemma4_ple_shared(window, use_bidirectional_attention="vision"))


def _gemma4_vision_causal(window: int) -> Config:
    # As E2B and E4B are: images, but causal masks for them too.
    return _gemma4_multimodal(_gemma4_ple_shared(window))


def _gemma4_unified_text(window: int) -> Config:
    options: dict[str, Any] = {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }
    return transformers.Gemma4UnifiedTextConfig(**_text_options(window, options))


def _gemma4_unified(window: int) -> Config:
    vision = transformers.Gemma4UnifiedVisionConfig(
        patch_size=2, pooling_kernel_size=2, mm_embed_dim=16, mm_posemb_size=256, output_proj_dims=16
    )
    return transformers.Gemma4UnifiedConfig(
        text_config=_gemma4_unified_text(window), vision_config=vision, audio_config=None, **_GEMMA4_TOKENS
    )


_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
_GEMMA4_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 91,
    "audio_token_id": 92,
    "boi_token_id": 93,
    "eoi_token_id": 94,
    "boa_token_id": 95,
    "eoa_token_index": 96,
}

_ALL = [
    Species("gemma3_text", "Gemma3ForCausalLM", _gemma3_text),
    Species("gemma3_mqa", "Gemma3ForCausalLM", _gemma3_mqa),
    Species("gemma3_vision", "Gemma3ForConditionalGeneration", _gemma3_vision, vision=True, bidirectional=True),
    Species("gemma4_text", "Gemma4ForCausalLM", _gemma4_text),
    Species("gemma4_ple_shared", "Gemma4ForCausalLM", _gemma4_ple_shared, shared_kv=True, ple=True),
    Species("gemma4_keqv", "Gemma4ForCausalLM", _gemma4_keqv),
    Species("gemma4_moe", "Gemma4ForCausalLM", _gemma4_moe, moe=True),
    Species("gemma4_vision", "Gemma4ForConditionalGeneration", _gemma4_vision, vision=True, bidirectional=True),
    Species(
        "gemma4_vision_ple_shared",
        "Gemma4ForConditionalGeneration",
        _gemma4_vision_ple_shared,
        vision=True,
        bidirectional=True,
        shared_kv=True,
        ple=True,
    ),
    Species(
        "gemma4_vision_causal",
        "Gemma4ForConditionalGeneration",
        _gemma4_vision_causal,
        vision=True,
        shared_kv=True,
        ple=True,
    ),
    Species("gemma4_unified_text", "Gemma4UnifiedForCausalLM", _gemma4_unified_text),
    Species(
        "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", _gemma4_unified, vision=True, bidirectional=True
    ),
]

SPECIES: list[Species] = [species for species in _ALL if hasattr(transformers, species.architecture)]
BY_NAME: dict[str, Species] = {species.name: species for species in SPECIES}
