"""The README is true: its code runs, its tables are those of the tests, and what it names exists."""

import doctest
import re
from pathlib import Path

import pytest
from zoo import BY_NAME, SPECIES, Species, named_ids, text_config

import swapatch
from swapatch._compat import CACHE_NAME, NEWEST, OLDEST
from swapatch.families import MODULES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def species_row(species: Species) -> str:
    config = species.make_config(64)
    special = [
        ("images", species.vision),
        ("attended both ways", species.bidirectional),
        ("per-layer embeddings", species.ple),
        ("shared keys and values", species.shared_kv),
        ("mixture of experts", species.moe),
        ("keys are values on global layers", getattr(text_config(config), "attention_k_eq_v", False)),
    ]
    access = "non-causal" if species.bidirectional else "causal"
    tested = ", ".join(name for name, is_so in special if is_so) or "dense"
    return f"| `{config.model_type}` | `{species.architecture}` | {tested} | {access} |"


def species_table() -> str:
    rows = dict.fromkeys(species_row(species) for species in SPECIES)
    return "\n".join(["| `model_type` | class | tested with | access |", "|---|---|---|---|", *rows])


def test_species_table_is_the_test_list() -> None:
    assert species_table() in README, f"the README's table should be:\n{species_table()}"
    assert {text_config(species.make_config(8)).model_type for species in SPECIES} == set(MODULES)


def test_code_with_output_runs() -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", README, re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, "README.md", "README.md", 0)
    assert test.examples
    assert runner.run(test).failed == 0


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_code_without_output_runs(block: str) -> None:
    """Line by line, each on a model that is not patched yet."""
    model = BY_NAME["gemma3_text"].build(16)
    for line in block.splitlines():
        swapatch.unpatch(model)
        scope = {"swapatch": swapatch, "model": model, "ids": named_ids(model, 1, 5)}
        scope |= {"cache": swapatch.CompactCache(model), "handle": swapatch.patch(model)}
        if not line.startswith("handle"):
            swapatch.unpatch(model)
        exec(compile(line.replace("cache=cache", f"{CACHE_NAME}=cache"), "README.md", "exec"), scope)


def test_what_it_names_exists() -> None:
    for path in set(re.findall(r"(?:scripts|tests)/[\w./]+\w", README)):
        assert (ROOT / path).exists(), path
    for name in set(re.findall(r"swapatch\.(\w+)\(", README)):
        assert hasattr(swapatch, name), name
    for file in re.findall(r"`([\w/]+\.py)`", README):
        assert (ROOT / file).exists() or list((ROOT / "swapatch").rglob(file)), file


def test_versions() -> None:
    text = f"transformers>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0] + 1}"
    assert text in README
    assert text in (ROOT / "pyproject.toml").read_text()
