"""A patched model against itself unpatched: nothing is found where there is nothing, and planted faults are."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import debug
import pytest
import torch
from compare import TOL, assert_unchanged, greedy, snapshot, teacher_forced
from torch import Tensor, nn
from zoo import BY_NAME, SPECIES, Model, Species, named_ids, text_config, text_model

import swapatch
from swapatch.rules import Rule
from swapatch.step import LayerCall, WindowStep
from swapatch.switch import is_disabled
from swapatch.verify import Place, Verdict, compare

WINDOW, PROMPT, NEW = 8, 30, 5
TEXT = [species for species in SPECIES if not species.vision]


def layer_kinds(model: Model) -> list[str]:
    return [kind.split("_")[0] for kind in text_config(model).layer_types]


def sliding_layers(model: Model) -> list[int]:
    """Those with keys and values of their own."""
    own = len(layer_kinds(model)) - (getattr(text_config(model), "num_kv_shared_layers", 0) or 0)
    return [index for index, kind in enumerate(layer_kinds(model)) if kind == "sliding" and index < own]


def attention(model: Model, layer: int) -> Any:
    return text_model(model).layers[layer].self_attn


@contextmanager
def fault(model: Model, layer: int, change: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """A fault of the patched side alone: `change(output, position of its first token)` of a layer's attention."""
    stop = 0  # of the positions of this call

    def count(module: nn.Module, args: Any) -> None:
        nonlocal stop
        stop = args[0].shape[1] if args[0].shape[1] > 1 else stop + 1

    def spoil(module: nn.Module, args: Any, output: Any) -> Any:
        return None if is_disabled() else (change(output[0], stop - output[0].shape[1]), *output[1:])

    hooks = [
        text_model(model).layers[0].register_forward_pre_hook(count),
        attention(model, layer).register_forward_hook(spoil),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def from_position(first: int, amount: float = 0.3) -> Callable[[Tensor, int], Tensor]:
    """A change of all positions from `first` on; not a factor, which the norm after the attention would take out."""

    def change(states: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + states.shape[1])
        return torch.where((positions >= first)[:, None], states + amount * states.roll(1, -1), states)

    return change


@contextmanager
def wrong_window(model: Model, layer: int, window: int) -> Iterator[None]:
    """One layer of a patched model attends another window, in the prompt."""
    attn, right = attention(model, layer), WindowStep.attend

    def attend(self: WindowStep, call: LayerCall, *rows: Any) -> Any:
        if call.layer is attn:
            self = copy.copy(self)
            self.rule = Rule(window)
        return right(self, call, *rows)

    with mock.patch.object(WindowStep, "attend", attend):
        yield


# -- nothing to find --


def test_same_on_every_species(species: Species) -> None:
    """And the model is afterwards as it was."""
    model = species.build(WINDOW)
    inputs = species.inputs(model, [PROMPT, PROMPT - 9])
    snap = snapshot(model)
    verdict = compare(model, **inputs, max_new_tokens=NEW)
    assert verdict.same
    assert (verdict.first, verdict.token, verdict.origin, verdict.layers, verdict.notes) == (None, None, None, (), ())
    assert verdict.differences.shape == (2, PROMPT + NEW - 1)
    assert 0 <= verdict.worst.difference <= verdict.tolerance == TOL
    assert torch.equal(verdict.tokens, greedy(model, inputs["input_ids"], NEW, **_mask(inputs)).tokens)
    assert_unchanged(model, snap)


def _mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"attention_mask": inputs["attention_mask"]}


@pytest.mark.parametrize("species", [species for species in SPECIES if species.vision], ids=str)
def test_same_with_images(species: Species) -> None:
    model = species.build(WINDOW)
    size = getattr(model.config, "mm_tokens_per_image", 6)
    inputs = species.inputs(model, [PROMPT], images=[[(5, size)]], pixels=True)
    assert compare(model, **inputs, max_new_tokens=2).same


@pytest.mark.parametrize("layout", ("anchored", "ring"))
def test_same_with_every_option(layout: str) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, 100)
    assert compare(model, ids, max_new_tokens=70, layout=layout, backend="reference").same


def test_a_patched_model_stays_patched() -> None:
    model = BY_NAME["gemma4_text"].build(WINDOW)
    ids = named_ids(model, 1, PROMPT)
    with swapatch.patch(model, layout="ring") as handle:
        assert compare(model, ids, max_new_tokens=2).same
        assert handle.active
        with pytest.raises(swapatch.AlreadyPatchedError):
            compare(model, ids, layout="anchored")


def test_bfloat16_has_a_wide_tolerance_and_says_so() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW, dtype=torch.bfloat16)
    verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=NEW)
    assert verdict.same
    assert verdict.tolerance > 100 * TOL
    assert "float32 tells more" in verdict.notes[0]


def test_a_short_prompt_tells_little_and_says_so() -> None:
    model = BY_NAME["gemma3_text"].build(64)
    assert "past the window of 64" in compare(model, named_ids(model, 1, 60), max_new_tokens=5).notes[0]
    assert not compare(model, named_ids(model, 1, 60), max_new_tokens=6).notes


def test_calls_that_stock_code_ran_are_counted() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    text = text_model(model)

    def change(*_: Any) -> None:  # a layer that was changed runs stock code; here from the second call on
        text.layers[0].self_attn.is_causal = is_disabled()  # which no single token notices

    with swapatch.patch(model):
        hook = text.register_forward_hook(change)
        verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=4)
        hook.remove()
    assert verdict.same
    assert verdict.notes == ("stock code ran in 3 of 4 calls",)


# -- planted faults --


@pytest.mark.parametrize("species", TEXT, ids=str)
@pytest.mark.parametrize("window", (WINDOW - 1, WINDOW + 1))
def test_a_window_off_by_one_is_found(species: Species, window: int) -> None:
    """In the first and the last sliding layer: its number, and the first position whose window is wrong."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, PROMPT)
    first = min(window, WINDOW)
    with swapatch.patch(model):
        for layer in sliding_layers(model)[:: len(sliding_layers(model)) - 1]:
            with wrong_window(model, layer, window):
                verdict = compare(model, ids, max_new_tokens=1)
            assert not verdict.same
            assert verdict.first.position == first
            assert (verdict.origin.index, verdict.origin.kind, verdict.origin.position) == (layer, "sliding", first)
        assert compare(model, ids, max_new_tokens=1).same


def test_a_fault_in_a_step_is_found(species: Species) -> None:
    """In a layer of any kind: the prompt and the first steps are right, a later one is not."""
    model = species.build(WINDOW)
    ids, kinds = named_ids(model, 1, PROMPT), layer_kinds(model)
    shared = getattr(text_config(model), "num_kv_shared_layers", 0) or 0
    with swapatch.patch(model):
        for layer in sorted({0, kinds.index("full"), len(kinds) - 1}):
            with fault(model, layer, from_position(PROMPT + 2)):
                verdict = compare(model, ids, max_new_tokens=NEW)
            assert verdict.first.position == verdict.origin.position == PROMPT + 2
            assert verdict.origin.index == layer
            tail = ", shared" if layer >= len(kinds) - shared else ""
            assert verdict.origin.kind == {"sliding": "sliding", "full": "global"}[kinds[layer]] + tail
            assert not verdict.differences[:, : PROMPT + 2].gt(TOL).any()


def test_the_first_of_two_faults_is_found() -> None:
    model = BY_NAME["gemma4_text"].build(WINDOW)
    with swapatch.patch(model), fault(model, 1, from_position(12, 0.01)), fault(model, 3, from_position(4, 3.0)):
        verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=1)
    # Position 4 is wrong first, and only in layer 3.
    assert (verdict.first.position, verdict.origin.index) == (4, 3)
    with swapatch.patch(model), fault(model, 1, from_position(4, 0.01)), fault(model, 3, from_position(4, 3.0)):
        verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=1)
    assert (verdict.first.position, verdict.origin.index) == (4, 1)


def test_differences_are_those_of_the_logits(species: Species) -> None:
    """At every position, against logits from forwards of our own."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, PROMPT)
    with swapatch.patch(model), fault(model, 0, from_position(3)):
        verdict = compare(model, ids, max_new_tokens=NEW)
        got = teacher_forced(model, verdict.tokens[:, :-1], prompt=PROMPT)
    want = teacher_forced(model, verdict.tokens[:, :-1], prompt=PROMPT)
    torch.testing.assert_close(verdict.differences, (got - want).abs().amax(-1), rtol=0, atol=2 * TOL)
    assert verdict.worst == Place(0, int(verdict.differences.argmax()), float(verdict.differences.max()))


def test_the_first_token_that_differs_is_that_of_generate() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids, new = named_ids(model, 2, PROMPT), 12
    stock = greedy(model, ids, new)
    with swapatch.patch(model), fault(model, 0, from_position(0, 1.0)):
        verdict = compare(model, ids, max_new_tokens=new)
        ours = greedy(model, ids, new).tokens
    differ = ours[:, PROMPT:] != stock.tokens[:, PROMPT:]
    number = int(differ.any(0).nonzero()[0])
    row = int(differ[:, number].nonzero()[0])
    assert (verdict.token.row, verdict.token.number) == (row, number)
    assert verdict.token.stock == stock.tokens[row, PROMPT + number]
    assert verdict.token.patched == ours[row, PROMPT + number]
    best = stock.logits[row, number].topk(2).values
    assert verdict.token.gap == pytest.approx(float(best[0] - best[1]), abs=1e-3)


def test_the_row_is_found_and_padding_does_not_count() -> None:
    species = BY_NAME["gemma4_ple_shared"]
    model = species.build(WINDOW)
    inputs = species.inputs(model, [PROMPT, PROMPT - 12])

    def second_row(states: Tensor, start: int) -> Tensor:
        changed = states.clone()
        changed[1] += changed[1].roll(1, -1)
        return changed

    with swapatch.patch(model), fault(model, 1, second_row):
        verdict = compare(model, **inputs, max_new_tokens=2)
    assert (verdict.first.row, verdict.first.position) == (1, 12)
    assert (verdict.origin.index, verdict.origin.position) == (1, 12)
    assert not verdict.differences[1, :12].any()
    assert not verdict.differences[0].gt(TOL).any()


def test_not_a_number_is_a_difference() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    # In the last layer: attention spreads it to all positions, since 0 times it is not a number either.
    with swapatch.patch(model), fault(model, 3, from_position(5, torch.nan)):
        verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=2)
    assert verdict.first == Place(0, 5, torch.inf)
    assert verdict.origin.index == 3
    plain = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert plain["first"] == {"row": 0, "position": 5, "difference": None}
    assert plain["differences"][0][5] is None


def test_rounding_begins_in_no_layer() -> None:
    """Every layer a little off: none stands out."""
    model = BY_NAME["gemma3_text"].build(WINDOW)
    hooks = [
        layer.register_forward_hook(lambda _, args, output: None if is_disabled() else output * (1 + 4e-7))
        for layer in text_model(model).layers
    ]
    with swapatch.patch(model):
        verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=2, tolerance=1e-7)
    for hook in hooks:
        hook.remove()
    assert not verdict.same
    assert verdict.origin is None
    assert len(verdict.layers) == 4
    assert "no layer stands out" in str(verdict)


# -- printed --


def test_printed() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    ids = named_ids(model, 1, PROMPT)
    with swapatch.patch(model):
        lines = str(compare(model, ids, max_new_tokens=3)).splitlines()
        assert lines[0] == "verdict  same"
        assert lines[2] == "tokens   3 of 3 the same"
        with fault(model, 1, from_position(6, 4.0)):
            verdict = compare(model, ids, max_new_tokens=12)
    lines = verdict.summary(lambda token: f"<{token}>").splitlines()
    assert lines[0] == "verdict  different"
    assert "differ first at position 6 of row 0" in lines[1]
    assert f"<{verdict.token.patched}> for <{verdict.token.stock}>" in lines[2]
    assert "begins in layer 1 (sliding), at position 6" in lines[3]
    assert "equal at all positions" in str(Verdict(1e-4, 2, torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)))


def test_as_plain_values() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    with swapatch.patch(model), fault(model, 1, from_position(6, 4.0)):
        verdict: Verdict = compare(model, named_ids(model, 1, PROMPT), max_new_tokens=3)
    plain = json.loads(json.dumps(verdict.as_dict()))
    assert plain["origin"] == plain["layers"][1]
    assert plain["origin"]["index"] == 1
    assert plain["tokens"] == verdict.tokens.tolist()
    assert not plain["same"]


# -- nothing to compare --


def test_refused_while_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    with swapatch.disabled(), pytest.raises(swapatch.SwapatchError, match="switched off"):
        compare(model, named_ids(model, 1, PROMPT))
    monkeypatch.setenv("SWAPATCH_DISABLE", "1")
    with pytest.raises(swapatch.SwapatchError, match="unset SWAPATCH_DISABLE"):
        compare(model, named_ids(model, 1, PROMPT))


def test_refused_when_stock_code_runs_on_both_sides() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    text_model(model).layers[0].self_attn.is_causal = False
    snap = snapshot(model)
    with pytest.raises(swapatch.SwapatchError, match="swapatch ran in 0 calls"):
        compare(model, named_ids(model, 1, PROMPT))
    assert_unchanged(model, snap)


def test_refused_models() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    with pytest.raises(swapatch.UnsupportedModelError, match="models with generate"):
        compare(text_model(model), named_ids(model, 1, PROMPT))
    with pytest.raises(swapatch.UnsupportedModelError, match="Linear"):
        compare(nn.Linear(1, 1), named_ids(model, 1, PROMPT))


def test_an_error_on_the_way_leaves_nothing_behind() -> None:
    model = BY_NAME["gemma3_text"].build(WINDOW)
    snap = snapshot(model)
    with pytest.raises(Exception, match="unused"):
        compare(model, named_ids(model, 1, PROMPT), unused_argument=3)
    assert_unchanged(model, snap)
    assert not swapatch.is_patched(model)


def test_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    """`scripts/debug.py` finds the fault it planted: first in layer 0, and gone with the reference."""
    debug.main([])
    shown = capsys.readouterr().out
    assert "swapatch: window 16, anchored, windowed/cpu" in shown  # print(model)
    tokens = {name: re.search(rf"{re.escape(name)} +(\[.*\])", shown) for name in ("patched", "disabled()", "DISABLE")}
    found = {name: match and match[1] for name, match in tokens.items()}
    assert found["patched"] != found["disabled()"] == found["DISABLE"]
    assert "begins in layer 0 (sliding)" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("verdict")] == ["different", "same"]
