"""What the card runs, and where: the table of the device's supported operations, by the plain names of aten.

A plain name has no namespace, overload or trailing underscore, and is the card's name for what PyTorch calls several
things: `_softmax` is `softmax`, `narrow` is `slice`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

EAGER, COMPILED, FALLBACK, BROKEN = "eager", "compiled", "fallback", "broken"

_NAMES = {
    EAGER: (
        "mm bmm matmul linear softmax layer_norm rms_norm silu relu sigmoid add sub mul div where eq ne lt le gt ge "
        "sum mean amax max rsqrt exp sin cos pow clamp transpose permute t unbind cat stack zeros ones full empty pad "
        "embedding index_select scaled_dot_product_attention"
    ),
    COMPILED: (
        "gelu sliding_window_attention view clone squeeze unsqueeze slice split expand to fill slice_scatter index_add "
        "repeat flip"
    ),
    FALLBACK: (
        "arange tril cumsum isin argmax bitwise_or index_copy "
        "rand randn randint randperm normal uniform random bernoulli multinomial exponential"
    ),
    BROKEN: "roll",
}
SUPPORT = {name: where for where, names in _NAMES.items() for name in names.split()}
"""Where an operation runs. Eager ones compile, too; one that is not here falls back to the CPU, and is not compiled.
`copy` is not here: it runs anywhere between equal layouts, and converts nothing."""

_ALIASES = {
    "addmm": "linear",
    "baddbmm": "bmm",
    "native_layer_norm": "layer_norm",
    "rsub": "sub",
    "maximum": "max",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "constant_pad_nd": "pad",
    "concat": "cat",
    "zeros_like": "zeros",
    "new_zeros": "zeros",
    "ones_like": "ones",
    "new_ones": "ones",
    "full_like": "full",
    "new_full": "full",
    "scalar_tensor": "full",
    "empty_like": "empty",
    "empty_strided": "empty",
    "new_empty": "empty",
    "new_empty_strided": "empty",
    "unsafe_view": "view",
    "reshape_alias": "view",
    "reshape": "view",
    "alias": "view",
    "detach": "view",
    "lift_fresh": "view",
    "contiguous": "clone",
    "narrow": "slice",
    "select": "slice",
    "split_with_sizes": "split",
    "chunk": "split",
    "to_copy": "to",
    "zero": "fill",
}

WHOLE = frozenset({"matmul", "linear", "rms_norm", "scaled_dot_product_attention"})
"""One operation to the card, several to PyTorch."""

VIEWS = frozenset({"view", "transpose", "permute", "t", "unbind", "squeeze", "unsqueeze", "slice", "split", "expand"})

MOVES = frozenset({"where", "cat", "stack", "pad", "embedding", "index_select", "zeros", "ones", "full", "empty"})
"""Eager operations that compute nothing: bool tensors pass through them."""

CUTS = frozenset({"slice", "split", "unbind"})
"""What takes a part of a dimension."""


class Op(NamedTuple):
    """An operation in a compiled graph. `last`: it is cut, joined or turned round on the last dimension."""

    name: str
    last: bool = False


def plain(name: str) -> str:
    """The plain name of an operation such as "aten::_softmax", "aten::narrow" or "aten::zero_"."""
    name = name.rpartition(":")[2].strip("_")
    return _ALIASES.get(name, name)


def where(name: str) -> str:
    """Where the operation of this plain name runs when it is called eagerly."""
    return SUPPORT.get(name, FALLBACK)


def not_compilable(ops: Iterable[Op]) -> set[Op]:
    """Those which a graph for the card must not have: they do not compile, or to wrong numbers.

    `index_copy` is not among them, though on another dimension than the device's first it costs a relayout, which
    `Counts.relayouts` says.
    """
    ops = set(ops)
    wrong = {op for op in ops if where(op.name) not in (EAGER, COMPILED) and op.name not in ("index_copy", "copy")}
    wrong |= {op for op in ops if op == ("flip", True)}
    cuts = {op for op in ops if op.last and op.name in CUTS}
    if cuts and ("cat", True) in ops:  # as rotate_half does
        wrong |= cuts | {Op("cat", True)}
    return wrong
