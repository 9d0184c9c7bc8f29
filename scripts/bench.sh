#!/usr/bin/env bash
# Measure stock and swapatch, and draw what the README shows. Arguments go to scripts/bench: --quick for toy sizes
# (a minute or two; its pictures stay in bench-results/quick), --only layer-prefill decode, --help for the rest.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

results=bench-results pictures=assets
for argument in "$@"; do
    if [[ $argument == --quick ]]; then results=bench-results/quick pictures=bench-results/quick; fi
done

prepare demo bench
say "checkpoint"
"$python" scripts/checkpoint.py
say "measuring (stock's training steps alone take minutes; anything else that runs meanwhile spoils it)"
"$python" scripts/bench "$@" --out "$results"
say "drawing"
"$python" scripts/plot.py --results "$results/bench.json" --assets "$pictures"
