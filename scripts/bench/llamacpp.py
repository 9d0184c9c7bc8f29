"""llama.cpp on a GGUF file, in a process of its own, where torch's threads are not in its way.

Run by itself this file is that process: what is asked comes as JSON, the answer is the last line that it prints.
It is one request to llama.cpp's own server, without a network, which tells how long the prompt and the tokens took.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

PACKAGE = "xllamacpp"


def measure(**asked: Any) -> dict[str, Any]:
    """What :func:`answer` says, from another process."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: pip install --group peers")
    # -P: the modules beside this file are no modules of its own. Threads that wait must sleep: on a machine that has
    # other work, spinning for each other made a token 20 times slower.
    command, environment = [sys.executable, "-P", __file__], {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    child = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=environment)
    if child.returncode:
        raise RuntimeError(f"{PACKAGE} ended with {child.returncode}: {child.stderr[-200:]}")
    return json.loads(child.stdout.splitlines()[-1])


def answer(gguf: str, prompt: list[int], new: int, threads: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Seconds of the prompt and of one new token, for each round, and what was built into the package."""
    import xllamacpp

    server = xllamacpp.Server(settings(xllamacpp.CommonParams(), gguf, len(prompt) + new, threads))
    ask(server, prompt[:32], 2)  # what is slow once
    prompts, tokens = [], []
    end = time.perf_counter() + seconds
    while not prompts or (len(prompts) < rounds and time.perf_counter() < end):
        timings = ask(server, prompt, new)
        prompts.append(timings["prompt_ms"] / 1e3)
        tokens.append(timings["predicted_ms"] / 1e3 / (new - 1))  # the first one comes from the prompt
    about = f"{PACKAGE} {xllamacpp.__version__}, {features(xllamacpp.get_system_info())}"
    return {"prompt": prompts, "token": tokens, "about": about}


def settings(params: Any, gguf: str, room: int, threads: int) -> Any:
    params.model.path = gguf
    params.n_ctx = room
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_ctx_checkpoints = 0  # copies of the cache, for a later turn
    params.verbosity = 0
    return params


def ask(server: Any, prompt: list[int], new: int) -> dict[str, float]:
    given = {"prompt": prompt, "n_predict": new, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False}
    timings = server.handle_completions(given)["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (len(prompt), new), timings
    return timings


def features(info: str) -> str:
    """The instruction sets that it was built for, of which a wheel for any machine lacks some."""
    named = re.findall(r"(\w+) = 1", info)
    return " ".join(name for name in named if name.startswith(("AVX", "AMX", "NEON", "SVE"))) or "baseline"


if __name__ == "__main__":
    print(json.dumps(answer(**json.load(sys.stdin))))
