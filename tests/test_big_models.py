"""Models that accelerate offloads or spreads over devices: the logits of every step are stock's, and undo is exact."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import accelerate
import pytest
import torch
import zoo
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from compare import (
    Snapshot,
    assert_same_logits,
    assert_sensitive,
    assert_unchanged,
    forced,
    greedy,
    layer_tensors,
    snapshot,
)
from spyre_sim import device as simulated
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import cache_utils
from zoo import BY_NAME, Model, Species, named_ids, text_model, token_types

import swapatch
from swapatch.attention import KERNELS, windowed
from swapatch.backends import spyre

WINDOW = 16
PROMPT, TOKENS = 110, 140  # the buffers have 128 rows: they roll on the way
CPU = torch.device("cpu")

Offload = Callable[[Model, Path], Model]


def cpu_offload(model: Model, folder: Path) -> Model:
    accelerate.cpu_offload(model, CPU)
    return model


def disk_offload(model: Model, folder: Path) -> Model:
    accelerate.disk_offload(model, folder, CPU)
    return model


def dispatch(model: Model, folder: Path) -> Model:
    skipped = model._skip_keys_device_placement
    accelerate.dispatch_model(model, device_map(model), offload_dir=folder, skip_keys=skipped)
    return model


def from_pretrained(model: Model, folder: Path) -> Model:
    """Not the same model: one that is loaded with a device map."""
    model.save_pretrained(folder / "saved")
    return type(model).from_pretrained(
        folder / "saved", dtype=model.dtype, device_map=device_map(model), offload_folder=folder / "offloaded"
    )


OFFLOADS: dict[str, Offload] = {
    "cpu": cpu_offload,
    "disk": disk_offload,
    "dispatched": dispatch,
    "loaded": from_pretrained,
}


def device_map(model: Model) -> dict[str, str]:
    """Every other decoder layer on the disk, all else on the CPU."""
    layers = list(text_model(model).layers)
    return {name: "disk" if module in layers[1::2] else "cpu" for name, module in blocks(model, layers)}


def blocks(module: nn.Module, layers: list[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All of a model in few pieces, none of which holds more than one decoder layer."""
    if module in layers or not set(layers) & set(module.modules()):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from blocks(child, layers, f"{name}.{child_name}".lstrip("."))


def skip_if_shared_keys_stay(species: Species) -> None:
    """Stock code fails then too, where accelerate's hooks are told to move everything, or layers are apart."""
    if species.shared_kv and not hasattr(cache_utils, "KVSharingDict"):
        pytest.skip("transformers before 5.23 does not move the keys that Gemma 4's layers share")


def assert_undone(model: Model, snap: Snapshot) -> None:
    """As `assert_unchanged`, but for the parameters: accelerate makes new ones in every forward."""
    now = snapshot(model).slots
    snap.slots |= {owner: now[owner] for owner in snap.slots if owner.endswith("._parameters")}
    assert_unchanged(model, snap)


def test_comparison_can_fail(model_kind: Species) -> None:
    assert_sensitive(model_kind, WINDOW, prompt=PROMPT, steps=TOKENS - PROMPT)


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # before 5.17: the model's device is meta, it says
@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_offloaded(model_kind: Species, offload: Offload, tmp_path: Path) -> None:
    """By forwards and by `generate`; the weights are elsewhere before and after each."""
    if offload in (cpu_offload, disk_offload):
        skip_if_shared_keys_stay(model_kind)
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want, tokens = forced(model, ids, prompt=PROMPT).logits, greedy(model, ids[:, :PROMPT], 20).tokens
    model = offload(model, tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    snap = snapshot(model)
    swapatch.patch(model).undo()
    assert_unchanged(model, snap)
    with swapatch.patch(model):
        got, made = forced(model, ids, prompt=PROMPT), greedy(model, ids[:, :PROMPT], 20)
        assert any(parameter.is_meta for parameter in model.parameters())
    assert isinstance(got.cache, swapatch.CompactCache)
    assert isinstance(made.cache, swapatch.CompactCache)
    assert_same_logits(got.logits, want)
    assert torch.equal(made.tokens, tokens)
    assert_undone(model, snap)


def test_offloaded_once_it_is_patched(model_kind: Species, tmp_path: Path) -> None:
    """Undo finds what accelerate's hooks have moved, and leaves them in place."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want = forced(model, ids, prompt=PROMPT).logits
    handle = swapatch.patch(model)
    dispatch(model, tmp_path)
    got = forced(model, ids, prompt=PROMPT)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert_same_logits(got.logits, want)
    handle.undo()
    assert_same_logits(forced(model, ids, prompt=PROMPT).logits, want)
    remove_hook_from_submodules(model)
    assert_stock(model)
    assert_same_logits(forced(model, ids, prompt=PROMPT).logits, want)


def test_brought_back_while_it_is_patched(model_kind: Species, tmp_path: Path) -> None:
    """accelerate moves the forward that lay under its hook: the patch goes on, and undo finds it."""
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 1, TOKENS)
    want = forced(model, ids, prompt=PROMPT).logits
    dispatch(model, tmp_path)
    handle = swapatch.patch(model)
    remove_hook_from_submodules(model)
    assert not swapatch.status(model).irregular
    got = forced(model, ids, prompt=PROMPT)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert_same_logits(got.logits, want)
    handle.undo()
    assert_stock(model)
    assert not isinstance(forced(model, ids, prompt=PROMPT).cache, swapatch.CompactCache)
    swapatch.patch(model).undo()


def assert_stock(model: Model) -> None:
    """No module runs another forward than its class's, and nothing of accelerate's or ours is left."""
    assert not swapatch.is_patched(model)
    for module in model.modules():
        slots = vars(module)
        assert not {"_hf_hook", "_old_forward"} & slots.keys()
        assert not {**slots["_forward_pre_hooks"], **slots["_forward_hooks"]}
        forward = slots.get("forward")
        assert forward is None or forward.__func__ is type(module).forward


# -- layers on different devices --


@pytest.mark.parametrize("card_first", (False, True), ids=("CPU first", "card first"))
@pytest.mark.parametrize("fixed", (False, True), ids=("dynamic", "fixed"))
def test_layers_on_two_devices(
    model_kind: Species, layout: str, fixed: bool, card_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoder layers by turns on the CPU and on the simulated card: buffers, masks and rows go with each one's keys."""
    skip_if_shared_keys_stay(model_kind)
    simulated.load_or_skip()
    model = model_kind.build(WINDOW)
    ids = named_ids(model, 2, TOKENS)
    given = {"attention_mask": torch.ones_like(ids)}
    given["attention_mask"][0, :20] = 0
    if model_kind.vision:
        given["token_types"] = token_types((PROMPT, PROMPT), ([(30, 45)], [(5, 9)]))
    want = forced(model, ids, prompt=PROMPT, **given).logits
    devices = spread(model, card_first)
    snap = snapshot(model)
    monkeypatch.setitem(KERNELS, "windowed", on_one_device)
    with swapatch.patch(model, layout=layout):
        cache = swapatch.CompactCache(model, max_cache_len=TOKENS if fixed else None, layout=layout)
        got = forced(model, ids, prompt=PROMPT, cache=cache, **given)
    assert_same_logits(got.logits, want, given["attention_mask"])
    assert {layer.key_rows.device.type for layer in cache.sliding} == {"cpu", "spyre"}
    for layer, there in zip(cache.layers, devices, strict=False):
        assert {tensor.device.type for tensor in layer_tensors(layer)} <= {there.type}
    assert_unchanged(model, snap)


def on_one_device(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Ours, but stricter: the simulated card lets some operations mix its tensors with the CPU's."""
    assert len({tensor.device for tensor in (query, key, value, mask) if tensor is not None}) == 1
    return windowed.attend(query, key, value, mask, causal, scale)


def spread(model: Model, card_first: bool) -> list[torch.device]:
    """Every other layer to the card, with hooks that bring its inputs along; gives the device of each."""
    text = text_model(model)
    devices = [torch.device("spyre") if index % 2 != card_first else CPU for index in range(len(text.layers))]
    for module, there in [*zip(text.layers, devices, strict=True), (text.norm, CPU)]:
        module.to(there)
        add_hook_to_module(module, AlignDevicesHook(there, skip_keys=model._skip_keys_device_placement))
    return devices


@pytest.mark.parametrize("card_first", (False, True), ids=("CPU first", "card first"))
def test_spyre_layers_on_two_devices(card_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's rows and masks as well; its compiled regions run eagerly here: what counts is where."""

    def attend(
        attention: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        window: int,
        causal: bool,
        lead: int,
    ) -> Tensor:
        out = on_one_device(query, keys, values, mask, False, attention.scaling)
        return attention.o_proj(out[:, :, lead:].transpose(1, 2).flatten(2))

    skip_if_shared_keys_stay(BY_NAME["gemma4_ple_shared"])
    simulated.load_or_skip()
    monkeypatch.setattr(spyre, "_run", lambda region, *arguments: region(*arguments))
    monkeypatch.setattr(spyre, "_attend", attend)
    options = {"head_dim": 64, "global_head_dim": 64, "hidden_size": 64}
    species = replace(
        BY_NAME["gemma4_ple_shared"], make_config=lambda window: zoo._gemma4_ple_shared(window, **options)
    )
    model = species.build(WINDOW, dtype=torch.bfloat16)
    ids = named_ids(model, 1, TOKENS)
    want = forced(model, ids, prompt=20, chunks=[PROMPT - 20]).logits
    spread(model, card_first)
    with swapatch.patch(model, backend="spyre"):
        got = forced(model, ids, prompt=20, chunks=[PROMPT - 20])
    assert {layer.key_rows.device.type for layer in got.cache.sliding} == {"cpu", "spyre"}
    assert cosine_similarity(got.logits.float(), want.float(), dim=-1).min() > 0.99


def test_buffers_follow_the_keys(model_kind: Species, layout: str) -> None:
    """Each layer's: through growing, rolling, cropping and reordering, whatever device the other layers are on."""
    cache = swapatch.CompactCache(model_kind.make_config(WINDOW), layout=layout)
    cache.activate_past_recording()
    devices = {index: torch.device(("meta", "cpu")[index % 2]) for index in cache.plan.owners}
    assert len(set(devices.values())) == 2
    for tokens in (1, 40, 100, 1):
        for index, there in devices.items():
            keys, values = cache.update(*torch.ones(2, 2, 1, tokens, 8, device=there), index)
            assert keys.device == values.device == there
    for index, there in devices.items():
        layer = cache.layers[index]
        layer.crop(-60)
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([0, 3], device=there))
        assert layer.key_rows.device == layer.value_rows.device == there
