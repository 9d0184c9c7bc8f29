#!/usr/bin/env bash
# Change the code of geometry, masks, rules, storage and step line by line, and see whether a test notices each change.
# mutmut does it, in a copy under .mutants; hours, so not in CI. Then: bash scripts/mutate.sh results, or show NAME.
# Survivors that are no fault, each with its reason, are listed in scripts/survivors.md.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

prepare test mutation
mkdir -p .mutants
git ls-files -z | xargs -0 cp --parents -t .mutants
cd .mutants
exec "../${python%python}mutmut" "${@:-run}"
