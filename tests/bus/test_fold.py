"""The fold against a chain of float32 additions in NumPy, with bfloat16 rounded by integer arithmetic."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.bus.fold import PAYLOADS, fold, require_payload

Floats = npt.NDArray[np.float32]
EDGES = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1.1754944e-38, 3e38, -3e38, 1e8, -1e8, 65504.0, 6e-8, 0.1]


def rounded(values: Floats, dtype: torch.dtype) -> Floats:
    """To the nearest number of ``dtype``, ties to the even one."""
    if dtype == torch.float32:
        return values
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def parts(world: int) -> Floats:
    """Every rank's share of edge values, and random ones over many magnitudes."""
    source = np.random.default_rng(world)
    edges = source.choice(np.array(EDGES, np.float32), (world, 2000))
    spread = source.standard_normal((world, 2000)) * 10.0 ** source.integers(-12, 12, (world, 2000))
    close = 1 + source.integers(-300, 300, (world, 2000)) / 2048
    return np.concatenate([edges, spread.astype(np.float32), close.astype(np.float32)], axis=1)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", PAYLOADS)
def test_it_is_the_chain_in_order_of_rank_rounded_once(world: int, dtype: torch.dtype) -> None:
    given = rounded(parts(world), dtype)
    expected = given[0].copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for part in given[1:]:
            expected = expected + part
    expected = rounded(expected, dtype)
    found = fold([torch.from_numpy(part).to(dtype) for part in given])
    assert found.dtype == dtype
    number = ~np.isnan(expected)  # infinities of both signs: which NaN that makes is the processor's affair
    assert np.array_equal(found.float().numpy().view(np.uint32)[number], expected.view(np.uint32)[number])
    assert found.isnan().numpy().tolist() == (~number).tolist()


def test_the_order_shows() -> None:
    large, one = torch.tensor([1e8]), torch.tensor([1.0])
    assert fold([large, -large, one]).item() == 1.0
    assert fold([one, large, -large]).item() == 0.0


def test_the_sum_is_a_tensor_of_its_own() -> None:
    part = torch.ones(3)
    fold([part]).zero_()
    fold([part, part]).zero_()
    assert part.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_what_float32_cannot_hold_or_sum_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(EngineError) as refused:
        require_payload(torch.zeros(2).to(dtype))
    assert refused.value.found == str(dtype)
