"""The command line."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers

from .cases import CASES, ON_DEVICE, PEAKS, run
from .device import DEVICES
from .sizes import FULL, ON_CUDA, QUICK, Options

SIZES = {"cpu": FULL, "cuda": ON_CUDA}
FOLDERS = {"cpu": (), "cuda": ("gpu",)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description="Measure stock transformers and swapatch in turn.")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=CASES, help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes and models: quick, and figures of no meaning")
    parser.add_argument(
        "--long", action="store_true", help="also what takes minutes: stock's memory at the longest prompt"
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--rounds", metavar="N", type=int, default=Options.rounds, help="at most; default: %(default)s")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads for torch; default: torch's choice")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="default: in bench-results")
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "WAY", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or (options.threads is not None and options.threads < 1):
        parser.error("--rounds and --threads take numbers from 1")
    if why := DEVICES[options.device].why_not():
        parser.error(f"--device {options.device}: {why}")
    options.only = options.only or list(ON_DEVICE[options.device])
    if elsewhere := set(options.only) - set(ON_DEVICE[options.device]):
        parser.error(f"--device {options.device} has no {', '.join(sorted(elsewhere))}")
    return options


def main(arguments: list[str] | None = None) -> None:
    given = parse(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    device = DEVICES[given.device]
    sizes = QUICK if given.quick else SIZES[given.device]
    options = Options(sizes, given.quick, given.long, given.rounds, device=device)
    if given.child:
        what, name, tokens = given.child
        print(PEAKS[what](name, int(tokens), options))
        return
    out = given.out or Path("bench-results", *FOLDERS[given.device], *["quick"] * given.quick)
    start = time.perf_counter()
    run(given.only, options, out)
    print(f"{out / 'bench.json'}, bench.csv and bench.md, after {time.perf_counter() - start:.0f} s")
