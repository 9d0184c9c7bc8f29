"""Copies and files of a patched model, moves to another dtype, and what others build into a model, before the patch or
after it: LoRA, quantized linears, gradient checkpointing, torch.compile. The logits of every step are always stock's.
"""

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from compare import (
    TOL,
    Forced,
    assert_same_gradients,
    assert_same_logits,
    assert_unchanged,
    cache_key,
    cache_of,
    forced,
    greedy,
    snapshot,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from zoo import BY_NAME, FULL, SLIDING, Model, Species, named_ids, text_model

import swapatch

# PEFT asks for some attributes by names that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WINDOW, PROMPT, TOKENS = 16, 120, 140  # the buffers have 128 rows, or 64 in a ring: they roll or wrap on the way
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(params=("gemma3_text", "gemma4_ple_shared"))
def species(request: pytest.FixtureRequest) -> Species:
    return BY_NAME[request.param]


@torch.no_grad()
def stepped(call: Callable[..., Any], model: Model, ids: Tensor, prompt: int = PROMPT) -> Forced:
    """As `forced` of the model, through whatever is wrapped around it."""
    cache, logits = None, []
    for part in ids.split([prompt, *[1] * (ids.shape[1] - prompt)], dim=1):
        output = call(input_ids=part, use_cache=True, **({} if cache is None else {cache_key(model): cache}))
        cache = cache_of(output)
        logits.append(output.logits)
    return Forced(torch.cat(logits, dim=1), cache)


def stock_logits(model: Model, ids: Tensor) -> Tensor:
    run = forced(model, ids, prompt=PROMPT)
    assert not isinstance(run.cache, swapatch.CompactCache)
    return run.logits


def assert_compact(run: Forced, want: Tensor, tol: float = TOL) -> None:
    """These logits, from a compact cache."""
    assert isinstance(run.cache, swapatch.CompactCache)
    assert_same_logits(run.logits, want, tol=tol)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def loaded(data: bytes) -> Model:
    return torch.load(io.BytesIO(data), weights_only=False)


def assert_no_trace(model: nn.Module) -> None:
    """Nothing that can be reached from the model is ours: its pickle would name it. But it leaves methods out."""
    assert b"swapatch" not in saved(model)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            assert not getattr(value, "__module__", "").startswith("swapatch"), f"{name}.{key}"


# -- copies and files --


def test_a_loaded_model_is_patched_by_itself(species: Species, layout: str) -> None:
    """From `torch.save` of the whole model: it runs its own weights, and is undone without the original noticing."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want = stock_logits(model, ids)
    swapatch.patch(model, layout=layout)
    patched = snapshot(model)
    data = saved(model)
    assert b"swapatch" in data
    twin = copy.deepcopy(loaded(saved(loaded(data))))  # a loaded one can be saved and copied again
    assert swapatch.status(twin) == swapatch.status(model)
    assert_compact(forced(twin, ids, prompt=PROMPT), want)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    got = forced(twin, ids, prompt=PROMPT)
    assert difference(got.logits, want) > 0.1
    assert swapatch.unpatch(twin)
    assert_no_trace(twin)
    assert_compact(got, stock_logits(twin, ids))
    assert_unchanged(model, patched)
    assert swapatch.is_patched(model)


def test_save_pretrained_writes_the_same_files(species: Species, tmp_path: Path) -> None:
    """Byte for byte, the config too; what is loaded from them is stock."""
    model = species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want = stock_logits(model, ids)
    model.save_pretrained(tmp_path / "stock")
    swapatch.patch(model)
    forced(model, ids, prompt=PROMPT)
    model.save_pretrained(tmp_path / "patched")
    stock, patched = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("stock", "patched")
    )
    assert {"config.json", "model.safetensors"} <= stock.keys()
    assert patched == stock
    other = type(model).from_pretrained(tmp_path / "patched")
    assert not swapatch.is_patched(other)
    assert_no_trace(other)
    assert_same_logits(stock_logits(other, ids), want)


def test_state_dict(species: Species) -> None:
    """The same names and tensors; and other weights can be loaded into a patched model."""
    model, other = species.build(WINDOW), species.build(WINDOW, seed=1)
    ids = named_ids(model, 1, TOKENS)
    before = model.state_dict()
    swapatch.patch(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    forced(model, ids, prompt=PROMPT)
    model.load_state_dict(other.state_dict())
    assert_compact(forced(model, ids, prompt=PROMPT), stock_logits(other, ids))


MOVES: dict[str, Callable[[Model], Model]] = {
    "to a device": lambda model: model.to("cpu"),
    "to float64": lambda model: model.to(torch.float64),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("move", MOVES)
def test_moved_after_the_patch(species: Species, move: str) -> None:
    """The next cache has the new dtype. In 16 bits the error is at most 1.1 times that of stock, float32 the truth."""
    model, twin = species.build(WINDOW), species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    truth = stock_logits(twin, ids)
    handle = swapatch.patch(model)
    forced(model, ids, prompt=PROMPT)
    MOVES[move](model)
    want = stock_logits(MOVES[move](twin), ids)
    got = forced(model, ids, prompt=PROMPT)
    assert {layer.keys.dtype for layer in got.cache.sliding} == {model.dtype} == {twin.dtype}
    if model.dtype.itemsize > 2:
        assert_compact(got, want, tol=TOL if model.dtype == torch.float32 else 1e-10)
    else:
        assert root_mean_square(got.logits - truth) <= 1.1 * root_mean_square(want - truth)
    handle.undo()
    assert_no_trace(model)
    assert torch.equal(stock_logits(model, ids), want)


def root_mean_square(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


# -- what others build into a model --


def lora(model: Model) -> Any:
    """The model with an adapter on all its projections, random and far from neutral, the same at every call."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(PROJECTIONS), init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(model, config)


@pytest.mark.parametrize("first", ("lora", "patch"))
def test_lora(species: Species, first: str, layout: str) -> None:
    """Put on before or after the patch; switched off, merged and taken apart again under it."""
    model, twin = species.build(WINDOW), species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    base = stock_logits(twin, ids)
    other = lora(twin)
    want, tokens = stepped(other, twin, ids).logits, greedy(other, ids, 30).tokens
    assert difference(want, base) > 0.1
    if first == "lora":
        tuned = lora(model)
        swapatch.patch(tuned, layout=layout)
    else:
        swapatch.patch(model, layout=layout)
        tuned = lora(model)
    assert not swapatch.status(tuned).irregular
    assert_compact(stepped(tuned, model, ids), want)
    run = greedy(tuned, ids, 30)
    assert isinstance(run.cache, swapatch.CompactCache)
    assert torch.equal(run.tokens, tokens)
    with tuned.disable_adapter():
        assert_compact(stepped(tuned, model, ids), base)
    tuned.merge_adapter()
    assert_compact(stepped(tuned, model, ids), want)
    tuned.unmerge_adapter()
    assert_compact(stepped(tuned, model, ids), want)
    assert swapatch.unpatch(tuned)
    assert_no_trace(tuned)
    run = stepped(tuned, model, ids)
    assert not isinstance(run.cache, swapatch.CompactCache)
    assert_same_logits(run.logits, want)


def test_undo_with_lora_inside(species: Species) -> None:
    model = species.build(WINDOW)
    tuned = lora(model)
    ids = named_ids(model, 1, TOKENS)
    greedy(tuned, ids, 2)  # PEFT's own marks are made by now
    snap = snapshot(tuned)
    with swapatch.patch(tuned):
        greedy(tuned, ids, 2)
    assert_unchanged(tuned, snap)


def test_lora_comes_and_goes_under_the_patch(species: Species) -> None:
    """An adapter that is taken out again leaves the patch as it was; one that is merged for good stays patched."""
    model, twin = species.build(WINDOW), species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    base, want = stock_logits(model, ids), stepped(lora(twin), twin, ids).logits
    handle = swapatch.patch(model)
    plain = lora(model).unload()
    assert plain is model
    assert_compact(forced(model, ids, prompt=PROMPT), base)
    merged = lora(model).merge_and_unload()
    assert merged is model
    assert_compact(forced(model, ids, prompt=PROMPT), want)
    handle.undo()
    assert_no_trace(model)
    assert_same_logits(stock_logits(model, ids), want)


class Int8Linear(nn.Linear):
    """A linear with its weights in another form, as quantized ones have: a column of int8 and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8).view(-1, 1), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(self.out_features, self.in_features) * self.scale
        return nn.functional.linear(x, weight.to(x.dtype))


def quantize(model: Model) -> Model:
    for module in list(model.modules()):
        for name in PROJECTIONS:
            if type(getattr(module, name, None)) is nn.Linear:
                setattr(module, name, Int8Linear(getattr(module, name)))
    return model


@pytest.mark.parametrize("first", ("quantized", "patch"))
def test_quantized_linears(species: Species, first: str, layout: str) -> None:
    """Put in the place of the projections before or after the patch, where they stay when it is undone."""
    model, twin = species.build(WINDOW), species.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    base = stock_logits(twin, ids)
    want = stock_logits(quantize(twin), ids)
    assert difference(want, base) > 1e-3
    if first == "quantized":
        quantize(model)
    snap = snapshot(model)
    handle = swapatch.patch(model, layout=layout)
    if first == "patch":
        quantize(model)
    assert_compact(forced(model, ids, prompt=PROMPT), want)
    handle.undo()
    if first == "quantized":
        assert_unchanged(model, snap)
    assert_no_trace(model)
    assert torch.equal(stock_logits(model, ids), want)


@pytest.mark.parametrize("adapter", (False, True), ids=("whole", "lora"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("once", "reentrant"))
def test_gradient_checkpointing(species: Species, reentrant: bool, adapter: bool) -> None:
    """A training step between two answers: its gradients are stock's, the answers from compact caches."""
    model = species.build(WINDOW)
    tuned = lora(model) if adapter else model
    ids = named_ids(model, 1, TOKENS)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # renamed in 5.24
    enable({"use_reentrant": reentrant})
    calls: list[nn.Module] = []
    text_model(model).layers[0].self_attn.register_forward_pre_hook(lambda module, args: calls.append(module))

    def gradients() -> dict[str, Tensor]:
        tuned.train()
        tuned.zero_grad()
        calls.clear()
        tuned(input_ids=ids, labels=ids).loss.backward()
        assert len(calls) == 2  # forward, and again on the way back
        tuned.eval()
        return {name: p.grad.clone() for name, p in tuned.named_parameters() if p.grad is not None}

    tokens, want = greedy(tuned, ids, 10).tokens, gradients()
    assert any("k_proj" in name and grad.any() for name, grad in want.items())
    with swapatch.patch(tuned):
        before, got, after = greedy(tuned, ids, 10), gradients(), greedy(tuned, ids, 10)
    assert_same_gradients(got, want)
    for run in (before, after):
        assert isinstance(run.cache, swapatch.CompactCache)
        assert torch.equal(run.tokens, tokens)


# Few layers: torch.compile takes its time over each.
SHORT = {
    "gemma3": Species("gemma3", "Gemma3ForCausalLM", partial(zoo._gemma3_text, layer_types=[SLIDING, FULL])),
    "gemma4": Species(
        "gemma4",
        "Gemma4ForCausalLM",
        partial(
            zoo._gemma4_text,
            layer_types=[SLIDING, FULL, SLIDING],
            num_kv_shared_layers=1,
            hidden_size_per_layer_input=16,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order", "steps"),
    (
        ("gemma4", "compiled first", 1),
        ("gemma3", "patched first", 0),
        ("gemma3", "compiled in place", 0),
    ),
)
def test_compiled(name: str, order: str, steps: int) -> None:
    """Patched it runs patched, undone it runs stock, whatever came first; the graphs are run as they are."""
    torch._dynamo.reset()
    model = SHORT[name].build(WINDOW)
    prompt, counter = 127, CompileCounter()
    ids = named_ids(model, 1, prompt + steps)
    want = forced(model, ids, prompt=prompt).logits
    if order == "patched first":
        handle = swapatch.patch(model)
    if order == "compiled in place":
        model.compile(backend=counter)
        call = model
    else:
        call = torch.compile(model, backend=counter)
    if order == "compiled first":
        assert_same_logits(stepped(call, model, ids[:, :prompt], prompt).logits, want[:, :prompt])
    if order != "patched first":
        handle = swapatch.patch(call)  # the model itself, or what torch.compile has put around it
    graphs = counter.frame_count
    assert_compact(stepped(call, model, ids, prompt), want)
    assert counter.frame_count > graphs
    handle.undo()
    run = stepped(call, model, ids[:, :prompt], prompt)
    assert not isinstance(run.cache, swapatch.CompactCache)
    assert_same_logits(run.logits, want[:, :prompt])
    assert_no_trace(model)
