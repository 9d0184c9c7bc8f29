"""How many graphs torch.compile makes, on any device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch._dynamo.utils import counters


@dataclass
class Watch:
    """What torch.compile has done since the watch began."""

    _before: dict[str, int] = field(default_factory=lambda: _now())

    @property
    def graphs(self) -> int:
        """New graphs, one for each specialisation of each compiled frame."""
        return _now()["graphs"] - self._before["graphs"]

    @property
    def breaks(self) -> int:
        """Graph breaks."""
        return _now()["breaks"] - self._before["breaks"]


@contextmanager
def watched() -> Iterator[Watch]:
    """Count the graphs made within. `torch._dynamo.reset()` starts over: not within."""
    yield Watch()


def import_inductor() -> None:
    """Import what torch.compile would at its first use, whose deprecation warnings must not fail a test.

    And let it put its marks on torch's own classes, which else would seem to be left behind by whoever compiles first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx
        import torch._inductor.fx_passes.post_grad  # noqa: F401
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


def _now() -> dict[str, int]:
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}
