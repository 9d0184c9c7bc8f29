"""What a machine without a GPU can tell about running on one: where tensors are made, and what the script does."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from compare import cache_key, cache_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from zoo import Model, Species, named_ids

import swapatch
from swapatch.attention import operator

ROOT = Path(__file__).parents[1]
ELSEWHERE = "lazy:0"
"""A device that torch knows without having been built for it. Its tensors hold nothing, but may not meet the CPU's."""
MODE = FakeTensorMode()
"""One for all, since masks are remembered."""


def moved(model: Model) -> Model:
    """With tensors of the same shapes on the other device; what is shared stays shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=ELSEWHERE)
                    table[name] = made.setdefault(
                        id(tensor), nn.Parameter(empty, requires_grad=False) if table is module._parameters else empty
                    )
    return model


@pytest.mark.parametrize("fixed", (False, True), ids=("grows", "fixed"))
def test_every_tensor_is_on_the_model_s_device(
    species: Species, layout: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, steps, a chunk, a scoring call, by the code that a GPU runs: a tensor left on the CPU is an error."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # torch asks devices that it was built for
    monkeypatch.setattr(operator, "is_traced", lambda tensor: False)
    model = species.build(8)
    if species.moe:
        model.set_experts_implementation("batched_mm")  # the others look at values
    with MODE, torch.no_grad():
        moved(model)
        ids = torch.randint(3, 80, (1, 90), device=ELSEWHERE)
        cache = swapatch.CompactCache(model, max_cache_len=200, layout=layout) if fixed else None
        with swapatch.patch(model, layout=layout):
            output = model(ids, use_cache=True, **({cache_key(model): cache} if fixed else {}))
            for tokens in (1, 1, 70, 1):
                output = model(ids[:, :tokens], **{cache_key(model): cache_of(output)})
                assert output.logits.device == torch.device(ELSEWHERE)
            model(ids, use_cache=False)
            assert swapatch.status(model).calls == swapatch.CallCounts({"prefill": 2, "decode": 3, "uncached": 1}, {})


def test_the_zoo_builds_where_it_is_told(species: Species, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "DEVICE", torch.device("meta"))
    model = species.build(8)
    images = [[], [(3, 9)]] if species.vision else None
    batch = species.inputs(model, (5, 20), images=images, pixels=species.vision)
    assert {tensor.device.type for tensor in (*model.parameters(), *batch.values(), named_ids(model, 1, 3))} == {"meta"}


@pytest.fixture
def gpu_script(tmp_path: Path) -> Path:
    """The script in a project of its own, with commands that only write down how they are called."""
    scripts, commands = tmp_path / "scripts", tmp_path / "commands"
    scripts.mkdir()
    commands.mkdir()
    for name in ("gpu.sh", "env.sh", "constraints.txt"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    command(commands / "nvidia-smi", "exit 1")
    command(commands / "python3", "exit 1")
    return scripts / "gpu.sh"


def command(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


def run(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{script.parents[1] / 'commands'}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return subprocess.run(
        ["bash", str(script)], env=environment | {"PATH": path} | variables, capture_output=True, text=True
    )


def test_gpu_script_without_a_gpu(gpu_script: Path) -> None:
    done = run(gpu_script)
    assert done.returncode == 1
    assert done.stderr == "error: no GPU: no torch here sees one, and nvidia-smi neither\n"
    assert not (gpu_script.parents[1] / "bench-results").exists()


@pytest.mark.parametrize("tests", (0, 1), ids=("pass", "fail"))
def test_gpu_script_uses_the_interpreter_that_sees_one(gpu_script: Path, tests: int) -> None:
    """It installs nothing; figures come also after a test has failed, but the status says so."""
    root = gpu_script.parents[1]
    seeing = root / "commands" / "seeing"
    command(
        seeing,
        f"""[ "$1" = -c ] && exit 0
echo "$@" >> calls
case "$*" in
    *pytest*) exit {tests};;
    *bench*) echo "| figures |" > bench-results/gpu/bench.md;;
esac""",
    )
    done = run(gpu_script, PYTHON=str(seeing))
    assert done.returncode == tests, done.stderr
    assert done.stdout.endswith("| figures |\n")
    first, second = (root / "calls").read_text().splitlines()
    assert first.startswith("-m pytest")
    assert second == "scripts/bench --device cuda --out bench-results/gpu"
