"""Settings that must hold before torch and transformers are first used by a test file."""

import os

# Set before transformers is imported: it reads these once. No test may reach the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Threads that wait must sleep: tiny operations that spin for each other crawl when the machine has other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from typing import Any

import torch

# Two threads in all: one for each worker where pytest-xdist runs two of them.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

import pytest

pytest.register_assert_rewrite("generation")  # what its asserts compared is shown, as in a test file

import zoo
from zoo import BY_NAME, SPECIES, Species

import swapatch
from swapatch.layers import LAYOUTS


@pytest.fixture(params=("cpu", "cuda") if torch.cuda.is_available() else None)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the zoo makes its models and inputs: the CPU, and in a second test of the same name a GPU if there is one.

    Files whose tests run on both use it for all of them.
    """
    monkeypatch.setattr(zoo, "DEVICE", torch.device(getattr(request, "param", "cpu")))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the convolutions in vision towers
    return zoo.DEVICE


@pytest.fixture(params=SPECIES, ids=str)
def species(request: pytest.FixtureRequest) -> Species:
    """Every species of the zoo in turn."""
    return request.param


@pytest.fixture(params=("gemma3_text", "gemma4_ple_shared", "gemma3_vision"))
def model_kind(request: pytest.FixtureRequest) -> Species:
    """One species of each kind, for what depends on the cache more than on the model."""
    return BY_NAME[request.param]


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    """Every layout of the sliding buffers in turn."""
    return request.param


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[swapatch.CompactCache]:
    """Every compact cache that is made during the test, whoever makes it."""
    caches: list[swapatch.CompactCache] = []
    construct = swapatch.CompactCache.__init__

    def record(self: swapatch.CompactCache, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(swapatch.CompactCache, "__init__", record)
    return caches


# Three sizes of the suite. The core is what a contributor waits for: one species, one of each kind where the model
# matters, all of them in the tests that hold the promise of equal results, and nothing that is marked slow. With
# `--all`, which CI runs, every species is run with the anchored layout, and compared with stock at the windows 8 and
# 65; the ring is run on one species of each kind, and all windows on the dense text models. With `--everything` every
# species gets everything.
CORE = ("gemma3_text", "gemma3_vision", "gemma4_ple_shared")
KINDS = (*CORE, "gemma4_text", "gemma4_unified")
DENSE = ("gemma3_text", "gemma4_text")
PROMISE = (
    "test_every_position_and_step",
    "test_generate_gives_the_same_tokens",
    "test_gradients_of_every_parameter",
    "test_every_family_on_spyre",
)
BY_KIND = ("test_parity.py", "test_windows.py", "test_images.py", "test_sharing.py", "test_unnoticed.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="all tests, not only the core")
    parser.addoption("--everything", action="store_true", help="all tests, with every species, window and layout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--everything"):
        return
    whole = config.getoption("--all")
    dropped = [item for item in items if _is_repeat(item) or not (whole or _is_core(item))]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_repeat(item: pytest.Item) -> bool:
    params = _params(item)
    species = str(params.get("species", DENSE[0]))
    if params.get("layout") == "ring" and species not in KINDS:
        return True
    return item.path.name == "test_parity.py" and params.get("window", 8) not in (8, 65) and species not in DENSE


def _is_core(item: pytest.Item) -> bool:
    params = _params(item)
    species = str(params.get("species", params.get("model_kind", CORE[0])))
    if item.get_closest_marker("slow") or (params.get("layout") == "ring" and species != CORE[0]):
        return False
    if item.path.name == "test_parity.py" and params.get("window", 8) not in ((8, 65) if species == CORE[0] else (8,)):
        return False
    if item.name.partition("[")[0] in PROMISE:
        return True
    return species in (CORE if item.path.name in BY_KIND else CORE[:1])
