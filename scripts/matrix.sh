#!/usr/bin/env bash
# The test suite against several versions of transformers, each in an environment of its own under .matrix/.
#
#     bash scripts/matrix.sh                      # all versions of the README's table
#     bash scripts/matrix.sh 5.15.1 5.24.0        # these
#     bash scripts/matrix.sh quantized            # the newest, and weights of bitsandbytes, torchao and quanto
#     PYTEST_ARGS="-k parity" bash scripts/matrix.sh 5.15.1
#
# One line for each version at the end; the exit status says whether all passed.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

versions=("$@")
[[ ${#versions[@]} -gt 0 ]] || versions=(5.15.1 5.17.0 5.18.0 5.20.2 5.22.2 5.23.0 5.24.0 quantized)

base=$(find_python)
outcome=()
failed=0
for version in "${versions[@]}"; do
    say "transformers $version"
    venv=.matrix/$version
    "$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$base" -m venv --clear "$venv"
    # What pins transformers for the project must not pin it here; huggingface-hub and tokenizers follow transformers.
    grep -v '^transformers' "$constraints" > "$venv/constraints.txt"
    python=$venv/bin/python
    upgrade_pip
    wanted=(transformers=="$version" -e . --group test) args=(--deselect tests/test_checkpoint.py)
    if [[ $version == quantized ]]; then wanted=(transformers -e . --group test --group quantize) args=(tests/test_quantized.py); fi
    "$python" -m pip install -q --disable-pip-version-check -c "$venv/constraints.txt" "${wanted[@]}" ||
        fail "transformers $version could not be installed (pip's own words are above)"
    # shellcheck disable=SC2086  # PYTEST_ARGS holds several words
    if HF_HUB_OFFLINE=1 "$python" -m pytest -q -n 2 -p no:cacheprovider --all "${args[@]}" ${PYTEST_ARGS:-} > "$venv/log.txt" 2>&1; then
        word=passed
    else
        word=FAILED
        failed=1
    fi
    tail -n 1 "$venv/log.txt"
    outcome+=("transformers $version: $word: $(tail -n 1 "$venv/log.txt")")
done

say "outcome"
printf '%s\n' "${outcome[@]}"
exit $failed
