"""The benchmark's own parts, at toy size: equal results come first, what is written, and what is drawn from it."""

import csv
import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import cli
from bench.cases import CASES, PEAKS
from bench.layer_prefill import prefill_layer_ways
from bench.models import random_model
from bench.rows import SCHEMA, Row, write
from bench.sizes import QUICK, TOY, Options, Shape
from bench.startup import patch_and_undo
from bench.timing import Result, compare
from bench.training import trained_model, training_ways

OPTIONS = Options(QUICK, quick=True, rounds=1)
IN_PROCESS = ("layer-prefill", "blocks", "layer-decode", "layer-training", "prefill", "scoring", "decode", "roofline")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    with torch.no_grad():
        return {name: list(CASES[name](OPTIONS)) for name in IN_PROCESS}


@pytest.mark.parametrize("name", IN_PROCESS)
def test_case(rows: dict[str, list[Row]], name: str) -> None:
    """Every figure has a value, and every comparison a ratio and two results that were found equal."""
    assert rows[name]
    for row in rows[name]:
        assert row.case == name
        assert row.threads
        values = [value for value in (row.stock_value, row.patched_value) if value is not None]
        assert values
        assert min(values) > 0
        if len(values) == 2:
            assert row.ratio is not None
            assert row.ratio > 0
            assert row.error is not None
            assert row.tolerance is not None
            assert row.error <= row.tolerance


@pytest.mark.parametrize("what", sorted(PEAKS))
def test_peak_memory(what: str) -> None:
    assert PEAKS[what]("swapatch", 512, OPTIONS) >= 0


def test_training_step() -> None:
    """The loss and all gradients are compared before a step is timed."""
    result = compare(training_ways(trained_model(TOY), 128), torch.float32, OPTIONS)
    assert min(*result.seconds["stock sdpa"], *result.seconds["swapatch"]) > 0


def test_patch_time() -> None:
    model = random_model(TOY, torch.float32)
    assert patch_and_undo(model) > 0


def test_unequal_results_are_never_timed() -> None:
    """The layer's own ways, one of them with a window one smaller."""
    shape = QUICK.layer_prefill[0]
    smaller = Shape(shape.window - 1, shape.heads, shape.kv_heads, shape.dim)
    ways = prefill_layer_ways(shape, 128, torch.float32)
    calls = []

    def wrong() -> tuple[float, Any]:
        calls.append(1)
        return prefill_layer_ways(smaller, 128, torch.float32)["swapatch"]()

    with torch.no_grad():
        compare(ways, torch.float32, OPTIONS)
        with pytest.raises(AssertionError, match="swapatch: off by"):
            compare({**ways, "swapatch": wrong}, torch.float32, OPTIONS)
    assert len(calls) == 1


def test_ratio_is_the_median_of_rounds() -> None:
    result = Result({"a": [2.0, 9.0, 4.0], "b": [1.0, 1.0, 1.0]}, {"a": 0.0, "b": 0.0}, 1e-4)
    row = result.row("a", "b", case="x", model="", setting="", tokens=1, dtype="float32")
    assert (row.ratio, row.ratio_of_sums, row.rounds) == (4.0, 5.0, 3)


def test_files(rows: dict[str, list[Row]], tmp_path: Path) -> None:
    """CSV and JSON hold the same rows, and a later run of one case leaves the other cases alone."""
    names = [column.name for column in fields(Row)]
    write(rows["layer-prefill"], ["layer-prefill"], list(CASES), tmp_path)
    write(rows["decode"], ["decode"], list(CASES), tmp_path)
    write(rows["decode"], ["decode"], list(CASES), tmp_path)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["schema"] == SCHEMA
    assert {"cpu", "threads", "python", "torch", "transformers", "swapatch"} <= set(document["environment"])
    assert [row["case"] for row in document["rows"]] == [
        *["layer-prefill"] * len(rows["layer-prefill"]),
        *["decode"] * len(rows["decode"]),
    ]
    assert all(list(row) == names for row in document["rows"])
    with (tmp_path / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == names
    assert len(table) == len(document["rows"])


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the dependency group bench")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_plot(rows: dict[str, list[Row]], tmp_path: Path) -> None:
    """A picture for everything that was measured, and none for what was not."""
    import plot

    measured = [row for name in ("layer-prefill", "layer-decode", "prefill", "decode") for row in rows[name]]
    write(measured, list(IN_PROCESS), list(CASES), tmp_path)
    written = plot.draw(tmp_path / "bench.json", tmp_path / "assets")
    assert {path.name for path in written} == set(plot.FIGURES) - {"bench-memory.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--only`` runs that case alone, and its rows are printed as they come."""
    monkeypatch.chdir(tmp_path)
    cli.main(["--quick", "--rounds", "1", "--only", "layer-prefill"])
    document = json.loads((tmp_path / "bench-results" / "quick" / "bench.json").read_text())
    assert {row["case"] for row in document["rows"]} == {"layer-prefill"}
    assert "ratio" in capsys.readouterr().out
