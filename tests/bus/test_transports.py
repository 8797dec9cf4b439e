"""Which transport a world takes: what was asked for, or what fits where its ranks and their devices are."""

from __future__ import annotations

import pytest

from dgpp_core.api import ConfigError
from dgpp_core.bus.transports import Transport, choose
from dgpp_core.config.fabric import Fabric, Wanted

RDMA = ("mlx5_0",)


@pytest.mark.parametrize(
    ("here", "devices", "cuda", "chosen"),
    [
        (4, (), False, "shm"),
        (4, (), True, "nccl"),
        (4, RDMA, True, "nccl"),
        (1, RDMA, True, "verbs"),
        (1, RDMA, False, "verbs"),
        (1, (), True, "nccl"),
        (1, (), False, "gloo"),
    ],
)
def test_what_fits(here: int, devices: tuple[str, ...], cuda: bool, chosen: Transport) -> None:
    assert choose(Fabric(devices=devices), world=4, here=here, cuda=cuda) == chosen


@pytest.mark.parametrize("devices", [(), RDMA])
def test_ranks_that_share_a_card_meet_in_shared_memory(devices: tuple[str, ...]) -> None:
    assert choose(Fabric(devices=devices), world=2, here=2, cuda=True, shared=True) == "shm"


@pytest.mark.parametrize("wanted", ["shm", "verbs", "nccl", "gloo"])
@pytest.mark.parametrize("cuda", [False, True])
def test_what_is_asked_for_is_taken_or_refused(wanted: Wanted, cuda: bool) -> None:
    fabric = Fabric(bus=wanted, devices=RDMA)
    if wanted != ("gloo" if cuda else "nccl"):
        assert choose(fabric, world=2, here=2, cuda=cuda) == wanted
        return
    with pytest.raises(ConfigError) as refused:
        choose(fabric, world=2, here=2, cuda=cuda)
    assert wanted in refused.value.found
    assert ("nccl" if cuda else "gloo") in refused.value.expected
