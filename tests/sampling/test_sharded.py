"""The pick over slices of a vocabulary against `torch.max` over the whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dgpp_core.bus.loopback import LoopbackBus, LoopbackWorld
from dgpp_core.bus.solo import SoloBus
from dgpp_core.sampling.sharded import sharded_argmax

INF = math.inf


def picked(logits: Tensor, world: int) -> tuple[Tensor, Tensor]:
    """What all ranks agree on."""
    width = logits.shape[1] // world

    def work(bus: LoopbackBus) -> tuple[Tensor, Tensor]:
        first = bus.rank * width
        return sharded_argmax(logits[:, first : first + width], first, bus)

    answers = LoopbackWorld(world).run(work)
    for peaks, ids in answers[1:]:
        assert torch.equal(peaks.view(torch.int32), answers[0][0].view(torch.int32))
        assert torch.equal(ids, answers[0][1])
    return answers[0]


def rows() -> Tensor:
    """Random rows with few distinct values, so that most have ties; small, large and denormal numbers."""
    source = torch.Generator().manual_seed(1)
    coarse = torch.randint(-3, 4, (200, 64), generator=source).float()
    scales = torch.tensor([1.0, -1.0, 1e-42, 1e37, 1.0])[torch.arange(200) % 5]
    fine = torch.randn(50, 64, generator=source)
    edges = torch.full((8, 64), -INF)
    edges[1, 40], edges[2, 63], edges[3, 17:50] = -5.0, 0.0, -0.0
    edges[4, 3], edges[4, 60], edges[5, 60], edges[5, 3] = -0.0, 0.0, 3e38, -3e38
    edges[6, 20], edges[7] = INF, -1e-45
    return torch.cat([coarse * scales[:, None], fine, edges])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_it_is_the_first_maximum_of_the_whole_row(world: int) -> None:
    logits = rows()
    expected = logits.max(dim=1)
    peaks, ids = picked(logits, world)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected.indices)
    assert torch.equal(peaks, expected.values)
    ties = (logits == expected.values[:, None]).sum(dim=1)
    assert int((ties > 1).sum()) > 150


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_a_nan_is_not_passed_over(nan: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = torch.tensor(nan)
    logits[2, 1], logits[2, 6] = INF, nan
    peaks, ids = picked(logits, 4)
    assert peaks.isnan().tolist() == [False, True, True]
    assert ids.tolist() == [0, 5, 6]


def test_ids_of_a_large_vocabulary() -> None:
    local = torch.zeros(1, 4)
    assert sharded_argmax(local, 2**31 + 5, SoloBus())[1].item() == 2**31 + 5
    assert picked(torch.cat([torch.zeros(1, 300_000), torch.ones(1, 100_000)], 1), 4)[1].item() == 300_000
