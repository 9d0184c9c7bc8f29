"""What a family of models is to swapatch: the questions that the rest of the package asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_masks_for_generate

from ..plan import GLOBAL, SLIDING, UNPATCHED, ModelPlan, layers_of, refuse, window_of

Projected = tuple[Tensor, Tensor | None, Tensor | None]
"""Query, key and value, ``[batch, heads, tokens, head_dim]`` each; no key and value where a layer shares another's."""

Norm = Callable[[Any, Tensor], Tensor]
"""``(module, states) -> states``."""

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(states, cos, sin) -> states``, cosines and sines broadcast over the heads."""


def run(norm: Any, states: Tensor) -> Tensor:
    """A norm as the model has it."""
    result: Tensor = norm(states)
    return result


Masks = dict[str, Tensor | None]
"""Masks of a call by layer type."""


class Family(ABC):
    """One family, without state: an instance stands in its module as ``FAMILY``.

    Attributes:
        modeling: transformers' file of the family, whose functions are looked up there when they are called: somebody
            may have replaced one.
        model_type: of the text config.
        outer_type: of the config around it, where there are images or sound; None for a family of text alone.
        config: class of the text config.
        text_model: the module that calls the layers.
        attention: the module whose forward is replaced.
        outer_model: the module around the text model, which makes the masks when there are images.
        types_name: its argument for token types.
    """

    modeling: ClassVar[Any]
    model_type: ClassVar[str]
    outer_type: ClassVar[str | None] = None
    config: ClassVar[type[PreTrainedConfig]]
    text_model: ClassVar[type[nn.Module]]
    attention: ClassVar[type[nn.Module]]
    outer_model: ClassVar[type[nn.Module] | None] = None
    types_name: ClassVar[str | None] = None

    def plan(self, config: Any, text: Any) -> ModelPlan:
        """The plan for a config of this family and its text part.

        Raises:
            UnsupportedModelError: for attention without a causal order, or layers that swapatch does not know.
        """
        both_ways = getattr(text, "use_bidirectional_attention", None)
        if both_ways not in (None, False, "vision") or getattr(text, "is_causal", True) is False:
            found = f"bidirectional attention (use_bidirectional_attention={both_ways!r})"
            raise refuse(found, f"{UNPATCHED}: an embedder has no decode steps to speed up", "causal attention")
        return ModelPlan(self.model_type, window_of(text), layers_of(text), self.sees_images(config, text))

    def sees_images(self, config: Any, text: Any) -> bool:
        """Whether tokens of one image attend each other both ways."""
        return getattr(text, "use_bidirectional_attention", None) == "vision"

    @abstractmethod
    def project(
        self,
        attention: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        norm: Norm = run,
        rotate: Rotate | None = None,
    ) -> Projected:
        """Query, key and value of new tokens, rotated to their positions.

        Args:
            attention: the layer.
            hidden: ``[batch, tokens, hidden]``.
            cos, sin: ``[batch, tokens, head_dim]``.
            norm: applies one of the layer's norms.
            rotate: applies cosines and sines; None for the model's own function.
        """

    @abstractmethod
    def norm_weight(self, norm: Any) -> Tensor | None:
        """What a norm of this family multiplies by, ``[head_dim]`` in float32, or None."""

    def masks(self, config: Any, types: Tensor | None, *, ahead: bool, **call: Any) -> Masks:
        """The masks of both kinds of layer that the outer model makes, by its own function.

        Args:
            config: of the text model.
            types: token types of all positions so far, ``[batch, positions]``, or None.
            ahead: whether ``generate`` makes them ahead of the call, as it does for a static cache.
            **call: ``inputs_embeds``, ``attention_mask``, and the cache under the name that transformers uses.
        """
        masks: Masks = create_masks_for_generate(config=config, **call)
        return masks

    def global_mask(self, config: Any, **call: Any) -> Tensor | None:
        """The mask of global layers that the text model makes, packed sequences and all."""
        mask: Tensor | None = create_causal_mask(config=config, **call)
        return mask

    def example(self, window: int) -> Any:
        """The smallest text config with this window whose images are attended both ways, to ask ``masks`` with."""
        return self.config(
            sliding_window=window,
            layer_types=[SLIDING, GLOBAL],
            num_hidden_layers=2,
            attn_implementation="sdpa",  # whose masks are bool
        )

    def __reduce__(self) -> str:
        """Copied and pickled by name: there is one of each."""
        return "FAMILY"
