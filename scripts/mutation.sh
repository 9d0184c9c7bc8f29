#!/usr/bin/env bash
# Mutation testing of what a window is made of: geometry, masks, rules, storage and step. It takes hours; not part of CI.
#
#     bash scripts/mutation.sh             # everything that changed since the last run
#     bash scripts/mutation.sh --fresh     # everything
#
# mutmut changes one thing at a time and runs the tests that reach it. A change that no test notices must be listed in
# scripts/survivors.txt, with why that is right; the exit status says whether all are. (mutmut leaves out functions with
# a decorator, such as properties.)
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

prepare test mutation
[[ ${1:-} != --fresh ]] || rm -rf mutants
say "mutants"
HF_HUB_OFFLINE=1 .venv/bin/mutmut run --max-children "${JOBS:-2}"

say "survivors that scripts/survivors.txt does not explain"
explained=$(grep -o '^swapatch[^ ]*' scripts/survivors.txt | sort)
left=$(.venv/bin/mutmut results | sed -n 's/^ *\(swapatch[^:]*\): \(survived\|no tests\)$/\1/p' | sort | comm -23 - <(echo "$explained"))
[[ -z $left ]] || { echo "$left"; fail "look at one with: .venv/bin/mutmut show NAME"; }
echo none
