"""An engine process's way to the other ranks: the transport it joins, and what its end does to those that wait."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.shm.link import FOLDER
from dgpp_core.bus.verbs import join as verbs
from dgpp_core.cluster.process import Life
from dgpp_core.cluster.records import Era
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.settings import EngineSettings
from dgpp_core.testing.served_world import free_port

CPU = torch.device("cpu")
ERA = Era(epoch=1, world=3, model="", settings=b"{}", fabric_port=0, bus="shm")
ENDS = """
import sys, threading, time
import torch
from dgpp_core.api import EngineError
from dgpp_core.cluster.process import Life
from dgpp_core.cluster.records import Era
from dgpp_core.config.fabric import Fabric

life = Life(0, 1, sys.argv[1], time.monotonic)
era = Era(epoch=1, world=3, model="", settings=b"{}", fabric_port=0, bus="shm")
bus = life.meet(era, sys.argv[2], torch.device("cpu"), Fabric())
bus.all_reduce(torch.ones(3))
error = EngineError("rank 1 is silent")
error.exit_code = 7
threading.Timer(0.3, life.end, [error]).start()
bus.all_reduce(torch.ones(5))
"""


@pytest.mark.alone
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no shared memory at {FOLDER}")
def test_a_rank_that_ends_takes_those_along_that_wait_with_it_for_a_silent_one(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    lives = [Life(rank, 1, str(tmp_path), time.monotonic) for rank in (1, 2)]
    with (
        subprocess.Popen([sys.executable, "-c", ENDS, str(tmp_path), address]) as rank_0,
        ThreadPoolExecutor(2) as threads,
    ):
        joined = [threads.submit(life.meet, ERA, address, CPU, Fabric()) for life in lives]
        silent, waiting = (each.result(60) for each in joined)
        first = threads.submit(silent.all_reduce, torch.ones(3))
        assert waiting.all_reduce(torch.ones(3)).tolist() == [3.0] * 3
        first.result(10)
        began = time.monotonic()
        with pytest.raises(EngineError, match="a collective failed") as raised:
            waiting.all_reduce(torch.ones(5))  # rank 1's process runs and does nothing
        assert time.monotonic() - began < 2.3
        assert "rank 0 failed: " in raised.value.found
        assert "rank 1 is silent" in raised.value.found
        assert rank_0.wait(10) == 7
        for life in lives:
            life.leave(None)
    said = (tmp_path / "rank-0.epoch-1.txt").read_text()
    assert "last collective: collective 1, all_reduce of torch.float32 [5]" in said
    assert "in all_reduce" in said, "the stacks are of before the wait was ended"


@pytest.mark.parametrize(("gbps", "pace"), [(-1.0, None), (0.0, 0.0), (12.5, 12.5)])
def test_rdma_gets_the_nodes_devices_and_the_worlds_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gbps: float, pace: float | None
) -> None:
    """There is no network card to run it on; the transport itself is tried in guests."""
    given: dict[str, Any] = {}

    class Joined:
        rank, world, capturable = 1, 2, False

    def join(terms: Terms, *, devices: Sequence[str], gid_indices: Sequence[int], pace: float | None) -> Joined:
        given.update(terms=terms, devices=devices, gid_indices=gid_indices, pace=pace)
        return Joined()

    monkeypatch.setattr(verbs, "join", join)
    era = msgspec.structs.replace(ERA, bus="verbs", settings=msgspec.json.encode(EngineSettings(bulk_pace_gbps=gbps)))
    fabric = Fabric(bus="gloo", devices=("b", "a"), gid_indices=(3, 1))
    life = Life(1, 1, str(tmp_path), time.monotonic)
    life.meet(era, "spark-1:29970", CPU, fabric)
    assert (given["devices"], given["gid_indices"], given["pace"]) == (("b", "a"), (3, 1), pace)
    terms = given["terms"]
    assert (terms.rank, terms.world, terms.address, terms.settings) == (1, 3, "spark-1:29970", "epoch 1")
