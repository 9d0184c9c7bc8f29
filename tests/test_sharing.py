"""Gemma 4 layers that share keys and values: no rows of their own, no copies, and everything as stock."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from compare import assert_same_gradients, assert_same_logits, forced, greedy, parameter_gradients
from torch import Tensor, nn
from zoo import SPECIES, Species, named_ids, text_config, text_model

import swapatch
from swapatch._compat import CACHE_NAME
from swapatch.step import AttendingStep, LayerCall

SHARED = [species for species in SPECIES if species.shared_kv]


@pytest.fixture(params=SHARED, ids=str)
def species(request: pytest.FixtureRequest) -> Species:
    return request.param


def consumer(model: nn.Module) -> nn.Module:
    """A sliding layer that attends another layer's keys and values."""
    return next(
        layer.self_attn
        for layer in text_model(model).layers
        if layer.self_attn.is_kv_shared_layer and layer.self_attn.is_sliding
    )


def watch(module: nn.Module, found: list[dict[str, Any]]) -> Any:
    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shared = kwargs["shared_kv_states"]["sliding_attention"]
        found.append({"tokens": kwargs["hidden_states"].shape[1], "keys": shared[0], "values": shared[1]})

    return module.register_forward_pre_hook(catch, with_kwargs=True)


@contextmanager
def watch_steps(module: nn.Module, found: list[dict[str, Any]]) -> Iterator[None]:
    run = AttendingStep.run

    def catch(self: AttendingStep, call: LayerCall) -> Tensor:
        if call.layer is module:
            found.append({"keys": call.borrowed[0], "values": call.borrowed[1]})
        return run(self, call)

    with mock.patch.object(AttendingStep, "run", catch):
        yield


def test_shared_layers_have_no_rows(species: Species) -> None:
    model = species.build(16)
    with swapatch.patch(model) as handle:
        cache = greedy(model, named_ids(model, 1, 50), 3).cache
    shared = [layer.index for layer in handle.plan.layers if layer.shared]
    assert len(shared) == text_config(model).num_kv_shared_layers
    assert not set(shared) & set(cache.plan.owners)
    for layer in swapatch.report(cache).layers:  # before transformers 5.23 the list has no entry for them
        if layer.index in shared:
            assert (layer.kind, layer.rows, layer.bytes) == ("shared", 0, 0)


def test_consumers_attend_the_producer_s_buffer(species: Species) -> None:
    """In a decode step what they get is the buffer itself, not a copy; and the step's rows are the stock ones."""
    model = species.build(16)
    ids = named_ids(model, 1, 200)
    stock: list[dict[str, Any]] = []
    hook = watch(consumer(model), stock)
    forced(model, ids, prompt=50)
    hook.remove()
    ours: list[dict[str, Any]] = []
    with swapatch.patch(model) as handle:
        source = handle.plan.layers[consumer(model).layer_idx].source
        with watch_steps(consumer(model), ours):  # a hook would be shown what stock shows
            cache = forced(model, ids[:, :199], prompt=50).cache
            buffer = cache.layers[source].key_rows.untyped_storage().data_ptr()
            forced(model, ids[:, 199:], prompt=1, cache=cache)
    assert ours[-1]["keys"].untyped_storage().data_ptr() == buffer
    assert ours[0]["keys"].shape[2] == 50  # in the prefill the whole prompt
    # The rows of past steps have been overwritten in our buffer by now; those of the last step must agree.
    for name in ("keys", "values"):
        torch.testing.assert_close(ours[-1][name], stock[-1][name], atol=1e-4, rtol=0)


@pytest.mark.parametrize("keep", (0, 1, 2, 7))
@pytest.mark.parametrize("chunk", (1, 2, 30))
def test_only_the_kept_positions_are_computed(species: Species, keep: int, chunk: int) -> None:
    """The saving of stock stays: consumers see only the queries that logits are wanted for, in every kind of call."""
    model = species.build(16)
    ids = named_ids(model, 1, 60 + chunk)

    def run() -> tuple[list[int], list[torch.Tensor]]:
        found: list[dict[str, Any]] = []
        hook = watch(consumer(model), found)
        cache = swapatch.CompactCache(model)
        logits = []
        with torch.no_grad():
            for part in (ids[:, :60], ids[:, 60:]):
                logits.append(model(part, logits_to_keep=keep, **{CACHE_NAME: cache}).logits)
        hook.remove()
        return [call["tokens"] for call in found], logits

    want_tokens, want = run()
    with swapatch.patch(model):
        got_tokens, got = run()
    # Stock drops queries only where it can leave its mask out or cut it; we always can.
    assert all(ours <= theirs for ours, theirs in zip(got_tokens, want_tokens, strict=True))
    for ours, theirs in zip(got, want, strict=True):
        assert_same_logits(ours, theirs)


@pytest.mark.parametrize("sizes", ([1, 1], [10, 1, 1], [16, 1], [50, *[1] * 80], [50, 3, 70, 1], [5, 5, 5, 1]), ids=str)
def test_returned_states_are_stock_s(species: Species, sizes: list[int], layout: str) -> None:
    """Same shapes, values and time order at every call, and later calls do not change what was returned."""
    model = species.build(16)
    ids = named_ids(model, 1, sum(sizes))

    def run() -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        cache = swapatch.CompactCache(model, layout=layout)
        outputs = []
        with torch.no_grad():
            for part in ids.split(sizes, dim=1):
                outputs.append(model(part, return_shared_kv_states=True, **{CACHE_NAME: cache}).shared_kv_states)
        return [dict(output) for output in outputs]

    want = run()
    with swapatch.patch(model, layout=layout):
        got = run()
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for kind in theirs:
            for a, b in zip(ours[kind], theirs[kind], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_embeddings_with_and_without_per_layer_inputs(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 60)
    text = text_model(model)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        per_layer = text.get_per_layer_inputs(ids, None)
        for extra in ({}, {"per_layer_inputs": per_layer}):
            want = model(inputs_embeds=embeds, **extra).logits
            with swapatch.patch(model):
                got = model(inputs_embeds=embeds, **extra)
            assert isinstance(got[CACHE_NAME], swapatch.CompactCache)
            assert_same_logits(got.logits, want)


def test_gradient_checkpointing(species: Species) -> None:
    model = species.build(16)
    ids = named_ids(model, 1, 40)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.24
    model.train()

    want = parameter_gradients(model, model(ids, labels=ids, use_cache=False).loss)
    with swapatch.patch(model):
        got = parameter_gradients(model, model(ids, labels=ids, use_cache=False).loss)
    assert_same_gradients(got, want)
