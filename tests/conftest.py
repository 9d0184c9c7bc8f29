"""Settings that must hold before torch and transformers are first used by a test file."""

import os

# Set before transformers is imported: it reads these once. No test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Threads that wait must sleep: tiny operations that spin for each other crawl when the machine has other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Two threads in all: one for each worker where pytest-xdist runs two of them.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

import pytest
from zoo import BY_NAME, FAMILIES, Family

from swapatch.cache import LAYOUTS


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Every family of the zoo in turn."""
    return request.param


@pytest.fixture(params=("gemma3_text", "gemma4_ple_shared", "gemma3_vision"))
def model_kind(request: pytest.FixtureRequest) -> Family:
    """One family of each kind, for what depends on the cache more than on the model."""
    return BY_NAME[request.param]


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    """Every layout of the sliding buffers in turn."""
    return request.param


# To keep the suite short: every family is run with the anchored layout, and compared with stock at the windows 8 and
# 65; the ring is run on one family of each kind, and all windows on the dense text models. With this variable set,
# every family gets everything.
EVERYTHING = "SWAPATCH_TEST_EVERYTHING"
KINDS = ("gemma3_text", "gemma4_text", "gemma3_vision", "gemma4_ple_shared", "gemma4_unified")
DENSE = ("gemma3_text", "gemma4_text")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if EVERYTHING in os.environ:
        return
    dropped = [item for item in items if _is_repeat(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _is_repeat(item: pytest.Item) -> bool:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    family = str(params.get("family", DENSE[0]))
    if params.get("layout") == "ring" and family not in KINDS:
        return True
    return item.path.name == "test_parity.py" and params.get("window", 8) not in (8, 65) and family not in DENSE
