# shellcheck shell=bash
#
# Sourced by the other scripts: goes to the project root and offers
#
#     prepare GROUP...     .venv with swapatch (editable) and these dependency groups of pyproject.toml
#     say TEXT             a line of progress
#     fail TEXT            a plain message, then the end
#
# and $python, the interpreter of .venv. A second run with nothing changed starts no pip at all.
# PYTHON=... chooses the interpreter that .venv is made with.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
constraints=scripts/constraints.txt

say() { printf '== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

prepare() {
    make_venv
    if installed "$@"; then
        say "environment: .venv is up to date ($*)"
        return
    fi
    upgrade_pip
    say "environment: installing swapatch with: $*"
    # shellcheck disable=SC2046  # one word for each flag and name is meant
    pip_install -e . $(printf -- '--group %s ' "$@")
    stamp "$@"
}

make_venv() {
    if [[ -x $python ]] && "$python" -m pip --version > /dev/null 2>&1; then
        new_enough "$python" || fail ".venv has $("$python" --version), swapatch needs 3.11 or newer: delete .venv and run this again"
        return
    fi
    [[ ! -e .venv ]] || fail ".venv exists but has no working python and pip in it: delete it and run this again"
    local base
    base=$(find_python)
    "$base" -c 'import venv, ensurepip' 2> /dev/null ||
        fail "$base has no venv module (on Debian and Ubuntu it is a package of its own: apt install python3-venv)"
    say "environment: making .venv with $("$base" --version)"
    "$base" -m venv .venv || { rm -rf .venv; fail "$base could not make .venv (its own words are above)"; }
}

# The interpreter to make .venv with: the first that is new enough.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "swapatch needs Python 3.11 or newer; found $(python3 --version 2> /dev/null || echo 'no python3'). PYTHON=/path/to/python chooses another"
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; }

# A group is installed when its stamp is newer than the two files that say what belongs to it, and names this folder:
# in a copy of the project, .venv still points at the original.
installed() {
    local group stamp
    for group in "$@"; do
        stamp=.venv/.installed-$group
        [[ $stamp -nt pyproject.toml && $stamp -nt $constraints && $(< "$stamp") == "$PWD" ]] || return 1
    done
}

stamp() {
    local group
    for group in "$@"; do pwd > ".venv/.installed-$group"; done
}

# `pip install --group` came with pip 25.1; a fresh venv often has an older one.
upgrade_pip() {
    "$python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' && return
    say "environment: upgrading pip"
    "$python" -m pip install -q --disable-pip-version-check --upgrade pip || fail "pip could not be upgraded (its own words are above)"
}

# pip with one short line for each thing it fetches, so that a slow first run is seen to move.
pip_install() {
    "$python" -m pip install --disable-pip-version-check --progress-bar off -c "$constraints" "$@" | show_downloads ||
        fail "pip could not install what is needed (its own words are above)"
}

show_downloads() {
    local line
    while IFS= read -r line; do
        case $line in
            *Downloading\ *) [[ $line == *.metadata* ]] || echo "   downloading $(basename "${line#*Downloading }")" ;;
            Installing\ collected*) echo "   installing $(wc -w <<< "${line#*: }" | tr -d ' ') package(s)" ;;
        esac
    done
}
