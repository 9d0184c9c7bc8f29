"""Running one side of a comparison: stock ``generate``, with hooks that keep hidden states and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import LogitsProcessor, LogitsProcessorList

from .api import status
from .families import family_of
from .plan import ModelPlan, text_config

Side = Callable[[], AbstractContextManager[Any]]
"""Makes the model stock, or patched, for a block of code."""


@dataclass
class Run:
    """What one side left behind.

    Attributes:
        sequences: ``[batch, prompt + new]``.
        hidden: the last hidden states, ``[batch, positions, hidden]``; a model may leave out the first positions.
        sizes: tokens of each call of the model.
        compact: how many of the calls swapatch handled.
        choices, gaps: the token that each step would take, and how far ahead of the next best, ``[batch, new]``.
        layers: per layer the output of one call, ``[batch, positions, hidden]``, if it was asked for.
    """

    sequences: Tensor
    hidden: Tensor
    sizes: list[int]
    compact: int
    choices: Tensor
    gaps: Tensor
    layers: list[Tensor]


@dataclass
class Recorder:
    """Hooks that keep what a run leaves, on the text model and its layers.

    Attributes:
        call: the number of the call whose layers are kept; None for none.
    """

    call: int | None = None
    hidden: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    layers: list[Tensor] = field(default_factory=list)
    compact: int = 0

    @contextmanager
    def watch(self, text: Any) -> Iterator[None]:
        before = _windowed(text)
        hooks = [text.register_forward_hook(self._after_text)]
        hooks += [layer.register_forward_hook(partial(self._after_layer, i)) for i, layer in enumerate(text.layers)]
        try:
            yield
        finally:
            self.compact = _windowed(text) - before
            for hook in hooks:
                hook.remove()

    def _after_layer(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if index == 0:  # the first layer sees all tokens of the call, the last ones may be spared some
            self.sizes.append(states.shape[1])
        if self.call == len(self.sizes) - 1:
            self.layers.append(states)

    def _after_text(self, module: nn.Module, args: Any, output: Any) -> None:
        self.hidden.append(output[0])


def _windowed(text: nn.Module) -> int:
    """How many calls swapatch computed so far, if the model is patched."""
    return sum(status(text).calls.windowed.values())


class Watch(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Notes what each step of ``generate`` would choose, and makes it take other tokens if there are any.

    Args:
        forced: tokens to take, ``[batch, new]``.
    """

    def __init__(self, forced: Tensor | None) -> None:
        self.forced = forced
        self.choices: list[Tensor] = []
        self.gaps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = scores.float().topk(2, dim=-1)
        self.choices.append(best.indices[:, 0])
        self.gaps.append(best.values[:, 0] - best.values[:, 1])
        if self.forced is None:
            return scores
        token = self.forced[:, len(self.choices) - 1, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


@dataclass
class Pair:
    """One model and prompt, to be run stock and patched."""

    model: Any
    plan: ModelPlan
    inputs: dict[str, Any]
    new: int
    stock: Side
    patched: Side

    @property
    def prompt(self) -> int:
        return int(self.inputs["input_ids"].shape[1])

    def run(
        self,
        side: Side,
        forced: Tensor | None = None,
        call: int | None = None,
        **options: Any,
    ) -> Run:
        """Generate on one side: ``forced`` tokens if given, keeping the layers of call number ``call``."""
        cls = family_of(self.plan.model_type).text_model
        text = next(module for module in self.model.modules() if isinstance(module, cls))
        recorder, watch = Recorder(call), Watch(forced)
        no_end = text_config(self.model).vocab_size
        settings: dict[str, Any] = {"max_new_tokens": self.new, "do_sample": False, "num_beams": 1, **options}
        with side(), recorder.watch(text):
            sequences = self.model.generate(
                **self.inputs,
                **settings,
                # An id that no model gives: every row runs to the end.
                eos_token_id=no_end,
                pad_token_id=no_end,
                logits_processor=LogitsProcessorList([watch]),
                return_dict_in_generate=False,
            )
        return Run(
            sequences=sequences,
            hidden=torch.cat(recorder.hidden, dim=1),
            sizes=recorder.sizes,
            compact=recorder.compact,
            choices=torch.stack(watch.choices, dim=1),
            gaps=torch.stack(watch.gaps, dim=1),
            layers=recorder.layers,
        )
