"""How rectangles are computed, by a table of what was measured, which ``scripts/bench --only choices`` writes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

_NATIVE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

EMULATED = frozenset(dtype for dtype, asked in _NATIVE.items() if not getattr(torch.ops.mkldnn, asked, bool)())
"""The dtypes that the CPU has no instructions for. Found out once: a compiler could not ask."""


class Choice(NamedTuple):
    """How to compute.

    Attributes:
        block: queries in one block.
        products: by two matrix products and a softmax, in place of torch's fused kernel.
        together: blocks that look alike in one call.
    """

    block: int = 128
    products: bool = False
    together: bool = False

    def __str__(self) -> str:
        """In words, which :meth:`named` reads."""
        return f"blocks of {self.block}" + ", products" * self.products + ", together" * self.together

    @classmethod
    def named(cls, words: str) -> Choice:
        """The choice that prints like this.

        >>> Choice.named("blocks of 64, together")
        Choice(block=64, products=False, together=True)
        """
        return cls(int(words.split(",")[0].split()[-1]), "products" in words, "together" in words)


def choose(query: Tensor) -> Choice:
    """The choice for these queries, ``[batch, heads, queries, head_dim]``; a plain one where nothing was measured."""
    return _chosen(query.device.type, query.dtype)


@cache
def _chosen(device: str, dtype: torch.dtype) -> Choice:
    unmeasured = Choice(together=device == "cuda")  # there each call is a launch
    choice = table().get(key(device, dtype), unmeasured)
    return choice._replace(products=False) if choice.products and not _keeps_precision(device, dtype) else choice


def key(device: str, dtype: torch.dtype) -> str:
    """What the table knows a kind of tensor by: ``"cpu bfloat16"``, or ``"cpu bfloat16, emulated"``."""
    emulated = ", emulated" if device == "cpu" and dtype in EMULATED else ""
    return f"{device} {str(dtype).removeprefix('torch.')}{emulated}"


@cache
def table() -> dict[str, Choice]:
    """All that was measured."""
    rows = json.loads(files(__package__).joinpath("table.json").read_text(encoding="utf-8"))["choices"]
    return {name: Choice(**row) for name, row in rows.items()}


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    """``query @ key.T`` of tensors in half precision, ``[batch, rows, head_dim]``, with the precision of float32.

    A matrix product adds in float32 and rounds once, at the end. What is lost then is the result of a second product,
    which begins with the first one's taken away: both together have twice the digits.
    """
    turned = key.transpose(1, 2)
    rounded = torch.bmm(query, turned)
    return rounded.float().add_(torch.baddbmm(rounded, query, turned, beta=-1))


def _keeps_precision(device: str, dtype: torch.dtype) -> bool:
    """Whether matrix products here do what :func:`scores_of` is made of."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 64, 64, generator=generator).to(device, dtype) for _ in range(2))
    exact = query.double() @ key.double().transpose(1, 2)
    return bool((scores_of(query, key) - exact).abs().max() < 1e-4 * exact.abs().max())
