"""The command line: look at a model before patching it, check a patched one, describe the environment.

Exit codes: 0, all well; 1, ``verify`` found a difference; 2, the question could not be answered, and why is on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .._errors import SwapatchError, explain
from .._text import print_table
from ..backends import NAMES
from ..families import plan_model
from ..layers import LAYOUTS
from ..plan import text_config
from ..verify import Verdict, compare
from . import describe, environment
from .load import DTYPES, load_config, load_model, load_tokenizer

SAME, DIFFERENT, FAILED = 0, 1, 2
"""Exit codes."""

RANGES = 8
"""Lines for the positions of a prompt, and for those of the generated tokens."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Raises:
        SystemExit: from argparse, for ``--help`` and for arguments that do not fit.
    """
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except SwapatchError as error:
        print(f"swapatch {arguments.command} failed\n{error}", file=sys.stderr)
        return FAILED


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m swapatch", description="Compact sliding-window attention for Gemma.")
    top.add_argument("--version", action="version", version=f"swapatch {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_verify(commands)
    _add_env(commands)
    return top


# -- inspect --


def _add_inspect(commands: Any) -> None:
    command = _add(
        commands, "inspect", _inspect, "what would be patched, and what the cache takes, from a config alone"
    )
    command.add_argument("model", metavar="MODEL_OR_CONFIG", help="folder, config.json, or name on the hub")
    command.add_argument("--batch", type=_positive, default=1, metavar="N", help="sequences (default: 1)")
    command.add_argument("--dtype", choices=DTYPES, help="of keys and values (default: that of the config)")
    command.add_argument("--layout", choices=LAYOUTS, default="anchored", help="of the sliding buffers")


def _inspect(arguments: argparse.Namespace) -> int:
    found = describe.describe(
        load_config(arguments.model),
        arguments.model,
        batch=arguments.batch,
        dtype=DTYPES.get(arguments.dtype),
        layout=arguments.layout,
    )
    _emit(arguments, found, describe.show)
    return SAME


# -- env --


def _add_env(commands: Any) -> None:
    _add(commands, "env", _env, "versions, devices, the Spyre operator: what a bug report needs")


def _env(arguments: argparse.Namespace) -> int:
    _emit(arguments, environment.environment(), environment.show)
    return SAME


# -- verify --


def _add_verify(commands: Any) -> None:
    command = _add(commands, "verify", _verify, "patched against stock on your model and prompts")
    command.add_argument("model", metavar="MODEL", help="folder, or name on the hub")
    command.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated")
    command.add_argument("--prompt-file", action="append", default=[], metavar="FILE", help="may be repeated")
    command.add_argument(
        "--random",
        type=_positive,
        metavar="N",
        help="a prompt of N random tokens, which needs no tokenizer (without any prompt: window + 64 of them)",
    )
    command.add_argument("--max-new-tokens", type=_positive, default=16, metavar="N", help="(default: 16)")
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the weights (default: float32, which alone tells a small fault from rounding)",
    )
    command.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of logits that counts as rounding (default: 1e-4 in float32, more for large logits)",
    )
    command.add_argument("--layout", choices=LAYOUTS, default="anchored", help="of the sliding buffers")
    command.add_argument("--backend", choices=NAMES, default="auto", help="who computes the attention")
    command.add_argument("--device", default="cpu", help="(default: cpu)")


def _verify(arguments: argparse.Namespace) -> int:
    texts = [*arguments.prompt, *map(_read, arguments.prompt_file)]
    model = load_model(arguments.model, DTYPES[arguments.dtype], arguments.device)
    tokenizer = load_tokenizer(arguments.model) if texts else None
    prompts = [_tokens(tokenizer, text) for text in texts]
    if arguments.random or not prompts:
        prompts.append(random_prompt(model, arguments.random or plan_model(model).window + 64))
    verdicts = [_compare(model, ids, arguments) for ids in prompts]
    same = all(verdict.same for verdict in verdicts)
    found = {"model": arguments.model, "same": same, "prompts": [verdict.as_dict() for verdict in verdicts]}

    def show(_: Any) -> None:
        for number, verdict in enumerate(verdicts):
            print(f"\nPrompt {number}: {verdict.prompt} tokens, {arguments.dtype}, {arguments.device}")
            _show_verdict(verdict, tokenizer)

    _emit(arguments, found, show)
    return SAME if same else DIFFERENT


def _tokens(tokenizer: Any, text: str) -> Tensor:
    """The prompt as tokens, ``[1, tokens]``."""
    ids = torch.tensor([tokenizer(text)["input_ids"]], dtype=torch.long)
    if not ids.numel():
        raise SwapatchError(explain(f"no token in the prompt {text!r}", "prompts with tokens", "give another prompt"))
    return ids


def _compare(model: Any, ids: Tensor, arguments: argparse.Namespace) -> Verdict:
    return compare(
        model,
        ids.to(arguments.device),
        max_new_tokens=arguments.max_new_tokens,
        tolerance=arguments.tolerance,
        layout=arguments.layout,
        backend=arguments.backend,
    )


def random_prompt(model: Any, tokens: int) -> Tensor:
    """The same random tokens every time, ``[1, tokens]``, none of which stands for the begin, the end or an image."""
    settings = {**model.config.to_dict(), **text_config(model).to_dict()}
    named = [value for name, value in settings.items() if name.endswith(("token_id", "token_index"))]
    special = {one for value in named for one in (value if isinstance(value, list) else [value])}
    plain = torch.tensor([token for token in range(text_config(model).vocab_size) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return plain[torch.randint(len(plain), (1, tokens), generator=generator)]


def _show_verdict(verdict: Verdict, tokenizer: Any) -> None:
    def decode(token: int) -> str:
        return str(token) if tokenizer is None else f"{token} {tokenizer.decode([token])!r}"

    print(verdict.summary(decode))
    print_table(["positions", "", "largest difference", ""], _position_rows(verdict), left="ll l")
    if verdict.layers:
        print_table(
            ["layer", "kind", "difference", "from position", ""],
            [
                [str(x.index), x.kind, f"{x.difference:.2g}", str(x.position), _mark(x == verdict.origin)]
                for x in verdict.layers
            ],
            left=" l  l",
        )


def _position_rows(verdict: Verdict) -> list[list[str]]:
    """Largest differences of stretches of the prompt, and of the generated tokens."""
    rows, largest = [], verdict.differences.amax(0)
    for name, start, stop in (("prompt", 0, verdict.prompt), ("generated", verdict.prompt, len(largest))):
        size = -(-(stop - start) // RANGES) or 1
        for first in range(start, stop, size):
            last = min(first + size, stop) - 1
            difference = float(largest[first : last + 1].max())
            label = str(first) if first == last else f"{first}-{last}"
            rows.append([label, name, f"{difference:.3g}", "over" if difference > verdict.tolerance else ""])
    return rows


def _mark(begins: bool) -> str:
    return "begins here" if begins else ""


# -- shared --


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
    description = f"{about[0].upper()}{about[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=about, description=description)
    command.add_argument("--json", action="store_true", help="print JSON, with everything in it")
    command.set_defaults(run=run)
    return command


def _emit(arguments: argparse.Namespace, found: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SwapatchError(explain(f"{file}: {error}", "a text file in UTF-8", "check the path")) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more. Got {number}")
    return number
