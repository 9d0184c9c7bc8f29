"""The table of what was measured, and the ways of computing that it chooses from: all of them compute the same."""

import json
from importlib.resources import files
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from bench.layer_prefill import chosen
from bench.rows import Row
from torch import Tensor

from swapatch.attention import choice, reference, window_attention, windowed
from swapatch.attention.choice import Choice, choose, key, table
from swapatch.geometry import ENDLESS, Span
from swapatch.rules import Rule

CHOICES = [
    Choice(block, products, together) for block in (16, 40) for products in (False, True) for together in (False, True)
]


def rows(batch: int, length: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, length, 32, generator=generator).to(dtype) for heads in (4, 2, 2)]


def rules(batch: int, length: int) -> dict[str, Rule]:
    padding = torch.ones(batch, length, dtype=torch.long)
    padding[0, :33], padding[1, 120:] = 0, 0
    holes = padding.clone()
    holes[0, 50] = 0
    segments = torch.tensor([0] * 70 + [1] * (length - 70)).expand(batch, -1)
    return {
        "none": Rule(24),
        "padding": Rule(24, padding),
        "holes": Rule(24, holes),
        "packed": Rule(24, None, segments),
    }


@pytest.mark.parametrize("way", CHOICES, ids=str)
@pytest.mark.parametrize("first", (0, 90), ids=("prompt", "behind"))
@pytest.mark.parametrize("endless", (False, True), ids=("sliding", "global"))
@pytest.mark.parametrize("rule", ("none", "padding", "holes", "packed"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
def test_all_ways_compute_the_same(
    way: Choice, first: int, endless: bool, rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the definition does, where products are not worth it as well; memory in several parts too."""
    monkeypatch.setattr(windowed, "_MOST", 2000)
    length = 150
    query, key_rows, value = rows(3, length, dtype)
    who = rules(3, length)[rule]
    who = who.endless() if endless else who
    queries, keys = Span(first, length), Span(0, length)
    call = (query[:, :, first:], key_rows, value, who, queries, keys, 0.3)
    with mock.patch.object(windowed, "choose", return_value=way):
        got = window_attention(*call)
    everything = who.allowed(queries, keys, query.device)
    mask = torch.zeros(everything.shape).masked_fill(~everything, -torch.inf).expand(3, -1, -1, -1)
    want = reference.attend(query[:, :, first:], key_rows, value, mask, False, 0.3).transpose(1, 2)
    torch.testing.assert_close(got, want, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)
    assert who.window == (ENDLESS if endless else 24)


def test_products_are_as_exact_as_the_fused_kernel() -> None:
    """In bfloat16, with scores up to 40: a product that is rounded alone is five times as far off."""
    query, key_rows, value = rows(1, 600, torch.bfloat16)
    query = query * 4
    span, rule = Span(0, 600), Rule(200)
    exact = window_attention(query.double(), key_rows.double(), value.double(), rule, span, span, 0.3)
    errors = []
    for way in (Choice(64), Choice(64, products=True)):
        with mock.patch.object(windowed, "choose", return_value=way):
            got = window_attention(query, key_rows, value, rule, span, span, 0.3)
        errors.append(float((got - exact).square().mean().sqrt()))
    assert errors[1] < 1.5 * errors[0]
    with (
        mock.patch.object(windowed, "choose", return_value=Choice(64, products=True)),
        mock.patch.object(windowed, "scores_of", lambda query, key: torch.bmm(query, key.transpose(1, 2)).float()),
    ):
        rounded = window_attention(query, key_rows, value, rule, span, span, 0.3)
    assert float((rounded - exact).square().mean().sqrt()) > 3 * errors[0]


def test_the_table() -> None:
    """Every row is a way there is, of a kind of tensor there is."""
    text = files("swapatch.attention").joinpath("table.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert {"cpu", "threads", "torch"} < set(found)
    dtypes = ("float64", "float32", "bfloat16", "float16")
    known = {f"{device} {dtype}{end}" for device in ("cpu", "cuda") for dtype in dtypes for end in ("", ", emulated")}
    assert set(table()) <= known
    for name, way in table().items():
        assert 16 <= way.block <= 1024
        assert not way.products or name == "cpu bfloat16"
        assert Choice.named(str(way)) == way


def test_a_plain_choice_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice._chosen("npu", torch.float32) == Choice()
    assert choice._chosen("cuda", torch.float16) == Choice(together=True)
    # And where products do not add in float32.
    monkeypatch.setattr(choice, "table", lambda: {key("cpu", torch.bfloat16): Choice(32, products=True)})
    monkeypatch.setattr(choice, "scores_of", lambda query, key: torch.bmm(query, key.transpose(1, 2)).float())
    choice._chosen.cache_clear()
    try:
        assert choose(torch.zeros(1, dtype=torch.bfloat16)) == Choice(32)
    finally:
        choice._chosen.cache_clear()


def test_the_benchmark_writes_the_fastest() -> None:
    about: dict[str, Any] = {"case": "choices", "model": "", "setting": "", "tokens": 1, "unit": "s"}
    made = chosen(
        [
            Row(**about, dtype="float32", stock="blocks of 64", ratio=0.9),
            Row(**about, dtype="float32", stock="blocks of 64", ratio=1.3),
            Row(**about, dtype="float32", stock="blocks of 128, together", ratio=0.99),
            Row(**about, dtype="float32", stock="blocks of 128, together", ratio=1.0),
            Row(**about, dtype="float64", stock="blocks of 256", ratio=1.0),
        ]
    )
    assert made["choices"]["cpu float32"] == {"block": 128, "products": False, "together": True}
    assert made["choices"]["cpu float64"]["block"] == 256
    assert {"cpu", "threads", "torch"} < set(made)


def some_padding(random: Random, batch: int, length: int) -> Tensor | None:
    """Hidden on the left, on the right, on both sides, here and there, or nowhere."""
    if random.random() < 0.3:
        return None
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in mask:
        kind = random.choice(("left", "right", "both", "holes", "none"))
        if kind in ("left", "both"):
            row[: random.randint(0, length)] = 0
        if kind in ("right", "both"):
            row[random.randint(0, length) :] = 0
        if kind == "holes":
            row[torch.tensor([random.random() < 0.3 for _ in range(length)])] = 0
    return mask


@pytest.mark.parametrize("seed", range(100))
def test_any_call(seed: int) -> None:
    """Any window, numbers of queries and keys before and behind them, padding or packing, and way of computing."""
    random = Random(seed)
    batch, past = random.choice((1, 2, 3)), random.choice((0, 0, 5, 40, 130))
    stop = past + random.choice((1, 2, 15, 16, 17, 63, 64, 65, 129, 200))
    window = random.choice((2, 3, 8, 16, 17, 64, 65, 100, ENDLESS))
    first = max(0, past - window + 1) if random.random() < 0.5 else 0
    queries, keys = Span(past, stop), Span(first, stop + random.choice((0, 0, 7)))
    padding = some_padding(random, batch, stop)
    packed = padding is None and not past and random.random() < 0.5
    segments = torch.tensor([[random.random() < 0.05 for _ in range(stop)]] * batch).cumsum(1) if packed else None
    query, key_rows, value = rows(batch, keys.stop, torch.float32, seed)
    call = (query[:, :, past:stop], key_rows[:, :, keys.start :], value[:, :, keys.start :])
    who = Rule(window, padding, segments)
    way = Choice(random.choice((16, 32, 64, 128)), random.random() < 0.5, random.random() < 0.5)
    with mock.patch.object(windowed, "choose", return_value=way):
        got = window_attention(*call, who, queries, keys, 0.3)
    position, key_at = torch.arange(*queries)[:, None], torch.arange(*keys)
    sees = ((key_at <= position) & (key_at > position - window)).expand(batch, -1, -1).clone()
    if padding is not None:
        sees &= torch.nn.functional.pad(padding, (0, keys.stop - stop))[:, None, keys.start :].bool()
    if segments is not None:
        later = torch.nn.functional.pad(segments, (0, keys.stop - stop), value=-1)
        sees &= segments[:, queries.start :, None] == later[:, None, keys.start :]
    mask = torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)[:, None]
    want = reference.attend(*call, mask, False, 0.3).transpose(1, 2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
