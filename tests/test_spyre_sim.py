"""The stand-in for torch-spyre does what it says: the operator's contract, the device, compiled code on it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from spyre_sim import device, graphs, layouts, operator, support
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


# -- layouts --

BUFFER = 1, KV_HEADS, 128, DIM


def first(shape: tuple[int, ...]) -> Any:
    """The layout of a cache with positions first."""
    from torch_spyre._C import SpyreTensorLayout, get_device_dtype

    batch, heads, length, dim = shape
    return SpyreTensorLayout(
        device_size=[length, heads, -(-dim // 64), batch, 64],
        stride_map=[dim, length * dim, 64, heads * length * dim, 1],
        device_dtype=get_device_dtype(torch.bfloat16),
    )


def buffer(shape: tuple[int, ...] = BUFFER) -> Tensor:
    return random(*shape).to("spyre", device_layout=first(shape))


def test_a_layout_has_two_constructors(spyre: torch.device) -> None:
    from torch_spyre._C import SpyreTensorLayout, get_device_dtype

    innermost = SpyreTensorLayout((3, 2, 128, 256), (65536, 32768, 256, 1), torch.bfloat16, [2, 0, 1, 3])
    assert innermost.device_size == [3, 2, 4, 128, 64]
    assert innermost.stride_map == [65536, 32768, 64, 256, 1]
    assert innermost.device_dtype == get_device_dtype(torch.bfloat16) != get_device_dtype(torch.float16)
    of_one = SpyreTensorLayout((1, 2, 128, 100), (25600, 12800, 100, 1), torch.bfloat16, [2, 0, 1, 3])
    assert (of_one.device_size, of_one.stride_map) == ([1, 2, 2, 128, 64], [-1, 12800, 64, 100, 1])
    shape = 3, 2, 128, 256
    ordered = SpyreTensorLayout(shape, (65536, 32768, 256, 1), torch.bfloat16, [0, 2, 1, 3])
    assert ordered == first(shape)
    assert hash(ordered) == hash(first(shape))
    assert ordered != innermost
    assert "device_size=[128, 2, 4, 3, 64], stride_map=[256, 32768, 64, 65536, 1]" in repr(ordered)
    with pytest.raises(RuntimeError, match=r"no format for torch\.float64"):
        get_device_dtype(torch.float64)
    with pytest.raises(TypeError, match="expected"):
        SpyreTensorLayout((3, 2), (2, 1), torch.bfloat16)
    with pytest.raises(RuntimeError, match="dim_order"):
        SpyreTensorLayout((3, 2), (2, 1), torch.bfloat16, [0, 0])


def test_the_package_is_imported_on_demand(spyre: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_spyre", None)
    del sys.modules["torch_spyre"]
    import torch_spyre

    assert torch_spyre._C is sys.modules["torch_spyre._C"]


@pytest.mark.parametrize("shape", (BUFFER, (1, 1, 64, 256), (2, 3, 192, 128)), ids=str)
def test_a_tensor_keeps_its_layout(spyre: torch.device, shape: tuple[int, ...]) -> None:
    layout, host = first(shape), random(*shape)
    for moved in (host.to("spyre", device_layout=layout), host.to(spyre, device_layout=layout)):
        assert moved.cpu().equal(host)
        assert device.layout_of(moved[:, :, 5:]) == device.layout_of(moved) == layout
        assert device.first_dim(moved) == device.first_dim(moved[:, :, 5:]) == 2
        assert device.first_dim(moved.transpose(1, 2)) == 1
        assert moved.to("spyre", device_layout=layout) is moved
    plain = host.to(device_layout=layout).clone()
    assert plain.device.type == "spyre"
    assert device.layout_of(plain).device_size[:2] == [shape[1], shape[2]]  # upstream's default
    assert device.first_dim(plain) == (1 if shape[1] > 1 else None)
    again = plain.to("spyre", device_layout=layout)
    assert again.cpu().equal(host)
    assert device.layout_of(again) == layout


def test_a_layout_ends_with_its_memory(spyre: torch.device) -> None:
    for _ in range(20):  # where memory is used again, most likely
        assert device.layout_of(buffer()) == first(BUFFER)
        assert device.layout_of(torch.empty(BUFFER, dtype=torch.bfloat16, device=spyre)) != first(BUFFER)


def test_a_layout_must_fit(spyre: torch.device) -> None:
    for shape in ((1, KV_HEADS, 192, DIM), (1, KV_HEADS, 128, 128), (1, 4, 128, DIM), (3, KV_HEADS, 128, DIM)):
        with pytest.raises(RuntimeError, match="does not fit"):
            random(*BUFFER).to("spyre", device_layout=first(shape))
    with pytest.raises(RuntimeError, match="it holds BFLOAT16"):
        random(*BUFFER).half().to("spyre", device_layout=first(BUFFER))
    with pytest.raises(RuntimeError, match="no device_layout"):
        random(*BUFFER).to("cpu", device_layout=first(BUFFER))


def write(keys: Tensor, index: Tensor, key: Tensor) -> Tensor:
    keys.index_copy_(2, index, key)
    return keys


def write_rows(keys: Tensor, index: Tensor, key: Tensor) -> Tensor:
    keys.transpose(1, 2).index_copy_(1, index, key.transpose(1, 2))
    return keys


@pytest.mark.parametrize("write", (write, write_rows))
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_counts_relayouts(spyre: torch.device, write: Callable[..., Tensor], compiled: bool) -> None:
    if compiled:
        torch._dynamo.reset()
        write = torch.compile(write, backend="inductor", dynamic=False, fullgraph=True)
    index, key = torch.tensor([7]).to(spyre), random(1, KV_HEADS, 1, DIM, seed=5).to(spyre)
    for keys, relayouts in ((buffer(), 0), (random(*BUFFER).to(spyre), 1), (buffer(), 0)):
        with device.counting() as counts:
            for _ in range(3):
                write(keys, index, key)
        assert counts.relayouts["index_copy"] == 3 * relayouts
        assert keys[:, :, 7:8].cpu().equal(key.cpu())


def test_relayouts_are_seen_in_a_cached_graph(spyre: torch.device) -> None:
    """Inductor's own cache knows the second graph."""
    keys, index, key = random(*BUFFER).to(spyre), torch.tensor([7]).to(spyre), random(1, KV_HEADS, 1, DIM).to(spyre)
    for _ in range(2):
        torch._dynamo.reset()
        with device.counting() as counts, device.compiled_ops() as ops:
            torch.compile(write, backend="inductor", dynamic=False)(keys, index, key)
        assert counts.relayouts == {"index_copy": 1}
        assert ops == {support.Op("index_copy")}


@pytest.mark.parametrize("heads", (1, 2))
def test_counts_copies_between_layouts(spyre: torch.device, heads: int) -> None:
    short, long = buffer((1, heads, 128, DIM)), buffer((1, heads, 192, DIM))
    plain = torch.zeros(1, heads, 192, DIM, dtype=torch.bfloat16, device=spyre)
    with device.counting() as alike:
        long.narrow(2, 64, 128).copy_(short)
        plain.copy_(plain.clone())
        plain.narrow(2, 0, 64).copy_(plain[:, :, :1])
    assert alike.layout_copies == 0
    with device.counting() as counts:
        plain.narrow(2, 64, 128).copy_(short)
        long.narrow(2, 64, 64).copy_(plain.narrow(2, 64, 64))
    assert counts.layout_copies == 2
    assert not layouts.same_kind(plain, plain.transpose(2, 3).contiguous().transpose(2, 3))


# -- what a card runs --


def test_counts_binaries_of_eager_work(spyre: torch.device) -> None:
    old, new = random(1, 2, 192, DIM).to(spyre), random(1, 2, 192, DIM).to(spyre)
    with device.counting() as counts:
        for start in (0, 64, 64, 64):
            new.narrow(2, 0, 64).copy_(old.narrow(2, start, 64))
    assert len(counts.eager_binaries) == 2
    assert sum(counts.eager_binaries.values()) == 4
    assert {binary.offsets for binary in counts.eager_binaries} == {(0, 0), (0, 64 * DIM)}
    with device.counting() as counts:
        new.cpu()
        new.copy_(old.cpu())
        new[:, :1].transpose(1, 2)
        for tensor in (new, new, new.transpose(1, 2), new.float()):  # the last is a copy besides
            tensor + tensor
        new.argmax()
    assert {binary.op: n for binary, n in counts.eager_binaries.items() if binary.op == "copy"} == {"copy": 1}
    assert len([binary for binary in counts.eager_binaries if binary.op == "add"]) == 3
    assert counts.native_ops == {"add": 4}
    assert counts.cpu_fallbacks == {"argmax": 1}


def test_some_operations_are_one_to_the_card(spyre: torch.device) -> None:
    """Though PyTorch takes them apart, into clones and casts among others."""
    x = random(2, 4, 3, DIM).to(spyre)
    with device.counting() as counts, device.strict(), torch.no_grad():
        x.transpose(1, 2) @ x.transpose(1, 2).transpose(-1, -2)
        linear(x, x.new_zeros(5, DIM))
        torch.nn.functional.rms_norm(x, (DIM,))
        scaled_dot_product_attention(x, x, x)
    names = "matmul", "linear", "rms_norm", "scaled_dot_product_attention", "zeros"
    assert counts.native_ops == dict.fromkeys(names, 1)
    assert not counts.cpu_fallbacks


ONLY_COMPILED = "is compiled-only"
REFUSED: dict[str, tuple[str, Callable[[Tensor, Tensor], object]]] = {
    "gelu": (ONLY_COMPILED, lambda x, mask: torch.nn.functional.gelu(x)),
    "clone": (ONLY_COMPILED, lambda x, mask: x.clone()),
    "contiguous": (ONLY_COMPILED, lambda x, mask: x.t().contiguous()),
    "reshape": (ONLY_COMPILED, lambda x, mask: x.t().reshape(-1)),
    "to": (ONLY_COMPILED, lambda x, mask: x.float()),
    "copy": (ONLY_COMPILED, lambda x, mask: x.copy_(mask)),
    "fill": (ONLY_COMPILED, lambda x, mask: x.fill_(1)),
    "zero": (ONLY_COMPILED, lambda x, mask: x.zero_()),
    "slice_scatter": (ONLY_COMPILED, lambda x, mask: torch.slice_scatter(x, x)),
    "index_add": (ONLY_COMPILED, lambda x, mask: x.index_add(0, torch.arange(4, device=x.device), x)),
    "repeat": (ONLY_COMPILED, lambda x, mask: x.repeat(2, 1)),
    "flip": (ONLY_COMPILED, lambda x, mask: x.flip(0)),
    "offset": ("a view of a slice is compiled-only", lambda x, mask: x[1:] * 2),
    "part": ("a view of a slice is compiled-only", lambda x, mask: x[:2] * 2),
    "columns": ("a view of a slice is compiled-only", lambda x, mask: x[:, :2].relu()),
    "expand": ("a view of a slice is compiled-only", lambda x, mask: x[:, None].expand(4, 2, 64).sum()),
    "linear": ("a view of a slice is compiled-only", lambda x, mask: linear(x[1:], x)),
    "roll": ("missing or broken", lambda x, mask: x.roll(1, 0)),
    "bool": ("bool tensor", lambda x, mask: x * mask),
    "bool attention": ("bool tensor", lambda x, mask: scaled_dot_product_attention(x, x, x, mask[:, :4])),
    "empty": ("zero size", lambda x, mask: torch.zeros(0, 4, device=x.device)),
    "empty view": ("zero size", lambda x, mask: x[4:]),
    "empty upload": ("zero size", lambda x, mask: torch.zeros(0).to(x.device)),
    "cat": ("part of size 1", lambda x, mask: torch.cat([x, torch.zeros(4, 1, device=x.device)], dim=-1)),
}


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("name", REFUSED)
def test_strict_refuses(spyre: torch.device, name: str, mode: Callable[[], Any]) -> None:
    message, use = REFUSED[name]
    with mode():
        x = random(4, 64).to(spyre)
        mask = (x.cpu() > 0).to(spyre)
        with device.strict(), pytest.raises(RuntimeError, match=message):
            use(x, mask)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_strict_lets_the_rest_run(spyre: torch.device, mode: Callable[[], Any]) -> None:
    with mode():
        x = random(4, 64).to(spyre)
        index = torch.tensor([1]).to(spyre)
        with device.counting() as counts, device.strict():
            torch.cat([torch.where(x == x, x, x), x])
            torch.ones(3, device=spyre)
            torch.full((3,), 2.0, device=spyre)
            x.t().sum()
            x.contiguous().view(2, 128).softmax(-1)
            x.narrow(0, 0, 2).copy_(x.narrow(0, 2, 2))
            x[1].cpu()
            torch.zeros(3).to(spyre, torch.bfloat16).to("cpu", torch.float32)
            x.index_copy_(0, index, torch.zeros(1, 64, dtype=x.dtype, device=spyre))
            x.argmax(-1)
            torch.arange(3, device=spyre)
            torch.randn(3, device=spyre)
            x.tanh()
    names = "cat", "where", "eq", "ones", "full", "sum", "softmax", "zeros"
    assert counts.native_ops == dict.fromkeys(names, 1)
    assert counts.cpu_fallbacks == dict.fromkeys(("index_copy", "argmax", "arange", "randn", "tanh"), 1)


def test_strict_is_for_eager_code(spyre: torch.device) -> None:
    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x[1:].float()).clone()

    eager, compiled = Act(), Act()
    compiled.compile(backend="inductor", dynamic=False, fullgraph=True)
    x = random(4, 64).to(spyre)
    with device.strict():
        compiled(x)
    with device.strict_in([eager, compiled]):
        for _ in range(2):
            compiled(x)
            torch.nn.functional.gelu(x)
            with pytest.raises(RuntimeError, match=ONLY_COMPILED):
                eager(x)
    assert eager(x).cpu().allclose(compiled(x).cpu(), atol=1e-4)


# -- compiled code on the device --


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def rows_turned(x: Tensor) -> Tensor:
    half = x.shape[0] // 2
    return torch.nn.functional.gelu(torch.cat([x[half:], x[:half, :]]).flip(0)) @ x.t()


def test_tells_what_a_graph_consists_of(spyre: torch.device) -> None:
    x = random(4, 64).to(spyre)
    found = []
    for function in (rotate_half, rows_turned, lambda x: x.flip(-1), lambda x: x.cumsum(0).roll(1, 0)):
        compiled = torch.compile(function, backend="inductor", dynamic=False)
        with device.compiled_ops() as ops:
            compiled(x)
        with device.compiled_ops() as again:
            compiled(x)
        assert again == ops
        found.append(ops)
    turned, cat = support.Op("slice", last=True), support.Op("cat", last=True)
    assert found[0] == {turned, cat, support.Op("neg")}
    assert found[1] == {support.Op(name) for name in ("slice", "cat", "flip", "gelu", "t", "mm")}
    assert support.not_compilable(found[0]) == found[0]  # no table has `neg`
    assert support.not_compilable(found[1]) == set()
    assert support.not_compilable(found[2]) == {support.Op("flip", last=True)}
    assert support.not_compilable(found[3]) == {support.Op("cumsum"), support.Op("roll")}
    assert support.not_compilable({turned, support.Op("cat")}) == set()


def test_the_table_is_consistent() -> None:
    assert {support.plain(name) for name in support.SUPPORT} == set(support.SUPPORT)
    assert all(support.where(name) == support.EAGER for name in support.WHOLE | support.MOVES)
    assert [support.where(name) for name in ("gelu", "roll", "tril", "tanh")] == [
        support.COMPILED,
        support.BROKEN,
        support.FALLBACK,
        support.FALLBACK,
    ]


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


def test_a_layer_compiles(spyre: torch.device, compiled_layer: Callable[..., Any]) -> None:
    weights, keys, values = layer_inputs()
    there = {name: weight.to(spyre) for name, weight in weights.items()}
    with device.compiled_ops() as ops:
        compiled_layer(at(5)[0].to(spyre), there, *(t.to(spyre) for t in (keys, values, *at(5)[1:])))
    assert {"mm", "index_copy", "sliding_window_attention", "rsqrt", "to"} <= {op.name for op in ops}
    assert support.not_compilable(ops) == set()


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
