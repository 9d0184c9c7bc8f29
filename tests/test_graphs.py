"""One graph: what `torch.compile(fullgraph=True)` and `torch.export` make of a patched model.

Graphs are run as they are, or after autograd's tracing: what Inductor does to them is its own business. Models have two
or three layers, for tracing takes its time over each.
"""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
import zoo
from compare import (
    assert_same_gradients,
    assert_same_logits,
    cache_key,
    cache_of,
    forced,
    greedy,
    parameter_gradients,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from zoo import BY_NAME, FULL, OLD, SLIDING, Model, Species, named_ids, token_type_key, token_types

import swapatch

SHARING = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16}
SHORT = {
    "gemma3": Species("gemma3", "Gemma3ForCausalLM", partial(zoo._gemma3_text, layer_types=[SLIDING, FULL])),
    "gemma4": Species(
        "gemma4", "Gemma4ForCausalLM", partial(zoo._gemma4_text, layer_types=[SLIDING, FULL, SLIDING], **SHARING)
    ),
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(params=(SHORT["gemma3"], pytest.param(SHORT["gemma4"], marks=pytest.mark.slow)), ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param.build(16)


def compiled(model: Model, backend: str = "eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def stock(model: Model, ids: Tensor, **inputs: Any) -> Tensor:
    with swapatch.disabled(), torch.no_grad():
        logits: Tensor = model(ids, use_cache=False, **inputs).logits
    return logits


def test_without_a_cache_in_any_length(model: Model) -> None:
    """One graph, and another one while swapatch is switched off."""
    with swapatch.patch(model), torch.no_grad():
        call, counter = compiled(model, dynamic=True)
        for length in (40, 17, 90, 11, 150, 64):
            ids = named_ids(model, 1, length)
            assert_same_logits(call(ids, use_cache=False).logits, stock(model, ids))
        assert counter.frame_count == 1
        assert "swapatch.window_attention" in str(counter.graphs[0].code)
        assert swapatch.status(model).calls.windowed["uncached"] == 1
        with swapatch.disabled():
            call(ids, use_cache=False)
        assert "swapatch.window_attention" not in str(counter.graphs[-1].code)


@pytest.mark.slow
def test_padded_batch(model: Model) -> None:
    ids = named_ids(model, 2, 90)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    with swapatch.patch(model), torch.no_grad():
        call, _ = compiled(model)
        for _ in range(2):  # the same graph for another mask
            got = call(ids, attention_mask=mask, use_cache=False).logits
            assert_same_logits(got, stock(model, ids, attention_mask=mask), mask)
            mask = mask.roll(5, 1)
            mask[0, :35] = 0


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="transformers before 5.24 asks tensors for values when it makes masks of images")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's own, when it reads transformers' masks
def test_images() -> None:
    """Where an image is, only the operator looks."""
    model = BY_NAME["gemma3_vision"].build(16)
    ids = named_ids(model, 1, 90)
    with swapatch.patch(model), torch.no_grad():
        call, counter = compiled(model)
        for blocks in ([(10, 30)], [(3, 5), (50, 25)]):
            types = {token_type_key(model): token_types([90], [blocks])}
            assert_same_logits(call(ids, use_cache=False, **types).logits, stock(model, ids, **types))
        assert counter.frame_count == 1


@pytest.mark.parametrize("use_cache", (False, None), ids=("uncached", "default"))
def test_training(model: Model, use_cache: bool | None) -> None:
    model.train()
    ids = named_ids(model, 1, 90)
    want = parameter_gradients(model, model(ids, labels=ids, use_cache=use_cache).loss)
    with swapatch.patch(model):
        call, counter = compiled(model, "aot_eager")
        got = parameter_gradients(model, call(ids, labels=ids, use_cache=use_cache).loss)
    assert_same_gradients(got, want)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_checkpointed_training() -> None:
    model = SHORT["gemma3"].build(16).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.24
    ids = named_ids(model, 1, 90)
    want = parameter_gradients(model, model(ids, labels=ids, use_cache=False).loss)
    with swapatch.patch(model):
        call, _ = compiled(model, "aot_eager")
        got = parameter_gradients(model, call(ids, labels=ids, use_cache=False).loss)
    assert_same_gradients(got, want)


def test_the_cache_that_a_forward_makes(model: Model) -> None:
    """It is compact in a graph, too, and goes on outside of it."""
    ids = named_ids(model, 1, 120)
    want = forced(model, ids, prompt=120).logits
    with swapatch.patch(model), torch.no_grad():
        call, counter = compiled(model)
        output = call(ids[:, :90])
        assert isinstance(cache_of(output), swapatch.CompactCache)
        assert counter.frame_count == 1
        rest = forced(model, ids[:, 90:], prompt=1, cache=cache_of(output)).logits
    assert_same_logits(torch.cat([output.logits, rest], 1), want)


def deep(layers: int) -> Species:
    """Two of three layers slide."""
    types = [FULL if index % 3 == 2 else SLIDING for index in range(layers)]
    return Species("deep", "Gemma3ForCausalLM", lambda window: zoo._gemma3_text(window, layer_types=types))


@pytest.mark.slow
def test_graphs_of_a_prefill_do_not_grow_with_layers_or_lengths(layout: str) -> None:
    """On a compact cache of the caller's, whose step begins outside of the graph."""
    frames = []
    for layers in (3, 12):
        torch._dynamo.reset()
        model = deep(layers).build(16)
        counter = CompileCounterWithBackend("eager")
        with swapatch.patch(model, layout=layout), torch.no_grad():
            call = torch.compile(model, backend=counter, dynamic=True)
            for length in (40, 17, 90, 150, 260, 33):
                ids = named_ids(model, 1, length)
                cache = swapatch.CompactCache(model, layout=layout)
                got = call(ids, **{cache_key(model): cache}).logits
                assert_same_logits(got, stock(model, ids))
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] <= 8


def test_generate_with_a_static_cache(model: Model, layout: str) -> None:
    """One graph for a step, whatever the position, across a roll; numbers in it would make another one each time."""
    ids = named_ids(model, 1, 40)
    want = greedy(model, ids, 100)
    config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    config._compile_all_devices = True
    with swapatch.patch(model, layout=layout):
        got = greedy(model, ids, 100, cache_implementation="static", compile_config=config)
        assert swapatch.status(model).calls.windowed == {"prefill": 1, "decode": 99}
    assert torch.equal(got.tokens, want.tokens)
    assert_same_logits(got.logits, want.logits)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert got.cache.get_seq_length() == 139


class Logits(nn.Module):
    """A model that takes tokens and gives logits, nothing else."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of transformers' own
@pytest.mark.parametrize("dynamic", (False, True), ids=("one length", "any length"))
@pytest.mark.parametrize("strict", (False, True), ids=("traced", "strict"))
def test_export(model: Model, strict: bool, dynamic: bool) -> None:
    ids = named_ids(model, 1, 90)
    shapes = ({1: torch.export.Dim("length", min=2, max=1024)},) if dynamic else None
    with swapatch.patch(model):
        program = torch.export.export(Logits(model), (ids,), dynamic_shapes=shapes, strict=strict)
        want = [stock(model, ids) for ids in (ids, named_ids(model, 1, 150))]
    assert "swapatch.window_attention" in str(program.graph)
    run = program.module()
    assert_same_logits(run(ids), want[0])
    if dynamic:
        assert_same_logits(run(named_ids(model, 1, 150)), want[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # it says of itself that it is experimental
@pytest.mark.skipif(OLD, reason="transformers has an exporter from 5.24 on, or another one")
def test_the_exporter_of_transformers(model: Model) -> None:
    exporters = pytest.importorskip("transformers.exporters.exporter_dynamo")
    ids = named_ids(model, 1, 90)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = stock(model, ids)
    with swapatch.patch(model):
        exported = exporters.DynamoExporter().export(model, inputs, config=exporters.DynamoConfig(dynamic=True))
    output = exported(**inputs)
    assert_same_logits(output[0] if isinstance(output, tuple) else output["logits"], want)
