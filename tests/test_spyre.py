"""The Spyre path, against the operator's contract (CPU) and on a simulated device."""

from typing import Any

import pytest
import spyre as spyre_script
import torch
import transformers
import zoo
from compare import assert_same_logits, assert_sensitive, cache_key, forced, greedy, sliding_rows
from spyre_sim import device, graphs, operator, support
from torch import Tensor
from zoo import FULL, OLD, SLIDING, Species, named_ids, text_model

import swapatch
from swapatch.backends import spyre
from swapatch.geometry import doubled

NEW = 140  # more than two rolls
GEMMA3, GEMMA4 = "gemma3", "gemma4"
LOWEST = {GEMMA3: 0.999, GEMMA4: 0.998}


def with_heads_of_64(name: str, more: int = 0) -> Species:
    """Models with heads of 64, as the operator wants them, and scores of a usual size; with some layers ``more``."""
    if name == GEMMA3:
        options: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "hidden_size": 64}
        if more:
            options["layer_types"] = [SLIDING, SLIDING, FULL, SLIDING, *[SLIDING, FULL] * more]
        return Species(name, "Gemma3ForCausalLM", lambda window: zoo._gemma3_text(window, **options))
    make, options = zoo._gemma4_ple_shared, {"head_dim": 64, "global_head_dim": 64, "hidden_size": 64}
    if more:
        layers = [SLIDING, FULL] * more + [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
        options |= {"layer_types": layers, "num_key_value_heads": 1, "hidden_size_per_layer_input": 16}
        options |= {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        make = zoo._gemma4_text
    return Species(name, "Gemma4ForCausalLM", lambda window: make(window, **options), shared_kv=True, ple=True)


def build(name: str, window: int, more: int = 0) -> Any:
    model = with_heads_of_64(name, more).build(window, dtype=torch.bfloat16)
    with torch.no_grad():  # gentle attention: what is compared is the way of computing, not how chaos grows
        for norm, parameter in model.named_parameters():
            if norm.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(0.5)
    return model


def cosine(got: Tensor, want: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(got.float(), want.float(), dim=-1)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    operator.register()
    graphs.import_inductor()


@pytest.fixture
def card() -> None:
    device.load_or_skip()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The regions run eagerly, in float32 and with small heads."""
    monkeypatch.setattr(spyre, "_run", lambda region, *arguments: region(*arguments))
    monkeypatch.setattr(spyre, "check_dtype", lambda dtype: None)
    monkeypatch.setattr(spyre, "check_head_dim", lambda dim: None)
    with operator.unchecked("dtype", "head_dim_64"):
        yield


# -- the operator on CPU tensors, under real Inductor --


@pytest.mark.slow
@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
def test_forced_on_any_device(name: str) -> None:
    """`backend="spyre"`: a call for every sliding layer and step, prefill square and causal, decode over the buffer."""
    model = build(name, 64)
    ids = named_ids(model, 1, 100 + 70)
    want = forced(model, ids, prompt=100).logits
    with swapatch.patch(model, backend="spyre") as handle, operator.recorded() as calls:
        got = forced(model, ids, prompt=100)
    assert cosine(got.logits, want).min() >= LOWEST[name]
    layers = len(handle.plan.layers)
    assert len(calls) == layers * 71
    heads = {call.key[1] for call in calls}
    assert {(call.query[2], call.key[2], call.is_causal) for call in calls[:layers]} == {(256, 256, True)}
    # The buffers of sliding layers, and of global ones.
    sliding, whole = ([call for call in calls if call.window_size == size] for size in (64, 2**31 - 1))
    assert len(sliding) == len(handle.plan.sliding) * 71
    assert len(sliding) + len(whole) == len(calls)
    assert {(call.query[2], call.key[2]) for call in sliding} == {(256, 256), (1, 128)}
    assert {(call.query[2], call.key[2]) for call in whole} == {(256, 256), (1, 256)}
    assert len(heads) == 1  # keys are never repeated
    assert set(sliding_rows(got.cache)) == {128}


@pytest.mark.parametrize("lengths", ((5,), (1, 15, 90), (64, 3)), ids=str)
def test_padded_batches(lengths: tuple[int, ...]) -> None:
    model = build(GEMMA3, 64)
    inputs = with_heads_of_64(GEMMA3).inputs(model, lengths)
    ids = inputs.pop("input_ids")
    want = greedy(model, ids, 5, **inputs).logits
    with swapatch.patch(model, backend="spyre"):
        got = greedy(model, ids, 5, **inputs).logits
    assert cosine(got[:, 0], want[:, 0]).min() >= 0.999  # later steps follow their own tokens


def test_chunks_have_one_shape() -> None:
    """A second turn of any fill has all rows of the buffers before its own: one shape for a kind of layer."""
    model = build(GEMMA3, 64)
    ids = named_ids(model, 1, 30 + 4 * 20 + 3)
    want = forced(model, ids, prompt=30, chunks=[20] * 4).logits
    with swapatch.patch(model, backend="spyre"), operator.recorded() as calls:
        got = forced(model, ids, prompt=30, chunks=[20] * 4).logits
    assert cosine(got, want).min() >= 0.999
    shapes = [(call.query[2], call.key[2], call.is_causal) for call in calls]
    buffers = 128, 256
    assert set(shapes) == {
        (256, 256, True),
        *((256, rows + 256, False) for rows in buffers),
        (1, 128, False),
        (1, 256, False),
    }


def test_shared_layers_query_less() -> None:
    """Consumers whose queries were dropped but the last read all the producer's rows with a single query."""
    model = build(GEMMA4, 64)
    ids = named_ids(model, 1, 100)
    with swapatch.patch(model, backend="spyre") as handle, operator.recorded() as calls, torch.no_grad():
        output = model(ids, logits_to_keep=1, return_shared_kv_states=True)
    shared = sum(layer.shared for layer in handle.plan.layers)
    assert [call.query[2] for call in calls].count(1) in (0, shared)  # transformers before 5.20 drops none
    want = model(ids, return_shared_kv_states=True).shared_kv_states
    for kind in (SLIDING, FULL):
        for ours, theirs in zip(output.shared_kv_states[kind], want[kind], strict=True):
            assert ours.shape == theirs.shape
            assert cosine(ours, theirs).min() > 0.99


def test_vision_is_not_causal() -> None:
    base, model = zoo.BY_NAME["gemma3_vision"], vision_model()
    inputs = base.inputs(model, [70], images=[[(10, 20)]])
    with torch.no_grad():
        want = model(**inputs).logits
        with swapatch.patch(model, backend="spyre"), operator.recorded() as calls:
            got = model(**inputs).logits
    assert {call.is_causal for call in calls} == {False}
    assert cosine(got, want).min() > 0.98


# -- guards --


def test_contract_is_checked() -> None:
    mask = torch.zeros(1, 1, 64, 128, dtype=torch.bfloat16)
    call: dict[str, Any] = {"query": (1, 4, 64, 64), "key": (1, 2, 128, 64), "mask": mask, "causal": False}
    call |= {"dtype": torch.bfloat16, "keys": torch.bfloat16}
    spyre.check_contract(**call)
    broken: list[tuple[str, dict[str, Any]]] = [
        ("load it in bfloat16", {"dtype": torch.float32}),
        ("keys and values in torch.float16", {"keys": torch.float16}),
        ("2 sequences of keys", {"key": (2, 2, 128, 64)}),
        ("3 heads over 2", {"query": (1, 3, 64, 64)}),
        ("head_dim 64 of the keys", {"query": (1, 4, 64, 128)}),
        ("head_dim 32", {"query": (1, 4, 64, 32), "key": (1, 2, 128, 32)}),
        ("100 rows of keys", {"key": (1, 2, 100, 64)}),
        ("5 queries", {"query": (1, 4, 5, 64)}),
        ("192 queries for 128 keys", {"query": (1, 4, 192, 64)}),
        ("mask (1, 1, 64, 100)", {"mask": mask[..., :100]}),
        ("mask in torch.float32", {"mask": mask.float()}),
        ("as many of each", {"causal": True}),
    ]
    for message, change in broken:
        with pytest.raises(swapatch.SpyreContractError) as caught:
            spyre.check_contract(**(call | change))
        assert message in str(caught.value)


@pytest.mark.parametrize("past", (0, 70))
def test_prefill_is_guarded(past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first call and a later one are checked before anything is computed."""
    model = build(GEMMA4, 64)
    additive = spyre.additive
    with swapatch.patch(model, backend="spyre"), operator.recorded() as calls, torch.no_grad():
        cache = swapatch.CompactCache(model)
        if past:
            model(named_ids(model, 1, past), **{cache_key(model): cache})
        before = len(calls)
        monkeypatch.setattr(spyre, "additive", lambda *args: additive(*args)[..., :-1])
        with pytest.raises(swapatch.SpyreContractError, match=r"mask \(1, 1, 256, (255|383)\)"):
            model(named_ids(model, 1, 40), **{cache_key(model): cache})
    assert len(calls) == before


def test_heads_of_another_size_are_refused() -> None:
    model = zoo.BY_NAME["gemma3_text"].build(64, dtype=torch.bfloat16)
    with (
        swapatch.patch(model, backend="spyre"),
        operator.recorded() as calls,
        pytest.raises(swapatch.SpyreContractError, match=r"(?s)head_dim 16.*multiple of 64.*backend='reference'"),
    ):
        greedy(model, named_ids(model, 1, 5), 2)
    assert not calls


def test_float32_is_refused() -> None:
    model = with_heads_of_64(GEMMA3).build(64)
    with (
        swapatch.patch(model, backend="spyre"),
        pytest.raises(swapatch.SpyreContractError, match="load it in bfloat16"),
    ):
        greedy(model, named_ids(model, 1, 5), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("prepare", "found"), (("", "no operator"), ("operator.register_old()", "cache_seqlen")))
def test_missing_or_old_operator(prepare: str, found: str) -> None:
    code = f"""
import sys; sys.path.insert(0, "tests")
from spyre_sim import operator
{prepare}
import swapatch, zoo
model = zoo.BY_NAME["gemma3_text"].build(8)
try:
    swapatch.patch(model, backend="spyre")
except swapatch.SpyreContractError as error:
    print(error, swapatch.is_patched(model))
"""
    output = str(operator.run_python(code))
    assert found in output
    assert "False" in output


# -- the simulated device --


@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
@pytest.mark.parametrize("prompt", (5, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 100, 200, 1100))))
def test_teacher_forced_on_the_device(card: None, name: str, prompt: int) -> None:
    check_on_device(name, 64, prompt)


def test_real_window(card: None) -> None:
    """W=1024 over the real buffer of 1088 rows."""
    check_on_device(GEMMA3, 1024, 1100)


def check_on_device(name: str, window: int, prompt: int) -> None:
    model = build(name, window)
    ids = named_ids(model, 1, prompt + NEW)
    want = forced(model, ids, prompt=prompt).logits
    model.to("spyre")
    handle = swapatch.patch(model)
    path = [layer.self_attn for layer in text_model(model).layers]
    with (
        operator.recorded() as calls,
        graphs.watched() as seen,
        device.forbidden_in(path),
        device.strict_in(path),
        device.compiled_ops() as ops,
        device.counting() as counts,
    ):
        got = forced(model, ids.to("spyre"), prompt=prompt)
    assert not support.not_compilable(ops)
    assert {"index_copy", "sliding_window_attention", "rsqrt"} <= {support.plain(op.name) for op in ops}
    assert not counts.relayouts
    assert not counts.layout_copies
    logits = got.logits.cpu()
    assert logits.isfinite().all()
    assert cosine(logits, want)[:, prompt - 1 :].min() >= LOWEST[name]  # every step
    assert cosine(logits, want).quantile(0.01) >= LOWEST[name]  # and the prompt, but for a rounding that grew
    assert len(calls) == len(handle.plan.layers) * (1 + NEW)
    decode = {
        (call.query, call.key, call.is_causal) for call in calls if call.query[2] == 1 and call.window_size == window
    }
    assert len(decode) == 1, "every decode step has one shape"
    kinds = 1 + (name == GEMMA4)  # own keys, another layer's keys
    # On sliding and on global layers a prefill and a decode graph each, one more where a global buffer grows, and the
    # roll; fewer when an earlier test has compiled one.
    assert seen.graphs <= 2 * (2 * kinds) + kinds + 1
    for layer in got.cache.sliding:
        assert layer.key_rows.cpu().isfinite().all()


@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
def test_comparison_sees_a_window_one_off(name: str) -> None:
    model = build(name, 64)
    ids = named_ids(model, 1, 240)
    want = forced(model, ids, prompt=100).logits
    for other in (63, 65):
        got = forced(with_heads_of_64(name).with_window(model, other), ids, prompt=100).logits
        assert cosine(got, want).min() < LOWEST[name]


def test_transfers_do_not_grow_with_the_layers(card: None) -> None:
    uploads = []
    for layers in (2, 6):
        config = {"head_dim": 64, "query_pre_attn_scalar": 64, "layer_types": [FULL] + [SLIDING] * layers}
        model = Species("deep", "Gemma3ForCausalLM", lambda w, c=config: zoo._gemma3_text(w, **c)).build(
            64, dtype=torch.bfloat16
        )
        ids = named_ids(model, 1, 30).to("spyre")
        model.to("spyre")
        with swapatch.patch(model):
            cache = forced(model, ids[:, :20], prompt=20).cache
            with device.counting() as counts:
                forced(model, ids[:, 20:], prompt=1, cache=cache)
        uploads.append(counts.uploads)
    assert uploads[0] == uploads[1]


@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
def test_stock_generate_on_the_device(card: None, name: str) -> None:
    model = build(name, 64)
    ids = named_ids(model, 1, 30)
    want = greedy(model, ids, 8)
    model.to("spyre")
    with swapatch.patch(model), operator.recorded() as calls:
        got = greedy(model, ids.to("spyre"), 8)
    assert isinstance(got.cache, swapatch.CompactCache)
    assert calls
    assert cosine(got.logits[:, :1].cpu(), want.logits[:, :1]).min() > 0.99


def test_eager_backends_run_on_the_device(card: None) -> None:
    """Debugging on the card: `backend="reference"` computes over the same buffers."""
    model = build(GEMMA3, 64)
    ids = named_ids(model, 1, 90)
    want = forced(model, ids, prompt=80).logits
    model.to("spyre")
    with swapatch.patch(model, backend="reference"), operator.recorded() as calls:
        got = forced(model, ids.to("spyre"), prompt=80).logits.cpu()
    assert not calls
    assert cosine(got, want).min() > 0.99


def test_nothing_of_the_card_is_imported() -> None:
    import sys

    assert "torch_spyre" not in sys.modules
    assert cache_key(build(GEMMA3, 64)) in ("cache", "past_key_values")


# -- prompts of any length --


@pytest.mark.parametrize("fixed", (False, True), ids=("grows", "fixed"))
@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
def test_one_token_prompts(name: str, fixed: bool) -> None:
    """Forward and decode after it, one sequence and a batch."""
    model = build(name, 64)
    for batch in (1, 3):
        ids = named_ids(model, batch, 9)
        want = forced(model, ids, prompt=1).logits
        with swapatch.patch(model, backend="spyre"):
            cache = swapatch.CompactCache(model, max_cache_len=70 if fixed else None)
            got = forced(model, ids, prompt=1, cache=cache).logits
            tokens = model.generate(ids[:, :1], max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert cosine(got, want).min() >= LOWEST[name]
        assert tokens.shape == (batch, 4)


@pytest.mark.parametrize("fixed", (False, True), ids=("grows", "fixed"))
def test_chunks_of_any_size(fixed: bool) -> None:
    """Of one token too, on a vision model as well; images in them; over a window and behind it."""
    for model, inputs in ((build(GEMMA3, 64), {}), (vision_model(), {"token_types": vision_types()})):
        ids = named_ids(model, 2, 200)
        chunks = [64, 1, 30, 5]
        want = by_stock(model, ids, prompt=64, chunks=chunks, **inputs).logits
        with swapatch.patch(model, backend="spyre"):
            cache = swapatch.CompactCache(model, max_cache_len=200 if fixed else None)
            got = forced(model, ids, prompt=64, chunks=chunks, cache=cache, **inputs).logits
        assert cosine(got, want).median() >= 0.999
        assert cosine(got, want).min() >= 0.98


def by_stock(model: Any, ids: Tensor, **options: Any) -> Any:
    """Skips where an older transformers cannot take a chunk with images behind a full window."""
    try:
        return forced(model, ids, **options)
    except RuntimeError as error:
        if OLD and "token_types" in options:
            pytest.skip(f"transformers {transformers.__version__} cannot do this: {error!r:.100}")
        raise


def vision_model() -> Any:
    base = zoo.BY_NAME["gemma3_vision"]

    def make(window: int) -> Any:
        made = base.make_config(window)
        for key, value in {"head_dim": 64, "query_pre_attn_scalar": 64}.items():
            setattr(made.text_config, key, value)
        return made

    made = Species("vision", base.architecture, make, vision=True, bidirectional=True)
    return made.build(64, dtype=torch.bfloat16)


def vision_types() -> Tensor:
    types = torch.zeros(2, 200, dtype=torch.long)
    types[0, 20:40] = types[1, 50:60] = 1
    return types


def test_a_chunk_that_leaves_one_token() -> None:
    model = vision_model()
    ids = named_ids(model, 1, 129)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "prefill_chunk_size": 64,
        "token_type_ids": torch.zeros_like(ids),
    }
    want = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    with swapatch.patch(model, backend="spyre"), operator.recorded() as calls:
        got = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    assert calls
    assert cosine(got.logits[0], want.logits[0]).min() >= 0.99


def test_few_sizes() -> None:
    """6 for all prompts up to 8,192 tokens, none with twice as many rows as it needs."""
    rows = [doubled(tokens) for tokens in range(1, 8193)]
    assert sorted(set(rows)) == [256 * 2**power for power in range(6)]
    assert all(tokens <= found and (found == 256 or found < 2 * tokens) for tokens, found in enumerate(rows, 1))


@pytest.mark.parametrize("made", ("by the forward", "fixed"))
def test_a_long_lived_process_compiles_few_graphs(made: str) -> None:
    """Two for each size of a prompt, whatever torch's own limit: one on sliding layers, one on global ones."""
    model = build(GEMMA3, 64)
    torch._dynamo.reset()
    with (
        swapatch.patch(model, backend="spyre"),
        torch._dynamo.config.patch(recompile_limit=1),
        graphs.watched() as seen,
        torch.no_grad(),
    ):
        for tokens in range(1, 1025, 31):
            cache = swapatch.CompactCache(model, max_cache_len=1024) if made == "fixed" else None
            model(named_ids(model, 1, tokens), **{cache_key(model): cache})
    assert seen.graphs == 2 * 3


def test_a_higher_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(spyre, "_compiled", lambda region: lambda: found.append(torch._dynamo.config.recompile_limit))
    for configured in (8, 5000):
        with torch._dynamo.config.patch(recompile_limit=configured):
            spyre._run(spyre._shift)
    assert found == [1024, 5000]


# -- a whole decoder --


def test_eager_copies_are_few(card: None) -> None:
    """64 prompts of 130 to 193 tokens and 500 steps with rolls: what is copied on the card is not new each time."""
    model = build(GEMMA3, 64).to("spyre")
    long = named_ids(model, 1, 700).to("spyre")
    with swapatch.patch(model), torch.no_grad(), device.counting() as counts:
        for tokens in range(130, 194):
            cache = swapatch.CompactCache(model, max_cache_len=700)
            model(long[:, :tokens], **{cache_key(model): cache}, logits_to_keep=1)
        for position in range(193, 693):
            model(long[:, position, None], **{cache_key(model): cache})
    copies = {binary for binary in counts.eager_binaries if "copy" in binary.op}
    assert len(copies) <= 10, copies
    assert not counts.relayouts
    assert not counts.layout_copies


@pytest.mark.parametrize("name", (GEMMA3, GEMMA4))
def test_whole_decoder(card: None, name: str) -> None:
    """By the script's own preparation: the same graphs and transfers for more layers, no relayout, stock's logits.

    And nothing that a card does not do eagerly, in all of the text model.
    """
    found = []
    for more in (0, 1):
        torch._dynamo.reset()
        model = build(name, 64, more)
        ids = named_ids(model, 1, 100)
        want = forced(model, ids, prompt=100).logits[:, -1]
        handle = spyre_script.prepare(model)
        with spyre_script.counted(True) as first:
            tokens = spyre_script.generate(model, ids.to("spyre"), 70)
        with spyre_script.counted(True) as again, device.strict_in([model.get_decoder()]):
            assert spyre_script.generate(model, ids.to("spyre"), 70).cpu().equal(tokens.cpu())
        assert first["relayouts"] == again["relayouts"] == again["copies between layouts"] == again["graphs"] == 0
        with torch.no_grad():
            got = model(ids.to("spyre"), logits_to_keep=1).logits[:, -1].cpu()
        assert cosine(got, want).min() > 0.99
        assert swapatch.status(model).calls.stock == {}
        own = sum(not layer.shared for layer in handle.plan.layers)
        found.append((first["graphs"], again["transfers"] - 2 * own))  # two buffers of zeros for a layer, once
        handle.undo()
    assert found[0] == found[1]


def test_cache_of_generate_has_its_size_from_the_start(card: None) -> None:
    model = build(GEMMA3, 64).to("spyre")
    with swapatch.patch(model):
        cache = greedy(model, named_ids(model, 1, 30).to("spyre"), 8).cache
    assert isinstance(cache, swapatch.CompactCache)
    assert [layer.is_sliding for layer in cache.layers] == [True, True, False, True]
    assert {layer.rows for layer in cache.layers} == {128, 256}
    assert cache.get_seq_length() == 37


def test_more_tokens_than_there_is_room_for() -> None:
    model = build(GEMMA3, 64)
    with swapatch.patch(model, backend="spyre"):
        cache = swapatch.CompactCache(model, max_cache_len=70)
        forced(model, named_ids(model, 1, 69), prompt=60, cache=cache)
        with pytest.raises(swapatch.CacheStateError, match="2 tokens behind 69 in a cache for 70"), torch.no_grad():
            model(named_ids(model, 1, 2), **{cache_key(model): cache})
        assert {layer.seen for layer in cache.layers} == {69}


def test_a_model_that_an_adapter_has_prepared_is_refused() -> None:
    model = build(GEMMA3, 64)
    model._spyre_compiled_blocks = []
    with pytest.raises(swapatch.UnsupportedModelError, match=r"(?s)_spyre_compiled_blocks.*prepared for Spyre already"):
        swapatch.patch(model)
    assert not swapatch.is_patched(model)


def test_rotation_is_exact() -> None:
    """A product with a signed permutation is what slicing and joining the halves is."""
    from transformers.models.gemma3.modeling_gemma3 import rotate_half

    states = torch.randn(2, 3, 5, 64).bfloat16()
    assert torch.equal(states @ spyre.quarter_turn(64, torch.bfloat16, states.device), rotate_half(states))


# -- every family --


@pytest.mark.parametrize("fixed", (False, True), ids=("grows", "fixed"))
def test_every_family_on_spyre(exact: None, species: Species, layout: str, fixed: bool) -> None:
    """In float32 and with small heads, which a card has not: then it can be told from a window one off."""
    window = 16
    model = species.build(window)
    ids = named_ids(model, 2, 150)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
    given["attention_mask"][0, :9] = 0
    if species.vision:
        given["token_types"] = zoo.token_types((100, 100), ([(30, 45)], [(5, 9)]))
    spans: dict[str, Any] = {"prompt": 100, "chunks": [1, 20, 5]}
    assert_sensitive(species, window, prompt=100, steps=50)
    want = by_stock(model, ids, **spans, **given)
    with swapatch.patch(model, layout=layout, backend="spyre") as handle:
        cache = swapatch.CompactCache(model, max_cache_len=160 if fixed else None, layout=layout)
        with operator.recorded() as calls:
            got = forced(model, ids, **spans, cache=cache, **given)
        status = swapatch.status(model).calls
    assert_same_logits(got.logits, want.logits, given["attention_mask"])
    assert not status.stock
    assert len(calls) == len(handle.plan.layers) * sum(status.windowed.values())


def test_images_without_padding(exact: None, species: Species) -> None:
    """Where transformers leaves out the mask of global layers."""
    if not species.vision:
        species = zoo.BY_NAME["gemma4_vision"]
    model = species.build(16)
    inputs = species.inputs(model, [60], images=[[(10, 9)]])
    with torch.no_grad():
        want = model(**inputs).logits
        with swapatch.patch(model, backend="spyre"):
            assert_same_logits(model(**inputs).logits, want)


def test_turns_on_one_cache(exact: None) -> None:
    """Longer than the first call of generate asked for."""
    model = zoo.BY_NAME["gemma3_text"].build(16)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True}

    def turns() -> Tensor:
        first = model.generate(named_ids(model, 1, 20), **options)
        longer = torch.cat([first.sequences, named_ids(model, 1, 300)], dim=1)
        return model.generate(longer, **{cache_key(model): getattr(first, cache_key(model), None)}, **options).sequences

    want = turns()
    with swapatch.patch(model, backend="spyre"):
        assert torch.equal(turns(), want)


@pytest.mark.parametrize("keep", (1, 7, 100, 150, 256, 300))
def test_logits_to_keep(exact: None, keep: int) -> None:
    model = zoo.BY_NAME["gemma4_ple_shared"].build(16)
    ids = named_ids(model, 2, 100)
    with torch.no_grad():
        want = model(ids, logits_to_keep=keep).logits
        with swapatch.patch(model, backend="spyre"):
            assert_same_logits(model(ids, logits_to_keep=keep).logits, want)


def test_embeddings_in_the_place_of_tokens(exact: None) -> None:
    """Gemma 4 looks tokens up by their embeddings: also those of the rows in front."""
    model = zoo.BY_NAME["gemma4_ple_shared"].build(16)
    embeddings = model.get_input_embeddings()(named_ids(model, 1, 50))
    with torch.no_grad():
        want = model(inputs_embeds=embeddings).logits
        with swapatch.patch(model, backend="spyre"):
            assert_same_logits(model(inputs_embeds=embeddings).logits, want)


def test_routers_show_the_tokens_alone(exact: None) -> None:
    model = zoo.BY_NAME["gemma4_moe"].build(16)
    ids = named_ids(model, 2, 60)
    with torch.no_grad():
        want = model(ids, output_router_logits=True, output_hidden_states=True)
        with swapatch.patch(model, backend="spyre"):
            got = model(ids, output_router_logits=True, output_hidden_states=True)
    names = ["hidden_states", *(["router_logits"] if not OLD or hasattr(want, "router_logits") else [])]
    for name in names:
        for ours, theirs in zip(getattr(got, name), getattr(want, name), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_reader_within_a_forward(exact: None, layout: str) -> None:
    """What it was lent is put back before the layer writes."""
    model = zoo.BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 60)
    want = forced(model, ids, prompt=30).logits
    with swapatch.patch(model, layout=layout, backend="spyre"):
        cache = swapatch.CompactCache(model, layout=layout)
        read: list[Any] = []
        first = text_model(model).layers[0]
        hook = first.register_forward_pre_hook(lambda module, args: read.extend(layer.keys for layer in cache.layers))
        got = forced(model, ids, prompt=30, cache=cache).logits
        hook.remove()
    assert_same_logits(got, want)


def softer(module: Any, args: Any, output: Any = None) -> Any:
    return torch.tanh(args[0] if output is None else output)


@pytest.mark.parametrize("where", ("q_norm", "k_norm", "q_proj", "o_proj"))
def test_somebody_within_the_region(exact: None, where: str) -> None:
    """A hook below the attention counts: by stock's way."""
    model = zoo.BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 40)
    with swapatch.patch(model, backend="spyre"):
        hook = getattr(text_model(model).layers[1].self_attn, where).register_forward_hook(softer)
        got = forced(model, ids, prompt=30).logits
        assert list(swapatch.status(model).calls.stock) == [f"somebody's own {where} in layer 1, or a hook on it"]
    want = forced(model, ids, prompt=30).logits
    hook.remove()
    assert_same_logits(got, want)


def test_replaced_kernel_and_rotation(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import functional
    from transformers.models.gemma3 import modeling_gemma3

    model = zoo.BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 40)
    for owner, name in ((functional, "scaled_dot_product_attention"), (modeling_gemma3, "apply_rotary_pos_emb")):
        stock = getattr(owner, name)

        def other(query: Tensor, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            return stock(torch.tanh(query), *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            want = forced(model, ids, prompt=30).logits
            with swapatch.patch(model, backend="spyre"):
                assert_same_logits(forced(model, ids, prompt=30).logits, want)


def test_sequences_that_are_picked_keep_their_layout(card: None) -> None:
    model = build(GEMMA3, 64).to("spyre")
    ids = named_ids(model, 2, 40).to("spyre")
    with swapatch.patch(model), torch.no_grad():
        cache = swapatch.CompactCache(model)
        model(ids[:, :30], **{cache_key(model): cache})
        cache.reorder_cache(torch.tensor([1, 0]))
        with device.counting() as counts:
            model(ids[:, 30, None], **{cache_key(model): cache})
    assert not counts.relayouts
    assert not counts.layout_copies


def test_rows_of_a_global_layer_that_are_replaced(exact: None) -> None:
    """Another number of them: from then on the layer is transformers' own."""
    model = zoo.BY_NAME["gemma3_text"].build(16)
    ids = named_ids(model, 1, 110)

    def evicted() -> Tensor:
        with torch.no_grad():
            cache = model(ids[:, :100], use_cache=True)[cache_key(model)]
            layer = next(layer for layer in cache.layers if not layer.is_sliding)
            layer.keys, layer.values = layer.keys[:, :, 5:], layer.values[:, :, 5:]
            return model(ids[:, 100:101], **{cache_key(model): cache}).logits

    want = evicted()
    with swapatch.patch(model, backend="spyre"):
        assert_same_logits(evicted(), want)
