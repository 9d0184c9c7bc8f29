"""The stand-in for torch-spyre does what it says: the operator's contract, the device, compiled code on it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from spyre_sim import device, graphs, operator
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, linear, scaled_dot_product_attention

WINDOW = 64
HEADS, KV_HEADS, DIM = 4, 2, 64

Arguments = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _operator() -> None:
    operator.register()
    graphs.import_inductor()


@pytest.fixture(scope="module")
def spyre() -> torch.device:
    device.load_or_skip()
    return torch.device("spyre")


def attention(arguments: Arguments) -> Tensor:
    result: Tensor = torch.ops.spyre.sliding_window_attention(**arguments)
    return result


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def additive(allowed: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.where(allowed, 0.0, operator.FILL).to(dtype)


def band(length: int, window: int = WINDOW) -> Tensor:
    rows = torch.arange(length)
    distance = rows[:, None] - rows
    return (distance >= 0) & (distance < window)


def square(length: int = 256, *, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    """A prefill, with everything right."""
    return {
        "query": random(batch, HEADS, length, DIM, seed=1, dtype=dtype),
        "key": random(batch, KV_HEADS, length, DIM, seed=2, dtype=dtype),
        "value": random(batch, KV_HEADS, length, DIM, seed=3, dtype=dtype),
        "attention_mask": additive(band(length), dtype).expand(batch, 1, length, length).contiguous(),
        "window_size": WINDOW,
        "is_causal": True,
        "scale": 0.3,
    }


def decode(rows: int = 128, *, last: int = 100) -> Arguments:
    """A decode step whose newest key lies in row `last`, with everything right."""
    row = torch.arange(rows)
    allowed = (row <= last) & (row > last - WINDOW)
    queries = {"query": random(1, HEADS, 1, DIM, seed=1), "attention_mask": additive(allowed).view(1, 1, 1, rows)}
    return square(rows) | queries | {"is_causal": False}


def expected(arguments: Arguments) -> Tensor:
    """In float32, from the mask alone."""
    query, key, value = (arguments[name].float() for name in ("query", "key", "value"))
    allowed = arguments["attention_mask"] == 0
    return scaled_dot_product_attention(query, key, value, allowed, scale=arguments["scale"], enable_gqa=True)


# -- the operator on the CPU --


def test_computes_windowed_attention() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for arguments in (square(dtype=dtype), square(128, batch=2, dtype=dtype)):
            result = attention(arguments)
            assert result.dtype == dtype
            torch.testing.assert_close(result.float(), expected(arguments), atol=0.02, rtol=0.02)
    torch.testing.assert_close(attention(decode()).float(), expected(decode()), atol=0.02, rtol=0.02)


def test_scale_defaults_to_the_root_of_the_head_size() -> None:
    arguments = decode()
    default = attention(arguments | {"scale": None})
    assert default.equal(attention(arguments | {"scale": 1 / math.sqrt(DIM)}))
    assert not default.equal(attention(arguments))


def test_any_order_of_rows_is_legal_when_not_causal() -> None:
    arguments = decode()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    shuffled = {name: arguments[name][:, :, order] for name in ("key", "value")}
    shuffled["attention_mask"] = arguments["attention_mask"][..., order]
    torch.testing.assert_close(attention(arguments | shuffled), attention(arguments), atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("row", "key"), ((255, 10), (10, 255)), ids=("too old", "future"))
def test_a_broken_promise_gives_wrong_numbers(row: int, key: int) -> None:
    arguments = square()
    arguments["attention_mask"][..., row, key] = 0
    with pytest.raises(operator.ContractError, match="promise"):
        attention(arguments)
    with operator.unchecked("promise"):
        wrong = attention(arguments)
        right = attention(arguments | {"is_causal": False})
    torch.testing.assert_close(right.float(), expected(arguments), atol=0.02, rtol=0.02)
    assert (wrong - right)[..., row, :].abs().max() > 0.1


def test_reads_no_more_than_each_window() -> None:
    """For 1024 keys back, 1088 rows for each block of 64 queries."""
    widths = [keys.stop - keys.start for _, keys in operator.reads(2048, 2048, 1024, True)]
    assert widths[:3] == [64, 128, 192]
    assert set(widths[16:]) == {1088}
    assert operator.reads(64, 2048, 1024, True) == [(slice(0, 64), slice(0, 2048))]


def test_a_masked_row_is_finite() -> None:
    arguments = square()
    arguments["attention_mask"][..., 7, :] = operator.FILL
    assert attention(arguments).isfinite().all()


def test_records_calls_that_ran() -> None:
    with operator.recorded() as calls, operator.recorded() as inner:
        attention(decode())
        attention({name: value.to("meta") if isinstance(value, Tensor) else value for name, value in decode().items()})
    shapes = {"query": (1, HEADS, 1, DIM), "key": (1, KV_HEADS, 128, DIM)}
    assert calls == [operator.Call("cpu", torch.bfloat16, **shapes, window_size=64, is_causal=False, scale=0.3)]
    assert inner == calls
    attention(decode())
    assert len(calls) == 1


def poisoned(value: float) -> Tensor:
    key = random(1, KV_HEADS, 128, DIM)
    key[0, 1, 3, 5] = value  # a row that the mask of `decode` hides
    return key


def rows(count: int, dim: int = DIM, *, batch: int = 1) -> Arguments:
    """Keys and values of another size."""
    return {name: random(batch, KV_HEADS, count, dim) for name in ("key", "value")}


def open_mask(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    return {"attention_mask": torch.zeros(shape, dtype=dtype)}


# Each breaks one rule, and the earlier ones of `operator.RULES` hold.
BROKEN: list[tuple[str, Arguments]] = [
    ("rank", decode() | open_mask(1, 1, 128)),
    ("device", decode() | {"attention_mask": torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16, device="meta")}),
    ("dtype", square(dtype=torch.float32)),
    ("equal_dtype", decode() | {"value": random(1, KV_HEADS, 128, DIM, dtype=torch.float16)}),
    ("key_value", decode() | {"value": random(1, KV_HEADS, 64, DIM)}),
    ("batch", decode() | rows(128, batch=2)),
    ("heads", decode() | {"query": random(1, 3, 1, DIM)}),
    ("head_dim", decode() | {"query": random(1, HEADS, 1, 128)}),
    ("head_dim_64", decode() | {"query": random(1, HEADS, 1, 16)} | rows(128, 16)),
    ("lengths", decode() | {"query": random(1, HEADS, 192, DIM)}),
    ("query_rows", decode() | {"query": random(1, HEADS, 20, DIM)}),
    ("key_rows", decode() | rows(100)),
    ("mask_shape", decode() | open_mask(1, HEADS, 1, 128)),
    ("mask_shape", square(128, batch=2) | open_mask(1, 1, 128, 128)),
    ("mask_dtype", decode() | open_mask(1, 1, 1, 128, dtype=torch.float32)),
    ("mask_dtype", decode() | open_mask(1, 1, 1, 128, dtype=torch.bool)),
    ("window", decode() | {"window_size": 0}),
    ("finite", decode() | {"key": poisoned(math.nan)}),
    ("finite", decode() | {"value": poisoned(-math.inf)}),
    ("fill", decode() | {"attention_mask": decode()["attention_mask"].masked_fill(torch.arange(128) > 100, -math.inf)}),
    ("fill", decode() | {"attention_mask": torch.full((1, 1, 1, 128), torch.finfo(torch.bfloat16).min).bfloat16()}),
    ("promise", square() | open_mask(1, 1, 256, 256)),
    ("promise", square() | {"window_size": WINDOW - 1}),
]


@pytest.mark.parametrize(("rule", "arguments"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_each_rule_of_the_contract_fires(rule: str, arguments: Arguments) -> None:
    with pytest.raises(operator.ContractError) as caught:
        attention(arguments)
    assert caught.value.rule == rule


def test_every_rule_has_a_test() -> None:
    assert {rule for rule, _ in BROKEN} == set(operator.RULES) - {"static"}  # which has a test of its own


def test_rules_can_be_switched_off_one_by_one() -> None:
    small = square(128) | {"query": random(1, HEADS, 128, 16)} | rows(128, 16)
    with operator.unchecked("head_dim_64"):
        assert attention(small).shape == (1, HEADS, 128, 16)
        with operator.unchecked("dtype"), pytest.raises(operator.ContractError, match="promise"):
            attention(square(dtype=torch.float32) | open_mask(1, 1, 256, 256, dtype=torch.float32))
    with pytest.raises(operator.ContractError, match="multiple of 64"):
        attention(small)
    with pytest.raises(ValueError, match="no such rules"), operator.unchecked("head_dim_65"):
        pass


def test_runs_under_inductor_on_the_cpu() -> None:
    compiled = torch.compile(doubled, backend="inductor", dynamic=False, fullgraph=True)
    with graphs.watched() as watch, operator.recorded() as calls:
        for last in (70, 90, 127):
            arguments = decode(last=last)
            torch.testing.assert_close(compiled(arguments), 2 * attention(arguments))
    assert (watch.graphs, watch.breaks) == (1, 0)
    assert len(calls) == 6


def doubled(arguments: Arguments) -> Tensor:
    return attention(arguments) * 2


def test_symbolic_sizes_are_refused() -> None:
    compiled = torch.compile(doubled, backend="eager", dynamic=True)
    with pytest.raises(Exception, match=r"\[static\] expected fixed sizes"):
        compiled(decode())


def test_has_no_gradient() -> None:
    arguments = decode()
    arguments["query"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        attention(arguments).sum().backward()


def test_a_fresh_process_can_have_the_older_operator_or_none() -> None:
    out = operator.run_python(
        "import torch\n"
        "from spyre_sim import operator\n"
        "print(hasattr(torch.ops.spyre, operator.NAME))\n"
        "operator.register_old()\n"
        "print(torch.ops.spyre.sliding_window_attention.default._schema)\n"
    )
    nothing, old = out.splitlines()
    assert nothing == "False"
    assert all(name in old for name in ("cache_seqlen", "buffer_origin", "valid_start"))


# -- the device --


def test_fresh_memory_is_not_a_number(spyre: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for fresh in (torch.empty(3, 5, dtype=dtype, device=spyre), random(7).to(spyre, dtype).new_empty(4)):
            assert fresh.isnan().all()
    assert not torch.empty(9, dtype=torch.bool, device=spyre).any()
    assert torch.zeros(3, device=spyre).cpu().equal(torch.zeros(3))


def test_falls_back_to_the_cpu_and_counts(spyre: torch.device) -> None:
    x, y = random(4, 6, seed=1), random(6, 3, seed=2)
    on_device = x.to(spyre), y.to(spyre)
    with device.counting() as counts:
        result = on_device[0].relu() @ on_device[1]
        result.index_copy_(0, torch.tensor([2]).to(spyre), torch.zeros(1, 3, dtype=x.dtype, device=spyre))
    reference = x.relu() @ y
    reference[2] = 0
    assert result.device.type == "spyre"
    assert result.cpu().equal(reference)
    assert counts.eager_fallbacks == {"relu": 1, "mm": 1, "index_copy": 1, "zero": 1}
    assert not counts.compiled_fallbacks
    assert counts.fallback_bytes > 0


def test_counts_transfers(spyre: torch.device) -> None:
    host = random(4, 6)
    with device.counting() as counts:
        moved = host.to(spyre)
        back = moved.cpu()
        item = moved[0, 0].item()
        moved + moved  # which goes through the host, on its own account
        device.host_view(moved)[1] = 5
    assert back.equal(host)
    assert item == host[0, 0].item()
    assert moved.cpu()[1].eq(5).all()
    assert counts.uploads == [device.Transfer("h2d", (4, 6), "BFloat16", 48)]
    assert counts.downloads == [
        device.Transfer("d2h", (4, 6), "BFloat16", 48),
        device.Transfer("d2h", (), "BFloat16", 2),
    ]


def test_slices_are_copied_on_the_device(spyre: torch.device) -> None:
    old, new = random(2, 10, 4).to(spyre), torch.zeros(2, 10, 4, dtype=torch.bfloat16, device=spyre)
    with device.counting() as counts:
        new.narrow(1, 0, 7).copy_(old.narrow(1, 3, 7))
    assert new.cpu()[:, :7].equal(old.cpu()[:, 3:])
    assert (counts.device_copies, counts.device_copy_bytes) == (1, 2 * 7 * 4 * 2)
    assert not counts.transfers
    assert not counts.eager_fallbacks


@pytest.mark.parametrize("part", ((slice(1, 3),), (slice(0, 2),), (slice(None), slice(0, 1))), ids=str)
def test_host_copies_into_slices_are_a_fault(spyre: torch.device, part: tuple[slice, ...]) -> None:
    target, source = torch.zeros(4, 4, device=spyre), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="move whole tensors"):
        target[part].copy_(source[part])
    target.copy_(source)
    target.t().copy_(source)
    with device.tolerated("host_slice_copy"):
        target[part].copy_(2 * source[part])
    assert target.cpu()[part].eq(2).all()


def test_counts_live_bytes(spyre: torch.device) -> None:
    before = device.live_bytes()
    x = torch.empty(1000, device=spyre)
    y = x[10:]
    assert device.live_bytes() == before + 4000
    del x, y
    assert device.live_bytes() == before


def test_eager_operations_can_be_forbidden(spyre: torch.device) -> None:
    x = random(4, 4).to(spyre)
    mask = (x > 0).cpu().to(spyre)
    with device.forbidden():
        x + x
        for name, use in {
            "cat": lambda: torch.cat([x, x]),
            "roll": lambda: x.roll(1, 0),
            "index_copy": lambda: x.index_copy_(0, torch.tensor([1]).to(spyre), x[:1].clone()),
            "scatter": lambda: x.scatter(0, torch.zeros(1, 4, dtype=torch.long).to(spyre), x),
            "masked_fill": lambda: x.masked_fill(mask, 0),
            "bool tensor": lambda: ~mask,
        }.items():
            with pytest.raises(RuntimeError, match=f"{name}.* is forbidden here"):
                use()
        with device.forbidden("add"), pytest.raises(RuntimeError, match="add"):
            x + x
        x + x
    torch.cat([x, x])


def test_eager_operations_can_be_forbidden_in_modules(spyre: torch.device) -> None:
    class Join(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x])

    good, bad = Join(), Join()
    x = random(4, 4).to(spyre)
    with device.forbidden_in([bad]):
        for _ in range(2):
            good(x)
            with pytest.raises(RuntimeError, match="cat"):
                bad(x)
    bad(x)


def test_the_operator_has_no_eager_body(spyre: torch.device) -> None:
    with pytest.raises(RuntimeError, match="must be called inside"):
        attention(moved(decode(), spyre))


def test_random_numbers_come_from_the_cpu(spyre: torch.device) -> None:
    torch.manual_seed(3)
    on_device = torch.randn(5, device=spyre)
    torch.manual_seed(3)
    assert on_device.cpu().equal(torch.randn(5))


def test_says_what_is_missing(spyre: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_module", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        device.load_or_skip()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="no-such-compiler"):
        device.load_or_skip()


# -- compiled code on the device --


def moved(arguments: Arguments, to: torch.device) -> Arguments:
    return {name: value.to(to) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())).to(x.dtype)


def layer(
    hidden: Tensor, weights: dict[str, Tensor], keys: Tensor, values: Tensor, index: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A step of a sliding layer: project, norm, write into the buffers in place, attend."""
    batch, tokens, _ = hidden.shape
    split = batch, tokens, -1, DIM
    query = norm(linear(hidden, weights["q"]).view(split), weights["norm"]).transpose(1, 2)
    key = norm(linear(hidden, weights["k"]).view(split), weights["norm"]).transpose(1, 2)
    value = linear(hidden, weights["v"]).view(split).transpose(1, 2)
    keys.index_copy_(2, index, key)
    values.index_copy_(2, index, value)
    out = torch.ops.spyre.sliding_window_attention(query, keys, values, mask, WINDOW, False, 0.3)
    return linear(out.transpose(1, 2).flatten(2), weights["o"]), keys, values


def layer_inputs() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights, keys and values."""
    width = 32
    sizes = {"q": (HEADS * DIM, width), "k": (KV_HEADS * DIM, width), "v": (KV_HEADS * DIM, width), "norm": (DIM,)}
    weights = {name: random(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}
    weights["o"] = random(width, HEADS * DIM, seed=9)
    keys, values = rows(128).values()
    return weights, keys, values


def at(row: int) -> tuple[Tensor, Tensor, Tensor]:
    """The token, its index and its mask."""
    return random(1, 1, 32, seed=row), torch.tensor([row]), decode(last=row)["attention_mask"]


@pytest.fixture(scope="module")
def compiled_layer(spyre: torch.device) -> Callable[..., Any]:
    return torch.compile(layer, backend="inductor", dynamic=False, fullgraph=True)


def test_a_compiled_layer_matches_the_cpu(spyre: torch.device, compiled_layer: Callable[..., Any]) -> None:
    weights, keys, values = layer_inputs()
    there = {name: weight.to(spyre) for name, weight in weights.items()}
    buffers = keys.to(spyre), values.to(spyre)
    with graphs.watched() as watch, device.counting() as counts, operator.recorded() as calls, device.forbidden():
        for row in range(100, 110):
            hidden, index, mask = at(row)
            out, *returned = compiled_layer(hidden.to(spyre), there, *buffers, index.to(spyre), mask.to(spyre))
            reference, *_ = layer(hidden, weights, keys, values, index, mask)
            assert cosine_similarity(out.cpu().float(), reference.float(), dim=-1).min() > 0.9999
            assert [buffer.data_ptr() for buffer in returned] == [buffer.data_ptr() for buffer in buffers]
    torch.testing.assert_close(buffers[0].cpu(), keys)
    assert buffers[1].cpu().equal(values)
    # One graph for all positions. Only the matrix products are not Inductor's own: no copy of a buffer.
    assert (watch.graphs, watch.breaks) == (1, 0)
    assert list(counts.regions.values()) == [10]
    assert counts.compiled_fallbacks == {"mm": 40}
    assert not counts.eager_fallbacks
    assert counts.device_copies == 0
    assert [transfer.shape for transfer in counts.uploads] == [(1, 1, 32), (1,), (1, 1, 1, 128)] * 10
    assert [call.device for call in calls if call.device == "spyre"] == ["spyre"] * 10


def test_the_contract_holds_in_compiled_code(spyre: torch.device, compiled_layer: Callable[..., Any]) -> None:
    weights, keys, _ = layer_inputs()
    there = {name: weight.to(spyre) for name, weight in weights.items()}
    step = [tensor.to(spyre) for tensor in at(100)]
    unwritten = torch.empty(keys.shape, dtype=keys.dtype, device=spyre)
    with pytest.raises(operator.ContractError, match=r"\[finite\].*value has NaN"):
        compiled_layer(step[0], there, keys.to(spyre), unwritten, *step[1:])
    with pytest.raises(RuntimeError, match="must be called inside"):  # the failure left no trace
        attention(moved(decode(), spyre))


def test_a_view_with_an_offset_is_no_input(spyre: torch.device, compiled_layer: Callable[..., Any]) -> None:
    weights, keys, values = layer_inputs()
    there = {name: weight.to(spyre) for name, weight in weights.items()}
    hidden, *step = (tensor.to(spyre) for tensor in at(100))
    part = torch.stack([hidden, hidden])[1]
    with pytest.raises(RuntimeError, match=r"view with storage offset 32.*clone"):
        compiled_layer(part, there, keys.to(spyre), values.to(spyre), *step)
    compiled_layer(part.clone(), there, keys.to(spyre), values.to(spyre), *step)
    with device.tolerated("offset_input"):
        compiled_layer(part, there, keys.to(spyre), values.to(spyre), *step)


def test_stock_generates_on_the_device(spyre: torch.device) -> None:
    species = zoo.BY_NAME["gemma3_text"]
    options = zoo._gemma3_text(16, head_dim=64, query_pre_attn_scalar=64)
    model = zoo.Species("gemma3_64", species.architecture, lambda window: options).build(16, dtype=torch.bfloat16)
    inputs = species.inputs(model, [20, 9])
    expected_ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    model.to(spyre)
    with device.counting() as counts:
        ids = model.generate(**{k: v.to(spyre) for k, v in inputs.items()}, max_new_tokens=8, do_sample=False)
    assert ids.cpu().equal(expected_ids)
    assert counts.eager_fallbacks["scaled_dot_product_attention"] == 8 * 4
    assert not counts.compiled_fallbacks
