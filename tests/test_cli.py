"""`python -m swapatch`: what it prints, and its exit codes, on tiny models in folders."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor, nn
from zoo import BY_NAME, FIRST_SPECIAL, VOCAB, Species, text_model

import swapatch
from swapatch import _text
from swapatch.backends import spyre
from swapatch.cli import environment
from swapatch.cli import main as cli
from swapatch.cli.load import DTYPES

WINDOW = 8
RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs a command: exit code, what it printed, and what it complained about."""

    def command(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with a tokenizer: one token a word, w0 to w87."""
    path = tmp_path_factory.mktemp("gemma3")
    BY_NAME["gemma3_text"].build(WINDOW).save_pretrained(path)
    words = {"unknown": 3, **{f"w{i}": i for i in range(FIRST_SPECIAL) if i != 3}}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="unknown"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="unknown").save_pretrained(path)
    return path


def saved_config(config: Any, path: Path) -> Path:
    config.save_pretrained(path)
    return path


# -- inspect --


def test_inspect_prints_layers_and_sizes(run: RunCommand, folder: Path) -> None:
    code, out, err = run("inspect", folder)
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["patched", "3", "of", "4", "layers"] in lines
    assert ["0-1,", "3", "sliding", "yes", "128", "attends", "a", "window", "of", "8"] in lines
    assert ["2", "global", "no", "tokens", "attends", "all", "keys:", "no", "window", "to", "bound"] in lines
    row = next(line for line in out.splitlines() if line.split()[:1] == ["4k"])
    sizes = {
        layout: _text.human_bytes(
            swapatch.report(
                BY_NAME["gemma3_text"].make_config(WINDOW), tokens=4096, dtype=torch.float32, layout=layout
            ).total_bytes
        )
        for layout in ("dynamic", "static", "full", "anchored")
    }
    assert row.split(maxsplit=1)[1].split() == " ".join(sizes.values()).split()
    assert "8k*" in out  # the model was made for 4096 positions
    assert "more than the 4096 positions" in out


def test_inspect_of_every_species(species: Species, run: RunCommand, tmp_path: Path) -> None:
    """The JSON is all there is, and agrees with the plan and with `report`."""
    config = species.make_config(WINDOW)
    code, out, err = run(
        "inspect", saved_config(config, tmp_path), "--json", "--batch", 3, "--dtype", "float16", "--layout", "ring"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    predicted = swapatch.report(config, tokens=2048, batch=3, dtype=torch.float16, layout="ring")
    assert found["kv_bytes"][1]["swapatch"] == predicted.total_bytes
    assert [sizes["tokens"] for sizes in found["kv_bytes"]] == [1024 * 2**power for power in range(8)]
    assert found["images_both_ways"] == species.bidirectional
    for layer, expected in zip(found["layers"], predicted.layers, strict=True):
        assert layer["index"] == expected.index
        assert (layer["shares_with"] is not None) == (expected.kind == "shared")
        assert layer["patched"] == (layer["kind"] == "sliding")
        if layer["kind"] == "sliding":
            assert layer["rows"] == expected.rows
    assert run("inspect", tmp_path)[0] == 0  # and it prints


def test_inspect_takes_a_file_and_the_config_s_dtype(run: RunCommand, folder: Path, tmp_path: Path) -> None:
    assert json.loads(run("inspect", folder / "config.json", "--json")[1])["dtype"] == "float32"
    values = json.loads((folder / "config.json").read_text())
    for given, expected in (("float16", "float16"), (None, "bfloat16"), ("float64", "bfloat16")):
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps(values | {"dtype": given}))
        assert json.loads(run("inspect", changed, "--json")[1])["dtype"] == expected


# -- verify --


def test_verify_says_same(run: RunCommand, folder: Path) -> None:
    code, out, _ = run("verify", folder, "--max-new-tokens", 3)
    assert code == 0
    assert f"Prompt 0: {WINDOW + 64} tokens, float32, cpu" in out
    assert "verdict  same" in out
    assert "tokens   3 of 3 the same" in out
    assert "note" not in out


def test_verify_takes_prompts(run: RunCommand, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(f"w{i}" for i in range(5, 45)))
    prompts = ["--prompt", "w5 w6 w7", "--prompt-file", file, "--random", 20]
    options = ["--layout", "ring", "--backend", "reference", "--max-new-tokens", 2, "--json"]
    code, out, _ = run("verify", folder, *prompts, *options)
    found = json.loads(out)
    assert code == 0
    assert found["same"]
    assert [verdict["prompt"] for verdict in found["prompts"]] == [3, 40, 20]
    assert found["prompts"][1]["tokens"][0][:40] == list(range(5, 45))
    code, out, _ = run("verify", folder, "--dtype", "bfloat16")
    assert code == 0
    assert "bfloat16 rounds in every layer" in out


def test_verify_finds_a_fault(run: RunCommand, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose layer 1 is wrong from position 20 on, when patched."""
    load = cli.load_model

    def broken(*args: Any) -> nn.Module:
        model = load(*args)

        def spoil(module: nn.Module, args: Any, output: Any) -> Any:
            states: Tensor = output[0]
            if not swapatch.is_patched(model) or states.shape[1] == 1:
                return None
            wrong = states.roll(1, -1)
            return torch.where((torch.arange(states.shape[1]) >= 20)[:, None], wrong, states), *output[1:]

        text_model(model).layers[1].self_attn.register_forward_hook(spoil)
        return model

    monkeypatch.setattr(cli, "load_model", broken)
    text = " ".join(f"w{i}" for i in range(5, 45))
    code, out, _ = run("verify", folder, "--prompt", text, "--max-new-tokens", 12)
    assert code == 1
    assert "verdict  different" in out
    assert "logits   differ first at position 20 of row 0" in out
    assert "begins in layer 1 (sliding), at position 20" in out
    begins = [line.split() for line in out.splitlines() if line.endswith("begins here")]
    assert [line[:2] for line in begins] == [["1", "sliding"]]
    over = [line.split()[0] for line in out.splitlines() if line.endswith("over")]
    assert over[0] == "20-24"
    assert " 'w" in next(line for line in out.splitlines() if line.startswith("tokens"))  # shown as words
    code, out, _ = run("verify", folder, "--prompt", text, "--max-new-tokens", 1, "--json")
    assert code == 1
    assert json.loads(out)["prompts"][0]["origin"]["index"] == 1
    assert run("verify", folder, "--prompt", text, "--max-new-tokens", 1, "--tolerance", 1000)[0] == 0


def test_verify_without_a_tokenizer(run: RunCommand, tmp_path: Path) -> None:
    BY_NAME["gemma4_ple_shared"].build(WINDOW).save_pretrained(tmp_path)
    assert run("verify", tmp_path, "--random", 30, "--max-new-tokens", 2)[0] == 0
    code, out, err = run("verify", tmp_path, "--prompt", "hello")
    assert (code, out) == (2, "")
    assert "do: leave the prompt out" in err


def test_random_prompts_are_plain_text() -> None:
    model = BY_NAME["gemma4_vision"].build(WINDOW)
    ids = cli.random_prompt(model, 2000)
    assert ids.shape == (1, 2000)
    assert torch.equal(ids, cli.random_prompt(model, 2000))
    # All but padding, end and begin (0 to 2), and image, video, audio and their borders (90 to 96).
    assert set(ids.flatten().tolist()) == set(range(3, VOCAB)) - set(range(90, 97))


# -- env --


def test_env(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPATCH_DISABLE", "yes")
    code, out, err = run("env")
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["swapatch"] == swapatch.__version__
    assert rows["torch"] == torch.__version__
    assert rows["transformers"] == transformers.__version__
    assert rows["device"].startswith("cpu")
    assert rows["switched"] == "off (SWAPATCH_DISABLE is 'yes')"
    found = json.loads(run("env", "--json")[1])
    assert found["disabled"]
    assert found["wrapt"]


def test_env_looks_for_spyre_without_importing_it(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fake_spyre").mkdir()
    (tmp_path / "fake_spyre" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(environment, "SPYRE_PACKAGE", "fake_spyre")
    monkeypatch.setattr(environment, "OPERATOR", ("aten", "relu"))
    found = json.loads(run("env", "--json")[1])
    assert found["fake_spyre"] == "installed, version unknown"
    assert "aten::relu(Tensor self) -> Tensor" in found["operator"]
    assert "relu(Tensor self) -> Tensor (not as swapatch calls it)" in run("env")[1]
    monkeypatch.setattr(spyre, "operator", lambda: torch.ops.aten.relu)
    assert "relu(Tensor self) -> Tensor (as swapatch calls it)" in run("env")[1]
    monkeypatch.setattr(environment, "OPERATOR", ("spyre", "no_such_operator"))
    assert json.loads(run("env", "--json")[1])["operator"] is None
    assert "not registered" in run("env")[1]


def test_env_names_accelerators(run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for kind, names in (("cuda", ["cuda:0, card 0", "cuda:1, card 1"]), ("xpu", ["xpu:0", "xpu:1"])):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
        assert json.loads(run("env", "--json")[1])["devices"][1:] == names


# -- errors --


def write(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(text)
    return path


ERRORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing path": (lambda _: "/nowhere/at/all", "no file or folder /nowhere/at/all"),
    "missing file": (lambda _: "some.json", "no file or folder some.json"),
    "no config": (lambda tmp: tmp, "no config.json in"),
    "broken json": (lambda tmp: write(tmp / "m", "{"), "not a valid JSON file"),
    "no object": (lambda tmp: write(tmp / "m", "[1]"), "found:"),
    "no model type": (lambda tmp: write(tmp / "m", "{}"), "model_type"),
    "unknown type": (lambda tmp: write(tmp / "m", '{"model_type": "abacus"}'), "model type `abacus`"),
    "wrong field": (
        lambda tmp: write(tmp / "m", '{"model_type": "gemma3_text", "sliding_window": "wide"}'),
        "sliding_window",
    ),
    "unsupported": (lambda tmp: write(tmp / "m", '{"model_type": "gemma2"}'), "caps its attention scores"),
    "not on disk": (lambda _: "nobody/nothing", "nobody/nothing: "),
}


@pytest.mark.parametrize("command", ("inspect", "verify"))
@pytest.mark.parametrize(("source", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_explained(
    command: str, source: Callable[[Path], object], message: str, run: RunCommand, tmp_path: Path
) -> None:
    code, out, err = run(command, source(tmp_path))
    assert (code, out) == (2, "")
    first, *lines = err.splitlines()
    assert first == f"swapatch {command} failed"
    assert [line.split(":")[0] for line in lines] == ["found", "supported", "do"]
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (["--prompt-file", "/nowhere.txt"], "No such file"),
        (["--prompt", ""], "no token in the prompt ''"),
        (["--device", "abacus"], "device 'abacus'"),
    ),
)
def test_errors_of_verify(options: list[str], message: str, run: RunCommand, folder: Path) -> None:
    code, out, err = run("verify", folder, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_verify_needs_weights(run: RunCommand, tmp_path: Path) -> None:
    code, _, err = run("verify", saved_config(BY_NAME["gemma3_text"].make_config(WINDOW), tmp_path))
    assert code == 2
    assert "do: give a folder made by save_pretrained" in err


def test_verify_while_switched_off(run: RunCommand, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWAPATCH_DISABLE", "1")
    code, _, err = run("verify", folder)
    assert code == 2
    assert "unset SWAPATCH_DISABLE" in err


@pytest.mark.parametrize(
    "argv",
    ([], ["walk"], ["inspect"], ["inspect", "x", "--batch", "0"], ["verify", "x", "--dtype", "int8"]),
    ids=" ".join,
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: python -m swapatch" in capsys.readouterr().err


@pytest.mark.parametrize("argv", (["--help"], ["inspect", "--help"], ["verify", "--help"], ["env", "--help"]))
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    assert "usage: python -m swapatch" in capsys.readouterr().out


# -- tables --


class Terminal:
    """Standard output that says it is a terminal."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def isatty(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.mark.parametrize("rich", (True, False))
def test_tables_on_a_terminal(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With rich they are drawn; without it they are the text that a pipe gets."""
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "60")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stdout", Terminal(sys.stdout))
    _text.print_table(["name", "size"], [["a [red]", "1"], ["b", "20"]], left="l")
    out = capsys.readouterr().out
    assert "a [red]" in out
    assert ("┃" in out) == rich
    if not rich:
        assert out == "name     size\na [red]     1\nb          20\n"


# -- as a program --


def test_as_a_program(folder: Path) -> None:
    """One real call, from elsewhere, with nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "swapatch", "inspect", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(swapatch.__file__).parents[1])},
        cwd=folder,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "patched  3 of 4 layers" in done.stdout


def test_dtypes_are_torch_s() -> None:
    assert {name: getattr(torch, name) for name in DTYPES} == DTYPES
