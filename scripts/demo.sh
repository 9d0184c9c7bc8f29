#!/usr/bin/env bash
# The main job on a real checkpoint, from nothing but a Python: environment, package, weights, then stock and patched
# generation side by side. Arguments go to scripts/generate.py, for example --max-new-tokens 200.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

say "1/3 environment (the first time this fetches PyTorch, which takes a few minutes)"
prepare demo
say "2/3 checkpoint: Gemma 3 270M (weights under the Gemma terms of use)"
"$python" scripts/checkpoint.py
say "3/3 stock and patched generation of the same prompt (about a minute on two cores)"
"$python" scripts/generate.py --compare "$@"
