#!/usr/bin/env bash
# Build the wheel and the sdist, install the wheel into a clean environment of its own, and use it there: dist/, .package/.
# shellcheck source=scripts/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

say "building"
rm -rf dist .package
"$(find_python)" -m venv .package
python=.package/bin/python
upgrade_pip
"$python" -m pip install -q --disable-pip-version-check build
"$python" -m build --outdir dist .
say "installing into a clean environment"
"$(find_python)" -m venv --clear .package
upgrade_pip
pip_install dist/*.whl
say "using it"
cd .package
bin/python -m swapatch env
bin/python -c '
import torch, transformers, swapatch
config = transformers.Gemma3TextConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=64)
print(swapatch.patch(transformers.Gemma3ForCausalLM(config)))'
