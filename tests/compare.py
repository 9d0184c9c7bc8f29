"""Comparison helpers: what "the same result as stock" and "exactly undone" mean, in one place.

Hardly any helper needs swapatch: each runs alike on a stock model and on a patched one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from zoo import Model, Species, named_ids, text_config, token_type_key

import swapatch
from swapatch.geometry import Span

TOL = 1e-4  # largest difference of float32 logits that still counts as the same


def cache_key(model: Model) -> str:
    """The forward's keyword for the cache, which is also the field of its output: `cache` or `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in the output of a forward or of `generate`."""
    keys = list(output.keys())
    return output["cache" if "cache" in keys else "past_key_values"]


def stock_or_patched(model: Model, **options: Any) -> Iterator[bool]:
    """The model twice, as it is and patched; says which."""
    yield False
    with swapatch.patch(model, **options):
        yield True


class Forced(NamedTuple):
    logits: Tensor  # [batch, positions, vocab]
    cache: Any


@torch.no_grad()
def forced(
    model: Model,
    ids: Tensor,
    *,
    prompt: int,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    token_types: Tensor | None = None,
    chunks: Sequence[int] = (),
    **first: Any,
) -> Forced:
    """Feed `ids` [batch, tokens] through the model's own cache and keep the logits of every position.

    One forward over the first `prompt` tokens, one over each of `chunks` (so many tokens each), then one a token.
    `attention_mask` is [batch, tokens], or [batch, seen + tokens] if a `cache` is given that has seen some; with it,
    the positions are those that `generate` makes. `token_types` has the same width, or ends earlier; as in `generate`
    the one-token steps get none. `first` goes to the first forward only: pixels, for instance.
    """
    seen = cache.get_seq_length() if cache is not None else 0
    logits = []
    for start, end in _spans(prompt, chunks, ids.shape[1]):
        inputs: dict[str, Any] = {"input_ids": ids[:, start:end], "use_cache": True}
        if cache is not None:
            inputs[cache_key(model)] = cache
        if attention_mask is not None:
            inputs |= _masked(attention_mask.to(ids.device), seen + start, seen + end)
        if token_types is not None and start < prompt + sum(chunks):
            # The block mask looks types up by absolute position: hence all of them from the start, not the chunk's own.
            inputs[token_type_key(model)] = token_types[:, : seen + end]
        output = model(**inputs, **(first if start == 0 else {}))
        cache = cache_of(output)
        logits.append(output.logits)
    return Forced(torch.cat(logits, dim=1), cache)


def teacher_forced(model: Model, ids: Tensor, *, prompt: int, **options: Any) -> Tensor:
    """The logits of `forced`, [batch, tokens, vocab]."""
    return forced(model, ids, prompt=prompt, **options).logits


def _spans(prompt: int, chunks: Sequence[int], total: int) -> Iterator[tuple[int, int]]:
    start = 0
    for size in (prompt, *chunks):
        yield start, start + size
        start += size
    if start > total:
        raise ValueError(f"prompt and chunks take {start} tokens, but there are only {total}")
    for position in range(start, total):
        yield position, position + 1


def _masked(mask: Tensor, start: int, end: int) -> dict[str, Tensor]:
    if mask.shape[1] < end:
        raise ValueError(f"attention_mask must cover {end} tokens. Got {mask.shape[1]}")
    # As generate counts: padding does not advance the position, and stands at 0 itself.
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}


def assert_same_logits(got: Tensor, want: Tensor, mask: Tensor | None = None, tol: float = TOL) -> None:
    """Fail at the first position, in time order, whose logits [batch, positions, vocab] differ by more than `tol`.

    `mask` [batch, positions] says which positions count (those of real tokens). NaN is never the same as anything.
    """
    if got.shape != want.shape:
        raise AssertionError(f"logits must have shape {tuple(want.shape)}. Got {tuple(got.shape)}")
    difference = (got.double() - want.double()).abs().amax(-1)
    difference = torch.where(difference.isfinite(), difference, torch.inf)
    if mask is not None:
        difference = difference.masked_fill(~mask.bool().to(difference.device), 0.0)
    bad = (difference > tol).nonzero()
    if not len(bad):
        return
    row, position = min(bad.tolist(), key=lambda place: (place[1], place[0]))
    worst_row, worst_position = divmod(int(difference.argmax()), difference.shape[1])
    raise AssertionError(
        f"logits differ first at row {row}, position {position} of {want.shape[1]}: by {difference[row, position]:.3g} "
        f"(allowed {tol:g}; best token {int(got[row, position].argmax())}, expected "
        f"{int(want[row, position].argmax())}); {len(bad)} of {difference.numel()} places differ, "
        f"most at row {worst_row}, position {worst_position}: by {difference[worst_row, worst_position]:.3g}"
    )


Gradients = dict[str, Tensor]


def parameter_gradients(model: nn.Module, loss: Tensor) -> Gradients:
    """The gradient of every parameter that has one, by name, from one backward pass."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(got: Gradients, want: Gradients) -> float:
    """The largest difference of any gradient, relative to the largest value that it has.

    Gradients that are nothing but rounding, below a millionth of the largest one, are compared with that.
    """
    if got.keys() != want.keys():
        raise AssertionError(f"gradients of {sorted(got.keys() ^ want.keys())} on one side only")
    floor = 1e-6 * max(float(grad.abs().max()) for grad in want.values())
    errors = {name: (got[name] - want[name]).abs().max() / max(want[name].abs().max(), floor) for name in want}
    return float(max(torch.where(error.isfinite(), error, torch.inf) for error in errors.values()))


def assert_same_gradients(got: Gradients, want: Gradients, tol: float = TOL) -> None:
    """Fail unless every gradient is the same, relative to the largest value that it has."""
    error = gradient_error(got, want)
    if not error <= tol:
        raise AssertionError(f"gradients differ by {error:.3g} of their largest value (allowed {tol:g})")


class Sensitivity(NamedTuple):
    """Largest differences of the logits: window - 1 and window + 1 against window, in the prompt and in the steps."""

    narrower_prompt: float
    narrower_steps: float
    wider_prompt: float
    wider_steps: float


def sensitivity(
    species: Species, window: int, *, prompt: int | None = None, steps: int = 8, seed: int = 0
) -> Sensitivity:
    """How far stock logits move when the window is off by one, for a prompt of `window + 1` tokens if not told."""
    prompt = window + 1 if prompt is None else prompt
    model = species.build(window, seed=seed)
    ids = named_ids(model, 1, prompt + steps, seed)
    want = teacher_forced(model, ids, prompt=prompt)
    moved: list[float] = []
    for other in (window - 1, window + 1):
        got = teacher_forced(species.with_window(model, other), ids, prompt=prompt)
        difference = (got - want).abs().amax(-1)[0]
        moved += [float(difference[:prompt].max()), float(difference[prompt:].max())]
    return Sensitivity(*moved)


def assert_sensitive(species: Species, window: int, *, tol: float = TOL, **options: Any) -> Sensitivity:
    """Prove that a comparison with `tol` can fail: a window one off is noticed, in the prompt and in the steps."""
    moved = sensitivity(species, window, **options)
    blind = [name for name, size in moved._asdict().items() if not size > tol]
    if blind:
        raise AssertionError(
            f"{species.name}, window {window}: logits do not move by more than {tol:g} for {blind}: {moved}"
        )
    return moved


class Generated(NamedTuple):
    tokens: Tensor  # [batch, prompt + n]
    logits: Tensor  # [batch, n, vocab], as the model gave them
    cache: Any


def greedy(model: Model, ids: Tensor, n: int, **options: Any) -> Generated:
    """`n` tokens from stock `generate`, with the logits of each step; no end token stops it early."""
    vocab = text_config(model).vocab_size
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": vocab, "max_new_tokens": n}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(input_ids=ids, **settings | options)
    return Generated(output.sequences, torch.stack(output.logits, dim=1), cache_of(output))


@contextmanager
def unseen(module: nn.Module, look: Callable[..., None]) -> Iterator[None]:
    """Hook a sliding layer to look at its arguments by name, without the calls being left to stock for it."""
    hook = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with mock.patch("swapatch.foreign.is_known", return_value=True):
            yield
    finally:
        hook.remove()


def layer_tensors(layer: Any) -> list[Tensor]:
    """The key and value buffers of a cache layer: none before its first update, nor in one that shares another's.

    Those of a bounded layer, whose `keys` are what it shows of them.
    """
    names = ("key_rows", "value_rows") if hasattr(layer, "key_rows") else ("keys", "values")
    tensors = [getattr(layer, name, None) for name in names]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def storage_bytes(cache: Any) -> int:
    """Bytes that the cache keeps alive: whole storages, each once, whatever small views the layers hold of them."""
    return _bytes([tensor for layer in cache.layers for tensor in layer_tensors(layer)])


def sliding_rows(cache: Any) -> list[int]:
    """For each sliding layer with buffers, the rows that its storage has room for (not the rows of its view)."""
    rows = []
    for layer in cache.layers:
        tensors = layer_tensors(layer)
        if getattr(layer, "is_sliding", False) and tensors:
            per_row = sum(tensor[..., :1, :].numel() * tensor.element_size() for tensor in tensors)
            rows.append(_bytes(tensors) // per_row)
    return rows


def unwritten_rows(layer: Any) -> Tensor:
    """Which rows of a sliding buffer of ours hold no position, bool ``[rows]``."""
    unwritten = torch.ones(layer.rows, dtype=torch.bool)
    for part in layer.pieces(Span(layer.origin, layer.seen)):
        unwritten[part.start : part.stop] = False
    return unwritten


def _bytes(tensors: Sequence[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# --- "undo is exact": every reachable slot holds the very object that it held before ---------------------------------

MODULES = (
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.integrations.sdpa_attention",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gemma4.modeling_gemma4",
    "transformers.models.gemma4_unified.modeling_gemma4_unified",
)
# Not state of anybody's: book-keeping of Python and `copy`, and what torch.compile adds to the globals it traced.
_IGNORED = ("__builtins__", "__warningregistry__", "_abc_impl", "__slotnames__")
_IGNORED_PREFIXES = ("__compiled_fn", "__resume_at", "__import_", "__builtins_dict__", "_fn_globals")


@dataclass
class Snapshot:
    """Slots by the name of their owner. The objects are kept, so that an identity cannot be reused meanwhile."""

    slots: dict[str, dict[Any, Any]] = field(default_factory=dict)


def snapshot(model: nn.Module) -> Snapshot:
    """What `assert_unchanged` compares: the model's modules and configs, their classes, and transformers' globals.

    The first stock call with `output_hidden_states` or `output_attentions` installs lasting hooks on the model. A test
    that makes such calls makes one before it takes the snapshot.
    """
    slots: dict[str, dict[Any, Any]] = {}
    classes: set[type] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        _add_object(slots, name or "model", module)
        classes.update(type(module).__mro__)
    for name in MODULES:
        if (module := sys.modules.get(name)) is not None:
            _add_globals(slots, classes, name, vars(module))
    for cls in classes - {object}:
        _add(slots, f"class {cls.__module__}.{cls.__qualname__}", dict(vars(cls)))
    return Snapshot(slots)


def assert_unchanged(model: nn.Module, snap: Snapshot) -> None:
    """Fail with the name of the first slot that was added, removed, or holds another object than at `snapshot`."""
    now = snapshot(model).slots
    for owner, before in snap.slots.items():
        if owner not in now:
            raise AssertionError(f"{owner} is gone")
        for name in before.keys() | now[owner].keys():
            old, new = before.get(name, _MISSING), now[owner].get(name, _MISSING)
            if old is not new and not _same_value(old, new):
                raise AssertionError(f"{owner}: {name!r} was {_describe(old)}, is {_describe(new)}")
    if added := [owner for owner in now if owner not in snap.slots]:
        raise AssertionError(f"{added[0]} was added")


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _add_object(slots: dict[str, dict[Any, Any]], name: str, owner: Any) -> None:
    """The attributes of a module, and one level into what they hold: hooks, children, parameters, configs."""
    _add(slots, name, vars(owner) | {"__class__": type(owner)})
    for key, value in vars(owner).items():
        if isinstance(value, Mapping | list | set | tuple):
            _add(slots, f"{name}.{key}", _items(value))
        elif type(value).__name__.endswith("Config"):
            _add(slots, f"{name}.{key}", dict(vars(value)))


def _add_globals(slots: dict[str, dict[Any, Any]], classes: set[type], name: str, values: dict[str, Any]) -> None:
    _add(slots, name, dict(values))
    for key, value in values.items():
        if isinstance(value, type) and value.__module__.startswith("transformers."):
            classes.update(value.__mro__)
        elif isinstance(value, Mapping | list | set) and key not in _IGNORED:
            _add(slots, f"{name}.{key}", _items(value))


def _items(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, set):
        return dict.fromkeys(value, True)
    return dict(enumerate(value))


def _add(slots: dict[str, dict[Any, Any]], name: str, items: MutableMapping[Any, Any]) -> None:
    kept = {key: value for key, value in items.items() if not _ignored(key)}
    slots[name] = kept


def _ignored(key: Any) -> bool:
    return isinstance(key, str) and (key in _IGNORED or key.startswith(_IGNORED_PREFIXES))


def _same_value(old: Any, new: Any) -> bool:
    # Numbers and text have no identity worth keeping: an equal one is the same.
    return type(old) is type(new) and isinstance(old, int | float | str | bytes) and old == new


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
