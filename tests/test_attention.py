"""The kernels against the definition of attention, for every way that heads are grouped."""

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

from swapatch.attention import KERNELS, reference, window_attention, windowed
from swapatch.attention.operator import _operator
from swapatch.geometry import Span
from swapatch.rules import Rule

pytestmark = pytest.mark.usefixtures("device")

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(zoo.DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("masked", (False, True), ids=["all", "masked"])
@pytest.mark.parametrize("queries", (1, 5))
@pytest.mark.parametrize("groups", (1, 2, 3, 4, 8))
def test_windowed_is_the_definition(groups: int, queries: int, masked: bool, dtype: torch.dtype) -> None:
    """Folded or not, each query head attends the keys of its own group."""
    torch.manual_seed(groups)
    query = random(2, 2 * groups, queries, 32, dtype=dtype)
    key, value = random(2, 2, 70, 32, dtype=dtype), random(2, 2, 70, 32, dtype=dtype)
    mask = None
    if masked:
        hidden = torch.rand(2, 1, queries, 70).to(zoo.DEVICE) < 0.4
        mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
    want = reference.attend(query, key, value, mask, False, 0.2)
    got = windowed.attend(query, key, value, mask, False, 0.2)
    assert got.shape == want.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[dtype])
    wrong = reference.attend(query, key.flip(1), value.flip(1), mask, False, 0.2)
    assert (got - wrong).abs().max() > 10 * TOLERANCES[dtype]


def rows(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    made = (torch.randn(2, heads, 40, 8, dtype=dtype) for heads in (4, 2, 2))
    return [part.to(zoo.DEVICE).requires_grad_() for part in made]


def rules() -> dict[str, Rule]:
    """All that a text can have: nothing, padding that hides more than a window, sequences in one row."""
    padding = torch.ones(2, 40, dtype=torch.long, device=zoo.DEVICE)
    padding[0, :25] = 0
    segments = torch.tensor([0] * 13 + [1] * 20 + [2] * 7, device=zoo.DEVICE).expand(2, -1)
    return {"plain": Rule(7), "padded": Rule(7, padding), "packed": Rule(7, None, segments), "wide": Rule(100)}


@pytest.mark.parametrize("block", (1, 16, 64))
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rule", rules())
def test_all_blocks_are_the_definition_forward_and_backward(rule: str, kernel: str, block: int) -> None:
    """Against the whole square behind one mask, differentiated by torch."""
    query, key, value = rows()
    span = Span(0, 40)
    allowed = rules()[rule].allowed(span, span, query.device)
    mask = torch.zeros_like(allowed, dtype=query.dtype).masked_fill_(~allowed, -torch.inf)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.3 + mask
    weights = torch.softmax(scores.masked_fill(~allowed.any(-1, keepdim=True), 0.0), -1) * allowed
    want = (weights @ value.repeat_interleave(2, 1)).transpose(1, 2)
    got = window_attention(query, key, value, rules()[rule], span, span, 0.3, kernel=kernel, block=block)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    slope = torch.randn(want.shape, dtype=want.dtype).to(want.device)
    for ours, theirs in zip(
        torch.autograd.grad(got, (query, key, value), slope),
        torch.autograd.grad(want, (query, key, value), slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_keys_before_and_after_the_queries() -> None:
    """Rows of a cache come before them, unwritten ones of a static cache after."""
    query, key, value = (part.detach() for part in rows(torch.float32))
    span = Span(0, 40)
    whole = window_attention(query, key, value, Rule(7), span, span, 0.3)
    for first, stop in ((10, 40), (33, 40), (10, 25), (39, 40)):
        part = window_attention(query[:, :, first:stop], key, value, Rule(7), Span(first, stop), span, 0.3, block=4)
        torch.testing.assert_close(part, whole[:, first:stop])


@pytest.mark.parametrize("rule", rules())
def test_the_operator_as_torch_checks_it(rule: str) -> None:
    """Fake results, schema, autograd and tracing fit each other."""
    made = rules()[rule]
    settings: tuple[Any, ...] = (made.padding, made.segments, None, "", made.window, 0, 0, 0.3, "windowed", 16)
    torch.library.opcheck(_operator, (*rows(torch.float32), *settings))


@pytest.mark.parametrize("rule", rules())
def test_second_derivative(rule: str) -> None:
    query, key, value = (part[:1, :, :12].detach().requires_grad_() for part in rows())
    made = rules()[rule]
    cut = [None if part is None else part[:1, 20:32] for part in (made.padding, made.segments)]
    small, span = Rule(5, *cut), Span(0, 12)

    def attend(*parts: Tensor) -> Tensor:
        return window_attention(*parts, small, span, span, 0.3, block=4)

    assert torch.autograd.gradgradcheck(attend, (query, key, value), fast_mode=True)
