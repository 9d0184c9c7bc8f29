"""Generate greedily with a Gemma model: patched by swapatch, stock, or both side by side.

The three ways, each with `--help` for the rest:

    python scripts/generate.py                  # patched
    python scripts/generate.py --stock          # as transformers does it
    python scripts/generate.py --compare        # both on the same prompt: tokens, times, rows and bytes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from checkpoint import checkpoint_path
from transformers.generation.streamers import BaseStreamer

import swapatch

DEFAULT_PROMPT = Path(__file__).with_name("prompt.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STOCK, PATCHED = "stock", "swapatch"


# ---------------------------------------------------------------------------------------------------------------------
# one measured generation


class Clock(BaseStreamer):
    """A streamer that only notes the time: `generate` hands it the prompt first, then every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def prefill(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def decode(self) -> float:
        """The median step after the first token; NaN if there is none."""
        steps = [after - before for before, after in zip(self.times[1:-1], self.times[2:], strict=True)]
        return statistics.median(steps) if steps else float("nan")


@dataclass
class Run:
    """What one way of generating gave, over all its rounds."""

    tokens: list[list[int]] = field(default_factory=list)  # one list a round
    prefills: list[float] = field(default_factory=list)  # seconds, one a round
    decodes: list[float] = field(default_factory=list)  # seconds, the median over the tokens of a round
    after_prompt: Any = None  # swapatch.report of the cache once the prompt is in
    at_end: Any = None  # swapatch.report of the cache after the last token

    # Whatever else a machine does only ever adds time, so the fastest round tells most about the code.
    @property
    def prefill(self) -> float:
        return min(self.prefills)

    @property
    def decode(self) -> float:
        return min(self.decodes)


def warm_up(model: Any, inputs: dict[str, torch.Tensor], run: Run) -> None:
    """Generate one token: what is slow only once is out of the way, and the cache holds the prompt and no more."""
    output, _ = generate(model, inputs, 1)
    run.after_prompt = swapatch.report(cache_of(output))


def measure(model: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int, run: Run) -> None:
    """Generate once, timed."""
    output, clock = generate(model, inputs, max_new_tokens)
    run.tokens.append(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
    run.prefills.append(clock.prefill)
    run.decodes.append(clock.decode)
    run.at_end = swapatch.report(cache_of(output))


def generate(model: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> tuple[Any, Clock]:
    clock = Clock()
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, streamer=clock)
    return output, clock


def cache_of(output: Any) -> Any:
    """The cache in what `generate` returned: called `cache` from transformers 5.24 on, `past_key_values` before."""
    return output["cache"] if "cache" in output else output["past_key_values"]


# ---------------------------------------------------------------------------------------------------------------------
# what to run


def measure_all(model: Any, inputs: dict[str, torch.Tensor], options: argparse.Namespace) -> dict[str, Run]:
    """Every way in turn, round by round, so that a machine that is busy for a while slows all of them alike."""
    runs = {name: Run() for name in wanted(options)}
    for name, run in runs.items():
        with stage(f"warming up, {name}"), as_wanted(model, name):
            warm_up(model, inputs, run)
    for number in range(1, options.rounds + 1):
        for name, run in runs.items():
            with stage(f"round {number} of {options.rounds}, {name}"), as_wanted(model, name):
                measure(model, inputs, options.max_new_tokens, run)
    return runs


def as_wanted(model: Any, name: str) -> AbstractContextManager[Any]:
    return swapatch.patch(model) if name == PATCHED else nullcontext()


def wanted(options: argparse.Namespace) -> list[str]:
    if options.compare:
        return [STOCK, PATCHED]
    return [STOCK] if options.stock else [PATCHED]


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    source = options.model or str(checkpoint_path())
    if looks_like_a_folder(source) and not Path(source).is_dir():
        fail(f"there is no model folder {source!r}")
    with stage(f"loading {source}"):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[options.dtype])
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            fail(f"cannot load a model from {source!r}: {one_line(error)}")
    model.generation_config = greedy(model.generation_config)
    return tokenizer, model.to(options.device).eval()


def greedy(published: transformers.GenerationConfig) -> transformers.GenerationConfig:
    """Only the special tokens of the published settings: those often ask for sampling."""
    return transformers.GenerationConfig(
        do_sample=False,
        bos_token_id=published.bos_token_id,
        eos_token_id=published.eos_token_id,
        pad_token_id=published.pad_token_id,
    )


def looks_like_a_folder(source: str) -> bool:
    # A hub id is `name` or `owner/name`; transformers calls anything else a malformed id, which helps nobody.
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def read_prompt(options: argparse.Namespace) -> str:
    text = options.prompt if options.prompt is not None else read_text(options.prompt_file)
    # The newline at the end of a text file is not part of the text, and would keep the model from going on with it.
    text = text.rstrip()
    if not text:
        fail("the prompt is empty")
    return text


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        fail(f"cannot read the prompt file {str(path)!r}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"cannot read the prompt file {str(path)!r}: it is not UTF-8 text")


# ---------------------------------------------------------------------------------------------------------------------
# printing


def print_setting(model: Any, inputs: dict[str, torch.Tensor], options: argparse.Namespace) -> None:
    length = inputs["input_ids"].shape[1]
    source = "the command line" if options.prompt is not None else options.prompt_file.name
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"model    {describe(model)}")
    print(f"prompt   {length:,} tokens from {source}; up to {options.max_new_tokens:,} new tokens")
    print(f"setting  greedy, {options.dtype} on {options.device}, {torch.get_num_threads()} threads, {versions}")
    if not options.stock:
        print_patch(model)
    print(flush=True)


def describe(model: Any) -> str:
    config = model.config.get_text_config()
    sliding = list(getattr(config, "layer_types", None) or []).count("sliding_attention")
    window = f", window {config.sliding_window:,}" if sliding else ""
    return f"{type(model).__name__}, {sliding} of {config.num_hidden_layers} layers sliding{window}"


def print_patch(model: Any) -> None:
    """Patch and undo at once: shows what is going to happen, and a model that is refused is refused before the work."""
    with swapatch.patch(model) as handle:
        print(f"patch    {handle!r}")
        if not handle.active:
            print("         switched off by SWAPATCH_DISABLE: what is called swapatch below is stock as well")


def print_table(runs: dict[str, Run]) -> None:
    rows: list[tuple[str, list[Any], Callable[[Any], str]]] = [
        ("prefill", [run.prefill for run in runs.values()], seconds),
        ("decode, per token", [run.decode for run in runs.values()], seconds),
        ("sliding rows after the prompt", [sliding_rows(run.after_prompt) for run in runs.values()], str),
        ("sliding rows at the end", [sliding_rows(run.at_end) for run in runs.values()], str),
        ("sliding bytes after the prompt", [run.after_prompt.sliding_bytes for run in runs.values()], mebibytes),
        ("sliding bytes at the end", [run.at_end.sliding_bytes for run in runs.values()], mebibytes),
        ("all layers' bytes at the end", [run.at_end.total_bytes for run in runs.values()], mebibytes),
    ]
    print(table_line("", list(runs), "stock / swapatch" if len(runs) > 1 else ""))
    for label, values, show in rows:
        print(table_line(label, [show(value) for value in values], ratio(values)))


def table_line(label: str, cells: list[str], last: str) -> str:
    return (f"{label:<32}" + "".join(f"{cell:>14}" for cell in cells) + f"{last:>20}").rstrip()


def ratio(values: list[Any]) -> str:
    comparable = len(values) == 2 and all(isinstance(value, int | float) for value in values) and values[1]
    return f"{values[0] / values[1]:.2f}" if comparable else ""


def sliding_rows(report: Any) -> str:
    rows = sorted({layer.rows for layer in report.layers if layer.kind == "sliding"})
    if not rows:
        return "none"
    return f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"


def seconds(value: float) -> str:
    if value != value:
        return "too few tokens"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def mebibytes(value: int) -> str:
    return f"{value / 2**20:.2f} MiB"


def print_legend(options: argparse.Namespace) -> None:
    fastest = f", in the fastest of {options.rounds} rounds" if options.rounds > 1 else ""
    print(
        f"\nprefill: from handing over the prompt to the first new token, after a warm-up{fastest}."
        f"\ndecode: median time between two new tokens{fastest}."
        "\nrows: what the buffers of one sliding layer show."
        "\nbytes: the storage that is kept alive, each distinct storage counted whole, also where only a part is shown."
    )


def print_verdict(runs: dict[str, Run], options: argparse.Namespace) -> bool:
    """Say whether the tokens are equal in every round, and return it."""
    pairs = zip(runs[STOCK].tokens, runs[PATCHED].tokens, strict=True)
    unequal = next(((stock, patched) for stock, patched in pairs if stock != patched), None)
    if unequal is None:
        print(f"\ntokens: equal, all {len(runs[STOCK].tokens[0])}")
        return True
    stock, patched = unequal
    place = first_difference(stock, patched)
    print(f"\ntokens: NOT equal, from new token {place + 1} on (stock gave {len(stock)}, swapatch {len(patched)})")
    if options.dtype != "float32":
        print(f"        {options.dtype} rounds, so two near-equal candidates can swap places; --dtype float32 tells")
    return False


def first_difference(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def print_texts(runs: dict[str, Run], tokenizer: Any) -> None:
    texts = {name: tokenizer.decode(run.tokens[0], skip_special_tokens=True) for name, run in runs.items()}
    if len(set(texts.values())) == 1:
        texts = {"text": next(iter(texts.values()))}
    for name, text in texts.items():
        print(f"\n{name}:")
        for paragraph in text.strip().splitlines():
            print(textwrap.fill(paragraph, width=100, initial_indent="  ", subsequent_indent="  "))


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Progress goes to stderr, so that stdout holds the results alone."""
    start = time.perf_counter()
    say(f"{text} ...")
    yield
    say(f"{text}: {time.perf_counter() - start:.1f} s")


def say(text: str) -> None:
    print(f"generate: {text}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    raise SystemExit(f"generate: {message}")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# command line


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate", description="Generate greedily with a Gemma model.")
    parser.add_argument("--model", metavar="FOLDER|HUB_ID", help="default: Gemma 3 270M, made by scripts/checkpoint.py")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", type=Path, default=DEFAULT_PROMPT, help="default: scripts/prompt.txt"
    )
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, default=64, help="default: %(default)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stock", action="store_true", help="leave the model as transformers made it")
    which.add_argument("--compare", action="store_true", help="stock and patched on the same prompt, side by side")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    parser.add_argument("--device", type=device, default="cpu", help="a torch device; default: %(default)s")
    parser.add_argument("--threads", metavar="N", type=positive, help="CPU threads for torch; default: torch's choice")
    parser.add_argument("--rounds", metavar="N", type=positive, help="timed rounds; default: 3 with --compare, else 1")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.compare else 1)
    return options


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def device(text: str) -> torch.device:
    try:
        return torch.empty(1, device=text).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"torch cannot use {text!r}: {one_line(error)}") from None


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    prompt = read_prompt(options)
    tokenizer, model = load(options)
    inputs = dict(tokenizer(prompt, return_tensors="pt").to(options.device))
    try:
        print_setting(model, inputs, options)
        runs = measure_all(model, inputs, options)
    except swapatch.SwapatchError as error:
        fail(str(error))
    print_table(runs)
    print_legend(options)
    equal = print_verdict(runs, options) if options.compare else True
    print_texts(runs, tokenizer)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
