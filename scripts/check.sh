#!/usr/bin/env bash
# Lint, format and types. Changes nothing.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

prepare check
say "ruff check"
"$python" -m ruff check .
say "ruff format"
"$python" -m ruff format --check .
say "mypy"
"$python" -m mypy --strict swapatch/
