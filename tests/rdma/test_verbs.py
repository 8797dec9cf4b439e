"""The verbs transport between machines that have it: guests with Soft-RoCE, two and four of them."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.loopback import LoopbackBus, LoopbackWorld
from dgpp_core.bus.native import load

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "bus"))
import guests
from guests import Outcome
from slabs import part

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(bool(guests.missing()), reason=guests.missing() or "there are guests"),
]
PROGRAM = str(Path(__file__).parent / "rdma_programs.py")
HOLES = """
ip addr add 10.77.1.50/24 dev $card; ip addr del $address dev $card; ip addr add 10.77.1.51/24 dev $card
ip addr add $address dev $card; ip addr del 10.77.1.51/24 dev $card; ip addr del 10.77.1.50/24 dev $card
"""
"""The second and third entry become free after the address has got the fourth."""
LENGTHS = (1, 2048, 5001)


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    """Built, and the native part compiled where the guests find it: every other rank uses it, the others pyverbs."""
    if reason := guests.build():
        pytest.skip(reason)
    try:
        load("verbs")
    except EngineError as error:
        pytest.skip(error.line())


def expected(world: int) -> list[bytes]:
    """The loopback bus's results of the guests' program."""

    def work(bus: LoopbackBus) -> list[bytes]:
        found: list[Tensor] = []
        for count in LENGTHS:
            mine = torch.from_numpy(part(bus.rank, count, count)).view(torch.bfloat16)
            found += [bus.all_reduce(mine)] * 2 + [bus.all_gather(mine, 0)]
        return [tensor.view(torch.uint8).numpy().tobytes() for tensor in found]

    return LoopbackWorld(world).run(work)[0]


def results(outcome: Outcome) -> list[bytes]:
    assert outcome.status == 0, outcome.output
    return msgspec.msgpack.decode((outcome.folder / "results").read_bytes(), type=list[bytes])


def test_two_machines_have_the_bits_of_the_loopback_bus(tmp_path: Path) -> None:
    """With frames of different sizes, and addresses that came and went before: their table has holes."""
    found = guests.run([PROGRAM, "battery", "2"], tmp_path / "run", nodes=2, mtu=[4200, 1500], extra=HOLES)
    for outcome in found:
        assert results(outcome) == expected(2)
        assert "gid 3 ::ffff:a4d:" in outcome.output, outcome.output
    assert "an MTU of 1024 on rxe0, this rank 4096" in found[0].output


def test_four_machines_have_them_too_and_name_the_one_that_is_lost(tmp_path: Path) -> None:
    found = guests.run([PROGRAM, "battery_and_a_loss", "4"], tmp_path / "run", nodes=4)
    for rank, outcome in enumerate(found):
        assert results(outcome) == expected(4)
        late = msgspec.msgpack.decode((outcome.folder / "late").read_bytes(), type=list[int])
        assert late == [source * (128 * 1024 + 4096) for source in range(4)]
        if rank != 1:
            assert "rank 1 failed: its connection ended" in outcome.output, outcome.output


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    folder = guests.run([PROGRAM, "refusals", "2"], tmp_path / "run")[0].folder
    told = {path.name: path.read_text() for path in folder.glob("* [01]")}
    for rank in (0, 1):
        assert "ranks with another transport cannot form a world" in told[f"geometry {rank}"]
        assert "found: verbs 128" in told[f"geometry {rank}"]
        assert "ranks with another settings cannot form a world; where: rank 1" in told[f"settings {rank}"]
        assert "another number of RDMA devices" in told[f"lanes {rank}"]
        assert (
            "the limit of locked memory is too small for the bus; where: rxe0; found: 65536" in told[f"locked {rank}"]
        )
    for case in ("silence 0", "native_silence 0"):
        assert "rank 1 cannot be written to; where: rxe0 to rank 1; found: completion status 12" in told[case]
    assert "an RDMA device cannot be used; where: mlx5_0; found: rxe0" in told["nothing_there 0"]
    assert "no address to use; where: rxe0; found: 0: RoCE v2 fe80" in told["nothing_there 1"]
