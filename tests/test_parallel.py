"""Tensor parallel: the script that shows it, in two processes on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from torch import distributed

import swapatch

ROOT = Path(swapatch.__file__).parents[1]
SCRIPT = Path("scripts", "tensor_parallel.py")
LIMIT = 240  # seconds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()), reason="torch was built without gloo"
    ),
    pytest.mark.skipif(
        transformers.__version__.startswith("5.15."),
        reason="transformers 5.15 fails on per-layer embeddings that it has spread over processes",
    ),
]


def torchrun(*arguments: object) -> tuple[int, str, str]:
    """The script in two processes: exit code, what it printed, and what it complained about."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*launch, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # which it passes on to its processes; killed, it would leave them behind
            out, err = process.communicate()
            pytest.fail(f"{SCRIPT} did not end within {LIMIT} s\n{out}\n{err}")
    return process.returncode, out, err


def test_every_process_gives_the_tokens_of_one() -> None:
    """Each has half of the heads, so no shape can have come from the config."""
    code, out, err = torchrun()
    assert code == 0, f"exit code {code}\n{out}\n{err}"
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["gemma3", "gemma4"], out
    for line in lines:
        assert "equal: 160 new tokens in 2 processes and in one" in line
        assert "1 of 2 heads of keys, 128 rows for 209 tokens" in line


def test_a_wrong_window_is_noticed() -> None:
    code, out, err = torchrun("--stock-window", 33, "--new-tokens", 20)
    assert code == 1, f"exit code {code}\n{out}\n{err}"
    assert out.count("DIFFERENT") == 2, out
