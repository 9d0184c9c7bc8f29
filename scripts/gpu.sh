#!/usr/bin/env bash
# On a machine with a GPU, in under eight minutes: the tests that run there, then the short benchmark. The figures come
# as a table to paste into the README, in bench-results/gpu.
# An interpreter that sees the GPU and has what is needed is used as it is: nothing is installed over its torch.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

sees_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' > /dev/null 2>&1; }

is_ready() { "$1" -c 'import accelerate, hypothesis, pytest, transformers, wrapt, xdist' > /dev/null 2>&1; }

find_gpu_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 "$python"; do
        if sees_gpu "$candidate" && is_ready "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

found=$(find_gpu_python)
if [[ -n $found ]]; then
    python=$found
else
    nvidia-smi > /dev/null 2>&1 || fail "no GPU: no torch here sees one, and nvidia-smi neither"
    prepare test bench
    sees_gpu "$python" || fail "there is a GPU, but the torch of .venv does not see it: install a CUDA build into .venv"
fi
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1  # swapatch itself needs no installation
results=bench-results/gpu
mkdir -p "$results"

say "tests on the GPU (at most three minutes)"
status=0
timeout --signal=INT 170 "$python" -m pytest -q -n 4 -p no:cacheprovider -k "cuda" tests/test_parity.py tests/test_attention.py \
    tests/test_windows.py tests/test_generate_static.py tests/test_compile.py 2>&1 | tee "$results/tests.txt" || status=1
say "benchmark (at most five minutes; what is done by then is kept)"
timeout 290 "$python" scripts/bench --device cuda --out "$results" 2>&1 | tee "$results/bench.txt" || status=1
say "figures: $results/bench.md"
cat "$results/bench.md"
exit $status
