"""Undo is exact: every attribute, class and transformers global is the very object it was, and the logits are equal."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from compare import assert_unchanged, forced, greedy, snapshot
from torch import nn
from zoo import Species, named_ids, text_model

import swapatch


def test_nothing_is_left(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 40)
    before = forced(model, ids, prompt=30).logits
    snap = snapshot(model)
    handle = swapatch.patch(model)
    with pytest.raises(AssertionError):
        assert_unchanged(model, snap)
    greedy(model, ids, 70)
    handle.undo()
    assert_unchanged(model, snap)
    assert torch.equal(forced(model, ids, prompt=30).logits, before)


def test_twice_and_again(species: Species) -> None:
    model = species.build(16)
    snap = snapshot(model)
    handle = swapatch.patch(model)
    handle.undo()
    handle.undo()
    assert not handle.active
    assert_unchanged(model, snap)
    with swapatch.patch(model) as second:
        assert second.active
        assert second is not handle
        handle.undo()
        assert second.active
    assert_unchanged(model, snap)


def test_undone_after_an_exception(species: Species) -> None:
    model = species.build(16)
    snap = snapshot(model)
    with pytest.raises(KeyboardInterrupt), swapatch.patch(model):
        raise KeyboardInterrupt
    assert_unchanged(model, snap)


def test_failure_in_the_middle_is_rolled_back(species: Species, monkeypatch: pytest.MonkeyPatch) -> None:
    model = species.build(16)
    snap = snapshot(model)

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(swapatch.api, "ModelForward", fail)  # the last that is made
    with pytest.raises(MemoryError):
        swapatch.patch(model)
    monkeypatch.undo()
    assert_unchanged(model, snap)
    assert not swapatch.is_patched(model)


def test_attribute_deleted_meanwhile(species: Species) -> None:
    model = species.build(16)
    snap = snapshot(model)
    handle = swapatch.patch(model)
    del text_model(model).layers[handle.plan.sliding[0]].self_attn.forward
    assert swapatch.status(model).irregular
    handle.undo()
    assert_unchanged(model, snap)


def test_somebody_on_top_is_named(species: Species) -> None:
    """Undo refuses over a wrapper that came later, changes nothing, and works once the wrapper is gone."""
    model = species.build(16)
    snap = snapshot(model)
    handle = swapatch.patch(model)
    patched = snapshot(model)
    attention = text_model(model).layers[handle.plan.sliding[0]].self_attn
    ours = attention.forward
    attention.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    wrapped = snapshot(model)
    with pytest.raises(swapatch.PatchConflictError, match=r"self_attn\.forward is .*lambda"):
        handle.undo()
    assert_unchanged(model, wrapped)
    assert handle.active
    attention.forward = ours
    assert_unchanged(model, patched)
    handle.undo()
    assert_unchanged(model, snap)


def test_undo_under_a_hook_that_came_later(species: Species) -> None:
    """A hook of accelerate moves the forward to another name: it is taken from there, and the hook goes on."""

    class Count(ModelHook):  # type: ignore[misc]  # accelerate is untyped
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            Count.calls += 1
            return args, kwargs

    model = species.build(16)
    ids = named_ids(model, 1, 30)
    want = forced(model, ids, prompt=30).logits
    handle = swapatch.patch(model)
    layer = text_model(model).layers[handle.plan.sliding[0]]
    hooked = [layer.self_attn, text_model(model)]
    for module in hooked:
        add_hook_to_module(module, Count())
    handle.undo()
    assert torch.equal(forced(model, ids, prompt=30).logits, want)
    assert Count.calls == 2
    for module in hooked:
        remove_hook_from_module(module)
        assert module.forward.__func__ is type(module).forward
    assert torch.equal(forced(model, ids, prompt=30).logits, want)


def test_hook_that_came_first_keeps_running(species: Species) -> None:
    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):  # type: ignore[no-untyped-def]
            Count.calls += 1
            return args, kwargs

    model = species.build(16)
    ids = named_ids(model, 1, 40)
    want = forced(model, ids, prompt=30).logits
    attention = text_model(model).layers[0].self_attn
    add_hook_to_module(attention, Count())
    snap = snapshot(model)
    with swapatch.patch(model):
        got = forced(model, ids, prompt=30)
        assert isinstance(got.cache, swapatch.CompactCache)
        assert Count.calls == 11
        torch.testing.assert_close(got.logits, want, atol=1e-4, rtol=0)
    assert_unchanged(model, snap)


def test_somebody_below_is_refused(species: Species) -> None:
    model = species.build(16)
    attention = text_model(model).layers[swapatch.patch(model).plan.sliding[0]].self_attn
    swapatch.unpatch(model)
    attention.forward = lambda *args, **kwargs: None
    snap = snapshot(model)
    with pytest.raises(swapatch.PatchConflictError, match="take that replacement off"):
        swapatch.patch(model)
    assert_unchanged(model, snap)


def test_a_deep_copy_is_patched_by_itself(species: Species) -> None:
    """The copy runs its own weights, and is undone without the original noticing."""
    model = species.build(16)
    ids = named_ids(model, 1, 40)
    handle = swapatch.patch(model)
    patched = snapshot(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    got = greedy(twin, ids, 70)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert swapatch.unpatch(twin)
    want = greedy(twin, ids, 70)
    assert not isinstance(want.cache, swapatch.CompactCache)
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=0)
    assert_unchanged(model, patched)
    assert handle.active


@pytest.mark.slow
def test_import_changes_nothing_in_transformers() -> None:
    code = """
import sys, torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
import transformers.generation.utils, transformers.integrations.sdpa_attention
sys.path.insert(0, "tests")
from compare import assert_unchanged, snapshot
from zoo import SPECIES
models = [species.build(8) for species in SPECIES]
before = [snapshot(model) for model in models]
import swapatch
for model, snap in zip(models, before):
    assert_unchanged(model, snap)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
