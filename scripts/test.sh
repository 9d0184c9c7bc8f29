#!/usr/bin/env bash
# The core of the test suite, with what it needs; with --all the whole of it. Arguments go to pytest, such as -k cache.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

prepare test demo
say "checkpoint for the real-model tests"
"$python" scripts/checkpoint.py
say "tests"
# Nothing is fetched from here on; a test that tries is to fail at once.
HF_HUB_OFFLINE=1 "$python" -m pytest -n 2 "$@"
