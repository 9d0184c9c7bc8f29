"""torch.compile: one graph for all positions and rolls, with static global layers, in both layouts."""

from typing import Any

import pytest
import torch
from compare import assert_same_logits, cache_key, forced
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from zoo import BY_NAME, named_ids, text_model

import swapatch

NAMES = ("gemma3_text", "gemma4_ple_shared", "gemma4_moe")

pytestmark = pytest.mark.usefixtures("device")


def run(
    model: nn.Module, call: Any, ids: Tensor, prompt: int, layout: str, counter: CompileCounter
) -> tuple[Tensor, list[int]]:
    """Prefill by the plain model, then every token by `call`; logits, and the number of graphs after each step."""
    cache = swapatch.CompactCache(model, max_cache_len=ids.shape[1], layout=layout)
    logits, graphs = [forced(model, ids[:, :prompt], prompt=prompt, cache=cache).logits], []
    with torch.no_grad():
        for position in range(prompt, ids.shape[1]):
            output = call(ids[:, position : position + 1], **{cache_key(model): cache})
            logits.append(output.logits)
            graphs.append(counter.frame_count)
    return torch.cat(logits, 1), graphs


@pytest.mark.parametrize("name", (NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)))
def test_two_hundred_positions_add_no_graph(name: str, layout: str) -> None:
    """After three warm steps, across three rolls; compiled with a backend that runs the graphs as they are."""
    torch._dynamo.reset()
    model = BY_NAME[name].build(16)
    ids = named_ids(model, 1, 20 + 203)
    want = forced(model, ids, prompt=20).logits
    counter = CompileCounter()
    with swapatch.patch(model, layout=layout):
        got, graphs = run(model, torch.compile(model, dynamic=False, backend=counter), ids, 20, layout, counter)
    assert_same_logits(got, want)
    assert counter.frame_count > 0
    assert graphs[2] == graphs[-1], graphs


@pytest.mark.slow
def test_under_inductor(layout: str) -> None:
    torch._dynamo.reset()
    model = BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 20 + 80)
    want = forced(model, ids, prompt=20).logits
    with swapatch.patch(model, layout=layout):
        got, _ = run(model, torch.compile(model, dynamic=False), ids, 20, layout, CompileCounter())
    assert_same_logits(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_sliding_layer_is_one_full_graph(name: str, layout: str) -> None:
    """The replaced forward compiles with fullgraph=True, and one graph serves every position."""
    torch._dynamo.reset()
    model = BY_NAME[name].build(16)
    ids = named_ids(model, 1, 120)
    want = forced(model, ids, prompt=30).logits
    counter = CompileCounter()
    layers = text_model(model).layers
    with swapatch.patch(model, layout=layout) as handle:
        index = handle.plan.owners[0]
        attention = layers[index].self_attn
        patched = attention.forward
        cache = swapatch.CompactCache(model, max_cache_len=120, layout=layout)
        prefill = forced(model, ids[:, :30], prompt=30, cache=cache).logits
        attention.forward = torch.compile(patched, dynamic=False, fullgraph=True, backend=counter)
        steps = forced(model, ids[:, 30:], prompt=1, cache=cache).logits
        attention.forward = patched
        assert swapatch.status(model).calls.windowed == {"prefill": 1, "decode": 90}
    assert_same_logits(torch.cat([prefill, steps], dim=1), want)
    assert counter.frame_count == 1


def test_compiled_before_and_after_the_patch() -> None:
    """A model compiled before it is patched runs patched, and stock again after undo."""
    torch._dynamo.reset()
    model = BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 60)
    want = forced(model, ids, prompt=60).logits
    compiled = torch.compile(model, backend="eager")
    key = cache_key(model)
    with torch.no_grad():
        assert_same_logits(compiled(ids).logits, want)
        with swapatch.patch(model):
            output = compiled(ids)
            assert isinstance(output[key], swapatch.CompactCache)
            assert_same_logits(output.logits, want)
        output = compiled(ids)
        assert not isinstance(output[key], swapatch.CompactCache)
        assert_same_logits(output.logits, want)
