"""Patched against stock on your own model and prompt: whether they differ, where first, and in which layer.

Both sides go through stock ``generate``, greedily. The patched side is made to take the tokens of the stock side, so
that every position can be compared, those after a difference too. Logits are made from the text model's last hidden
states, some positions at a time, so a long prompt needs no ``[tokens, vocabulary]`` tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._errors import SwapatchError, UnsupportedModelError, explain
from ._record import Pair, Run, Side
from .api import patch, status
from .families import plan_model
from .plan import text_config
from .switch import VARIABLE, disabled, is_disabled

LEAST_TOLERANCE = 1e-4
"""Differences of logits up to this always count as rounding."""

ROUNDING_STEPS = {32: 64, 16: 8}
"""The same relative to the largest logit: so many times the spacing of floats of so many bits."""

JUMP = 8.0
"""A difference begins in the layer that has so many times what came into it."""

BLOCK = 64
"""Positions whose logits are made at a time."""


@dataclass(frozen=True)
class Place:
    """A position at which logits differ.

    Attributes:
        row: sequence of the batch.
        position: column of the input, padding included, from 0; generated tokens follow the prompt.
        difference: largest difference of the logits there; infinite when one of them is not a number.
    """

    row: int
    position: int
    difference: float


@dataclass(frozen=True)
class TokenChange:
    """The first generated token that the patched model would choose otherwise.

    Attributes:
        row: sequence of the batch.
        number: of the generated token, from 0.
        stock, patched: the two tokens.
        gap: how far the stock model's best token was ahead of its second best; near 0 it was a tie.
    """

    row: int
    number: int
    stock: int
    patched: int
    gap: float


@dataclass(frozen=True)
class LayerChange:
    """How far a layer's output is from stock's, in the call where the logits first differ.

    Attributes:
        index: of the layer.
        kind: ``"sliding"`` (replaced by swapatch), ``"global"`` (stock code); with ``", shared"`` if the layer attends
            the keys and values of another.
        difference: length of the difference of the hidden states over their own, the largest of all positions up to
            the one where the logits differ.
        position: the first position that is as far off as that, within a factor of :data:`JUMP`.
    """

    index: int
    kind: str
    difference: float
    position: int


@dataclass(frozen=True)
class Verdict:
    """What :func:`compare` found. Printed it is a summary.

    Attributes:
        tolerance: what counts as rounding.
        prompt: tokens of the prompt, padding included.
        tokens: prompt and generated tokens of the stock model, ``[batch, prompt + new]``.
        differences: of the logits, ``[batch, prompt + new - 1]``: the largest at each position, 0 at padding. Position
            ``p`` predicts token ``p + 1``.
        first: the first position that differs by more than the tolerance; None if there is none.
        token: the first generated token that differs; None if there is none.
        layers: how far each layer is off, if the logits differ.
        origin: the layer where the difference begins; None if there is none, or none stands out.
        notes: what else should be known.
    """

    tolerance: float
    prompt: int
    tokens: Tensor
    differences: Tensor
    first: Place | None = None
    token: TokenChange | None = None
    layers: tuple[LayerChange, ...] = ()
    origin: LayerChange | None = None
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no logit differs by more than the tolerance.

        A token can differ all the same: then the stock model's two best were nearer to each other than twice that.
        """
        return self.first is None

    @property
    def worst(self) -> Place:
        """The position that differs most."""
        row, position = divmod(int(self.differences.argmax()), self.differences.shape[1])
        return Place(row, position, float(self.differences[row, position]))

    def summary(self, decode: Callable[[int], str] = str) -> str:
        """A few lines for people; ``decode`` shows a token."""
        lines = [f"verdict  {'same' if self.same else 'different'}", f"logits   {self._logits()}"]
        lines.append(f"tokens   {self._tokens(decode)}")
        if not self.same:
            lines.append(f"layers   {self._layers()}")
        return "\n".join([*lines, *(f"note     {note}" for note in self.notes)])

    __str__ = summary

    def _logits(self) -> str:
        if not self.worst.difference:
            return "equal at all positions"
        worst = f"position {self.worst.position} of row {self.worst.row}, by {self.worst.difference:.3g}"
        if self.first is None:
            return f"differ most at {worst}; up to {self.tolerance:.3g} counts as rounding"
        count = int((self.differences > self.tolerance).sum())
        return (
            f"differ first at position {self.first.position} of row {self.first.row}, by {self.first.difference:.3g}; "
            f"most at {worst}; at {count} of {self.differences.numel()} positions by more than {self.tolerance:.3g}"
        )

    def _tokens(self, decode: Callable[[int], str]) -> str:
        new = self.tokens.shape[1] - self.prompt
        if self.token is None:
            return f"{new} of {new} the same"
        return (
            f"generated token {self.token.number} of row {self.token.row} is the first that differs: "
            f"{decode(self.token.patched)} for {decode(self.token.stock)}, "
            f"which was {self.token.gap:.3g} ahead of the next best"
        )

    def _layers(self) -> str:
        if self.origin is None:
            return "no layer stands out: the difference grows from layer to layer, as rounding does"
        return (
            f"the difference begins in layer {self.origin.index} ({self.origin.kind}), "
            f"at position {self.origin.position}: {self.origin.difference:.2g} of the hidden state"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; a difference that is not finite becomes None."""
        return {
            "same": self.same,
            "tolerance": self.tolerance,
            "prompt": self.prompt,
            "tokens": self.tokens.tolist(),
            "differences": [[_finite(x) for x in row] for row in self.differences.tolist()],
            "first": _plain(self.first),
            "token": _plain(self.token),
            "origin": _plain(self.origin),
            "layers": [_plain(layer) for layer in self.layers],
            "notes": list(self.notes),
        }


def compare(
    model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int = 16,
    tolerance: float | None = None,
    layout: str | None = None,
    backend: str | None = None,
    **inputs: Any,
) -> Verdict:
    """Run a model patched and stock, and say where they differ.

    A model that is not patched is afterwards as it was. One that is patched stays so, and is compared as it is, with
    whatever was done to it since; its stock side runs under :func:`swapatch.disabled`.

    Args:
        model: a model with ``generate``, in eval mode.
        input_ids: the prompt, ``[batch, tokens]``; rows of different length are padded on the left.
        max_new_tokens: tokens to generate and compare after it, whether or not an end token comes.
        tolerance: largest difference of the logits that counts as rounding; see :func:`default_tolerance`.
        layout, backend: as for :func:`swapatch.patch`; by default what the model is patched with.
        **inputs: whatever else ``generate`` takes as input: ``attention_mask``, pixels, token types.

    Raises:
        UnsupportedModelError: swapatch cannot patch the model, or it cannot generate.
        AlreadyPatchedError: it is patched with another layout or backend.
        SwapatchError: there was nothing to compare: swapatch is switched off, or stock code ran on both sides.
        ValueError: ``input_ids`` is not a tensor ``[batch, tokens]`` with at least one token.

    >>> verdict = compare(model, torch.arange(5, 95)[None])
    >>> verdict.same, verdict.token
    (True, None)
    """
    if is_disabled():
        found = f"swapatch is switched off (disabled(), or {VARIABLE})"
        raise SwapatchError(explain(found, "comparing while it is on", f"unset {VARIABLE}"))
    plan = plan_model(model)
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or not input_ids.numel():
        found = f"input_ids of shape {tuple(getattr(input_ids, 'shape', ()))}, a {type(input_ids).__name__}"
        do = "tokenize with return_tensors='pt'"
        raise ValueError(explain(found, "a tensor [batch, tokens] with at least one token", do))
    if not hasattr(model, "generate"):
        do = "pass a model with a language modeling head"
        raise UnsupportedModelError(explain(f"{type(model).__name__}", "models with generate", do))
    stock, patched = _switches(model, layout, backend)
    pair = Pair(model, plan, {"input_ids": input_ids, **inputs}, max_new_tokens, stock, patched)
    with torch.no_grad():
        return _judge(pair, tolerance)


def default_tolerance(dtype: torch.dtype, largest: float) -> float:
    """What counts as rounding for logits of this type, the largest of which is ``largest``.

    It is wide for bfloat16 and float16, which round in every layer, and can hide a small fault there.

    >>> default_tolerance(torch.float32, 10.0), default_tolerance(torch.bfloat16, 32.0)
    (0.0001, 2.0)
    """
    steps = ROUNDING_STEPS[min(32, torch.finfo(dtype).bits)]
    return max(LEAST_TOLERANCE, steps * torch.finfo(dtype).eps * largest)


# -- comparing --


def _switches(model: Any, layout: str | None, backend: str | None) -> tuple[Side, Side]:
    """What makes the model stock, and what makes it patched."""
    now = status(model)
    options: dict[str, Any] = {
        "layout": layout or now.layout or "anchored",
        "backend": backend or now.backend or "auto",
    }
    if not now.patched:
        return nullcontext, partial(patch, model, **options)
    patch(model, **options)  # gives the same handle, or refuses other options
    return disabled, nullcontext


@dataclass
class _Pass:
    """Both sides of one way to generate, and how far the logits are apart.

    Attributes:
        options: more arguments for ``generate``.
        differences: ``[batch, prompt + new - 1]``, 0 where there is nothing to compare.
        largest: the largest stock logit.
    """

    options: dict[str, Any]
    ours: Run
    stock: Run
    differences: Tensor
    largest: float


def _judge(pair: Pair, tolerance: float | None) -> Verdict:
    passes = [_run_pass(pair)]
    if passes[0].stock.hidden.shape[1] < pair.prompt + pair.new - 1:
        # Gemma 4 spares its last layers the prompt, but for one token, unless somebody asks for particular logits.
        last = torch.tensor([-1], device=pair.inputs["input_ids"].device)
        passes.append(_run_pass(pair, passes[0].stock.sequences, max_new_tokens=1, logits_to_keep=last))
    ours, stock = passes[0].ours, passes[0].stock
    differences = torch.stack([one.differences for one in passes]).amax(0)
    if tolerance is None:
        tolerance = default_tolerance(pair.model.dtype, max(one.largest for one in passes))
    first = _first(differences > tolerance)
    verdict = partial(
        Verdict,
        tolerance,
        pair.prompt,
        stock.sequences,
        differences,
        token=_token(ours, stock),
        notes=_notes(pair, ours),
    )
    if first is None:
        return verdict()
    row, position = first
    place = Place(row, position, float(differences[first]))
    one = next(one for one in passes if one.differences[first] > tolerance)
    layers, origin = _locate(pair, one, row, position)
    return verdict(first=place, layers=layers, origin=origin)


def _run_pass(pair: Pair, tokens: Tensor | None = None, **options: Any) -> _Pass:
    """Both sides once, on the stock side's tokens or on those given."""
    given = None if tokens is None else tokens[:, pair.prompt :]
    stock = pair.run(pair.stock, given, **options)
    ours = pair.run(pair.patched, stock.sequences[:, pair.prompt :], **options)
    if not ours.compact or stock.compact:
        raise SwapatchError(
            explain(
                f"swapatch ran in {ours.compact} calls of the patched model and {stock.compact} of the stock one",
                "all of the first, none of the second",
                "call model.eval(), use 'sdpa' or 'eager' attention and the default cache of generate",
            )
        )
    found, largest = _logit_differences(pair.model, ours.hidden, stock.hidden)
    differences = torch.zeros(found.shape[0], pair.prompt + pair.new - 1)
    stop = stock.sequences.shape[1] - 1
    differences[:, stop - found.shape[1] : stop] = found
    if (mask := pair.inputs.get("attention_mask")) is not None:
        differences[:, : pair.prompt].masked_fill_(mask.cpu() == 0, 0.0)
    return _Pass(options, ours, stock, differences, largest)


def _logit_differences(model: Any, ours: Tensor, stock: Tensor) -> tuple[Tensor, float]:
    """Largest difference at each position, ``[batch, positions]`` on the CPU, and the largest stock logit."""
    found, largest = [], 0.0
    for start in range(0, stock.shape[1], BLOCK):
        want = _logits(model, stock[:, start : start + BLOCK])
        got = _logits(model, ours[:, start : start + BLOCK])
        difference = (got - want).abs().amax(-1)
        found.append(torch.where(difference.isfinite(), difference, torch.inf).cpu())
        largest = max(largest, float(want.abs().max()))
    return torch.cat(found, dim=1), largest


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """The model's own logits, in float32, ``[batch, positions, vocabulary]``."""
    logits: Tensor = model.get_output_embeddings()(hidden)
    cap = getattr(text_config(model), "final_logit_softcapping", None)
    return (logits if cap is None else cap * torch.tanh(logits / cap)).float()


def _first(wrong: Tensor) -> tuple[int, int] | None:
    """Row and position of the first True in ``[batch, positions]``, in order of the positions."""
    columns = wrong.any(0).nonzero()
    if not len(columns):
        return None
    position = int(columns[0])
    return int(wrong[:, position].nonzero()[0]), position


def _token(ours: Run, stock: Run) -> TokenChange | None:
    place = _first(ours.choices != stock.choices)
    if place is None:
        return None
    return TokenChange(*place, int(stock.choices[place]), int(ours.choices[place]), float(stock.gaps[place]))


def _notes(pair: Pair, ours: Run) -> tuple[str, ...]:
    notes = []
    if pair.prompt + pair.new - 1 <= pair.plan.window:
        notes.append(f"no token here looks past the window of {pair.plan.window}: a longer prompt tells more")
    if ours.compact < len(ours.sizes):
        notes.append(f"stock code ran in {len(ours.sizes) - ours.compact} of {len(ours.sizes)} calls")
    if torch.finfo(pair.model.dtype).bits < 32:
        notes.append(f"{str(pair.model.dtype).removeprefix('torch.')} rounds in every layer: float32 tells more")
    return tuple(notes)


# -- finding the layer --


def _locate(pair: Pair, one: _Pass, row: int, position: int) -> tuple[tuple[LayerChange, ...], LayerChange | None]:
    """Run both sides again, and look into the layers in the call that computed this position."""
    call, start = 0, 0
    while start + one.stock.sizes[call] <= position:
        start += one.stock.sizes[call]
        call += 1
    tokens = one.stock.sequences[:, pair.prompt :]
    want = pair.run(pair.stock, tokens, call, **one.options).layers
    got = pair.run(pair.patched, tokens, call, **one.options).layers
    stop = start + one.stock.sizes[call]
    mask = pair.inputs.get("attention_mask")
    layers, steps, before = [], [], torch.finfo(pair.model.dtype).eps
    for plan, ours, stock in zip(pair.plan.layers, got, want, strict=True):
        off = _relative(ours[row], stock[row])
        first = stop - len(off)  # position of the first state
        off = off[: position + 1 - first]
        if mask is not None:
            seen = mask[row, first : first + len(off)].cpu()
            off[: len(seen)].masked_fill_(seen == 0, 0.0)
        largest = float(off.max())
        where = first + int((off >= largest / JUMP).nonzero()[0])
        layers.append(LayerChange(plan.index, plan.kind + ", shared" * plan.shared, largest, where))
        steps.append(largest / before)
        before = max(before, largest)
    return tuple(layers), next((layer for layer, step in zip(layers, steps, strict=True) if step >= JUMP), None)


def _relative(ours: Tensor, stock: Tensor) -> Tensor:
    """Length of the difference over that of stock's, ``[positions]``, from hidden states ``[positions, hidden]``."""
    size = (ours.double() - stock.double()).norm(dim=-1)
    off = torch.where(size == 0, 0.0, size / stock.double().norm(dim=-1))
    return torch.where(off.isnan(), torch.inf, off).cpu()


def _plain(thing: Place | TokenChange | LayerChange | None) -> dict[str, Any] | None:
    return None if thing is None else {name: _finite(value) for name, value in vars(thing).items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0 else value
