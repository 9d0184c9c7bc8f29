"""Weights of other makes: int8 by bitsandbytes and torchao, int8 and int4 by quanto, before the patch and after it."""

from collections.abc import Callable
from typing import Any

import pytest
from compare import assert_same_logits, greedy
from torch import nn
from zoo import BY_NAME, Model, named_ids, text_model

import swapatch

WINDOW, PROMPT, NEW = 8, 20, 6


def bitsandbytes_int8(model: Model) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for layer in text_model(model).layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                other = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
                other.weight = bnb.nn.Int8Params(
                    linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False
                )
                parent, _, last = name.rpartition(".")
                setattr(layer.get_submodule(parent), last, other.to("cpu"))


def torchao_int8(model: Model) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def quanto(name: str) -> Callable[[Model], None]:
    def use(model: Model) -> None:
        module = pytest.importorskip("optimum.quanto")
        module.quantize(model, weights=getattr(module, name))
        module.freeze(model)

    return use


MAKES: dict[str, Callable[[Any], None]] = {
    "bitsandbytes int8": bitsandbytes_int8,
    "torchao int8": torchao_int8,
    "quanto int8": quanto("qint8"),
    "quanto int4": quanto("qint4"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", ("gemma3_text", "gemma4_text"))
@pytest.mark.parametrize("first", (True, False), ids=("before the patch", "after it"))
def test_as_stock(name: str, make: str, first: bool, layout: str) -> None:
    model, ids = BY_NAME[name].build(WINDOW), named_ids(None, 1, PROMPT)
    if first:
        MAKES[make](model)
    with swapatch.patch(model, layout=layout) as handle:
        if not first:
            MAKES[make](model)
        got = greedy(model, ids, NEW)
        assert isinstance(got.cache, swapatch.CompactCache)
        assert not swapatch.status(model).calls.stock
        handle.undo()
    assert_same_logits(got.logits, greedy(model, ids, NEW).logits)
