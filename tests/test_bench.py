"""The benchmark's own parts, at toy size: equal results come first, what is written, and what is drawn from it."""

import csv
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import cli, llamacpp
from bench.cases import CASES, ON_DEVICE, PEAKS
from bench.device import Cpu, Cuda
from bench.layer_prefill import prefill_layer_ways
from bench.models import random_model, subject
from bench.peers import DECODES, PREFILLS, Peer, llama_cpp, peers
from bench.rows import SCHEMA, Row, write
from bench.sizes import QUICK, TOY, Options, Shape
from bench.startup import patch_and_undo
from bench.table import markdown
from bench.timing import Result, compare
from bench.training import trained_model, training_ways

OPTIONS = Options(QUICK, quick=True, rounds=1)
IN_PROCESS = ("layer-prefill", "choices", "layer-decode", "layer-training", "prefill", "scoring", "decode", "roofline")

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


# -- peers, and a GPU --


class LikeCuda(Cpu):
    """The CPU, of which everything is asked that is asked of a GPU."""

    attentions = Cuda.attentions
    graph_mode = Cuda.graph_mode


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled for a backend that runs the graphs as they are, which takes no minute."""
    made = torch.compile

    def compile(*args: Any, mode: str | None = None, **options: Any) -> Any:
        assert mode in (None, "reduce-overhead")
        return made(*args, **{**options, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", compile)
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("as_it_is")
@pytest.mark.filterwarnings("ignore")  # the compiler's
def test_peers() -> None:
    """Every way is there, equal to stock's; what is not installed says so in its row, and the others go on."""
    sizes = replace(QUICK, peers={torch.bfloat16: (128, 96), torch.float16: (96,)})
    with torch.no_grad():
        rows = list(peers(Options(sizes, quick=True, rounds=1, device=LikeCuda())))
    ran = {(row.setting, row.dtype, row.tokens, name) for row in rows for name in (row.stock, row.patched) if row.ratio}
    ways = {name: peer for name, peer in PREFILLS.items() if name != "stock flash"}
    plain = {name for name, peer in ways.items() if not peer.compile}
    assert ran == {
        *(("prefill", "bfloat16", 128, name) for name in ways),
        *(("prefill", dtype, 96, name) for dtype in ("bfloat16", "float16") for name in plain),
        *(("one step", "bfloat16", 128, name) for name in DECODES),
    }
    assert all(row.error is not None and row.error <= row.tolerance for row in rows if row.ratio)
    failures = [row for row in rows if not row.ratio]
    assert {row.stock for row in failures} == {"stock flash"}
    assert all("does not run here" in row.note for row in failures)


def test_peers_share_weights_and_nothing_else() -> None:
    model = random_model(TOY, torch.float32)
    twin = Peer("eager", patched=True).of(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert "forward" in vars(twin.model.layers[0].self_attn)


LLAMA = """
import os
__version__ = "1.2"
class Some:
    pass
class CommonParams(Some):
    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = Some(), Some(), Some()
class Server:
    def __init__(self, params):
        assert (params.n_ctx, params.cpuparams.n_threads, params.cpuparams_batch.n_threads) == (44, 2, 2)
        assert (params.model.path, os.environ["OMP_WAIT_POLICY"]) == ("weights.gguf", "PASSIVE")
        print("a server says something")
    def handle_completions(self, asked):
        prompt, new = len(asked["prompt"]), asked["n_predict"]
        return {"timings": {"prompt_n": prompt, "predicted_n": new, "prompt_ms": 10.0 * prompt, "predicted_ms": 90.0}}
def get_system_info():
    return "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | AVX512 = 0 | OPENMP = 1 | "
"""


def test_llama_cpp_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of ten tokens the first comes from the prompt."""
    (tmp_path / f"{llamacpp.PACKAGE}.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = llamacpp.measure(gguf="weights.gguf", prompt=[5] * 34, new=10, threads=2, rounds=3, seconds=60)
    assert found == {
        "prompt": pytest.approx([0.34] * 3),
        "token": pytest.approx([0.01] * 3),
        "about": f"{llamacpp.PACKAGE} 1.2, AVX AVX2",
    }
    with pytest.raises(RuntimeError, match="AssertionError"):
        llamacpp.measure(gguf="weights.gguf", prompt=[5] * 34, new=10, threads=3, rounds=3, seconds=60)


def test_llama_cpp_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says so; with another package's weights it is not measured at all."""
    monkeypatch.setattr(llamacpp, "PACKAGE", "no_such_package")
    monkeypatch.setattr("bench.peers.gguf_file", lambda: nullcontext("weights.gguf"))
    model = subject(True, torch.bfloat16)
    about = {"case": "peers", "model": "", "dtype": "", "setting": "", "tokens": 9}
    result = Result({"swapatch": [1.0]}, {}, 0.0)
    assert list(llama_cpp("prompt", model, result, OPTIONS, about)) == []
    (row,) = llama_cpp("prompt", replace(model, real=True), result, OPTIONS, about)
    assert (row.stock, row.stock_value, row.ratio) == ("llama.cpp", None, None)
    assert "no_such_package is not installed: pip install --group peers" in row.note


def test_table() -> None:
    about = {"case": "peers", "model": "toy", "dtype": "bfloat16", "device": "a chip"}
    both = {"stock": "stock sdpa", "patched": "swapatch", "unit": "s", "setting": "prefill", **about}
    step = {**both, "setting": "one step", "tokens": 10}
    rows = [
        Row(tokens=10, stock_value=3.0, patched_value=2.0, **both),
        Row(tokens=20, stock_value=8.0, patched_value=2.0, **both),
        Row(tokens=20, note="does not run here: no memory", **{**both, "stock": "stock eager", "patched": ""}),
        Row(stock_value=0.05, patched_value=0.1, **step),
    ]
    assert markdown(rows).splitlines() == [
        "| peers, toy, prefill, bfloat16, a chip | 10 tokens | 20 tokens |",
        "| --- | --- | --- |",
        "| stock sdpa | 3.00 s (1.50) | 8.00 s (4.00) |",
        "| swapatch | 2.00 s | 2.00 s |",
        "| stock eager | - | - |",
        "",
        "* stock eager: does not run here: no memory",
        "",
        "| peers, toy, one step, bfloat16, a chip | 10 tokens |",
        "| --- | --- |",
        "| stock sdpa | 50.0 ms, 20.0 tokens/s (0.50) |",
        "| swapatch | 100.0 ms, 10.0 tokens/s |",
    ]


class Event:
    """Of a stream in which each piece of work takes as long as it says."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


def test_time_and_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By events around the work alone, and by what the allocator hands out above what it had handed out before."""
    calls: list[str] = []
    held = {"now": 5 * 2**20, "peak": 90 * 2**20}

    def fake(name: str, does: Callable[[], Any]) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda: (calls.append(name), does())[1])

    fake("synchronize", lambda: setattr(Event, "now", Event.now + 7))
    fake("reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    fake("memory_allocated", lambda: held["now"])
    fake("max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def work() -> str:
        calls.append("work")
        Event.now += 2.0
        held["peak"] += 3 * 2**20
        return "done"

    assert Cuda().timed(work) == (2.0, "done")
    assert calls == ["synchronize", "work"]
    calls.clear()
    assert Cuda().peak(work) == 3.0
    before = ["synchronize", "reset_peak_memory_stats", "memory_allocated"]
    assert calls == [*before, "work", "synchronize", "max_memory_allocated"]


def test_command_line_of_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without one it ends and says why; with one it runs what can run there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        cli.parse(["--device", "cuda"])
    assert "--device cuda: torch" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cli.parse(["--device", "cuda"]).only == list(ON_DEVICE["cuda"])
    assert cli.parse([]).only == list(CASES)
    with pytest.raises(SystemExit, match="2"):
        cli.parse(["--device", "cuda", "--only", "host", "peers"])
    assert "--device cuda has no host" in capsys.readouterr().err
