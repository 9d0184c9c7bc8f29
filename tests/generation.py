"""Every way to call `generate`: a patched model gives what the stock one gives, from a compact cache where it applies.

This is what the files of those tests have in common: making a call, and looking at what it did.

Whole outputs are compared: tokens, logits of every step, scores, hidden states, whatever the mode returns. A watcher
tells for each forward whether the sliding layers attended compactly or ran stock code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from compare import TOL, cache_of, layer_tensors, sliding_rows, unseen
from torch import Tensor, nn
from zoo import BY_NAME, OLD, SPECIES, Model, Species, named_ids, text_config, text_model

import swapatch
from swapatch.geometry import ceil64
from swapatch.step import Step

WINDOWS = (8, 65)
PROMPT = 116  # past both windows, but less than a buffer holds: rows are given up while tokens are generated
NEW = 24
SOME = [BY_NAME[n] for n in ("gemma3_text", "gemma4_ple_shared", "gemma4_vision", "gemma4_unified") if n in BY_NAME]
"""One species of each kind, for modes that hardly depend on the species."""
NO_END = text_config(SPECIES[0].make_config(8)).vocab_size  # an end token that no model ever gives

BEAMS = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
STATIC = {"cache_implementation": "static"}

some_species = pytest.mark.parametrize("species", SOME, ids=str)


class Run(NamedTuple):
    output: Any
    compact: int  # forwards in which the sliding layers attended compactly
    stock: int  # and those in which they ran stock code


def patched(model: Model, layout: str | None) -> AbstractContextManager[Any]:
    """The model patched for a block of code, or left alone without a layout."""
    return nullcontext() if layout is None else swapatch.patch(model, layout=layout)


@contextmanager
def watched(model: Model) -> Iterator[list[bool]]:
    """For each forward of the block: whether the first sliding layer got a step in the place of its mask."""
    seen: list[bool] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(isinstance(kwargs["attention_mask"], Step))

    attention = next(layer.self_attn for layer in text_model(model).layers if layer.self_attn.is_sliding)
    with unseen(attention, look):
        yield seen


def run(model: Model, layout: str | None, call: Callable[[Model], Any]) -> Run:
    with watched(model) as seen, patched(model, layout):
        output = call(model)
    return Run(output, seen.count(True), seen.count(False))


def outcome(model: Model, layout: str | None, call: Callable[[Model], Any]) -> Run | Exception:
    """A run, or the error that it ended with: what one machine or version can do, another cannot."""
    try:
        return run(model, layout, call)
    except Exception as error:
        return error


def generate(model: Model, tokens: int, **options: Any) -> Any:
    """Stock `generate` with all that it returns; nothing ends it early unless told."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": NO_END, "max_new_tokens": tokens}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)  # for those that sample
    return model.generate(**settings | options)


def prompt(species: Species, model: Model, *lengths: int) -> dict[str, Tensor]:
    """A left-padded batch; models that take images get two in each long row, the last one near its end."""
    images = [[(20, 5), (length - 7, 5)] if length > 50 else [] for length in lengths]
    return species.inputs(model, lengths, images=images if species.vision else None)


def spoken(model: Model, ids: Tensor, mask: Tensor, more: int) -> dict[str, Any]:
    """So many new ids after these, and the mask for all of them."""
    ids = torch.cat([ids, named_ids(model, len(ids), more, seed=more)], dim=1)
    return {"input_ids": ids, "attention_mask": nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)}


def draft(assistant: Model, tokens: int) -> Model:
    """Let the assistant draft exactly so many tokens a round, however sure it is."""
    config = assistant.generation_config
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


def skip_if_stock_cannot(model: Model, call: Callable[[Model], Any]) -> None:
    """Versions before the newest fail at some modes themselves; the newest must not, or its tests would be empty."""
    if OLD and isinstance(error := outcome(model, None, call), Exception):
        pytest.skip(f"transformers {transformers.__version__} cannot do this: {error!r:.100}")


def assert_same(got: Any, want: Any) -> None:
    """Everything that `generate` returns but the cache: tokens equal, numbers within the tolerance."""
    torch.testing.assert_close(_comparable(got), _comparable(want), atol=TOL, rtol=0)


def assert_same_outcome(got: Run | Exception, want: Run | Exception) -> bool:
    """Whether both gave something, which then is the same; otherwise both failed with the same kind of error."""
    if isinstance(want, Exception):
        assert type(got) is type(want)
        return False
    assert isinstance(got, Run), repr(got)
    assert_same(got.output, want.output)
    return True


def _comparable(output: Any) -> dict[str, Any]:
    return {name: value for name, value in output.items() if name not in ("cache", "past_key_values")}


def assert_compact(got: Run, want: Run, model: Model, layout: str, recorded: int = 0) -> None:
    """The run kept a compact cache, bounded though more tokens came than it has rows, and used it in every forward."""
    cache, stock = cache_of(got.output), cache_of(want.output)
    assert not isinstance(stock, swapatch.CompactCache)
    assert_bounded(cache, model, layout, recorded)
    assert cache.get_seq_length() == stock.get_seq_length()
    assert cache.get_seq_length() > max(sliding_rows(cache)) or recorded
    assert (got.compact, got.stock) == (want.stock, 0)
    assert want.compact == 0


def assert_bounded(cache: Any, model: Model, layout: str, recorded: int = 0) -> None:
    """A compact cache of this layout, finite, with no more rows than the window and the recorded tokens need."""
    assert isinstance(cache, swapatch.CompactCache)
    assert cache.layout == layout
    assert max(sliding_rows(cache)) <= ceil64(text_config(model).sliding_window + 63) + ceil64(recorded)
    assert all(tensor.isfinite().all() for layer in cache.layers for tensor in layer_tensors(layer))
