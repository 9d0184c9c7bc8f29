"""The kernels against the definition of attention, for every way that heads are grouped."""

import pytest
import torch
from torch import Tensor

from swapatch.attention import reference, windowed

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


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
        hidden = torch.rand(2, 1, queries, 70) < 0.4
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    want = reference.attend(query, key, value, mask, False, 0.2)
    got = windowed.attend(query, key, value, mask, False, 0.2)
    assert got.shape == want.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCES[dtype])
    wrong = reference.attend(query, key.flip(1), value.flip(1), mask, False, 0.2)
    assert (got - wrong).abs().max() > 10 * TOLERANCES[dtype]
