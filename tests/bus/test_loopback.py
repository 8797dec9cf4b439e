"""Ranks as threads: the sums and gathers, and that no fault leaves anybody waiting."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.fold import fold
from dgpp_core.bus.loopback import LoopbackBus, LoopbackWorld

WORLDS = [1, 2, 3, 4]


def part(rank: int, shape: tuple[int, ...] = (5, 6), dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=source) * 10.0 ** (rank * 3)).to(dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_fold_whoever_is_late(world: int, dtype: torch.dtype) -> None:
    expected = fold([part(rank, dtype=dtype) for rank in range(world)])
    for late in range(world):

        def work(bus: LoopbackBus, late: int = late) -> Tensor:
            if bus.rank == late:
                time.sleep(0.02)
            return bus.all_reduce(part(bus.rank, dtype=dtype))

        assert all(torch.equal(sum_, expected) for sum_ in LoopbackWorld(world).run(work))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_a_gather_is_the_concatenation(world: int, dim: int) -> None:
    expected = torch.cat([part(rank) for rank in range(world)], dim)
    gathered = LoopbackWorld(world).run(lambda bus: bus.all_gather(part(bus.rank), dim))
    assert all(torch.equal(whole, expected) for whole in gathered)


def test_a_part_may_be_overwritten_and_a_result_changed() -> None:
    """Ranks share nothing: each writes into what it sent and got, as fast as it can, for a hundred rounds."""

    def work(bus: LoopbackBus) -> list[float]:
        mine, seen = torch.empty(3), []
        for turn in range(100):
            mine.fill_(turn * 10 + bus.rank)
            total = bus.all_reduce(mine)
            mine.fill_(-1e9)
            seen.append(total[0].item())
            total.fill_(1e9)
        return seen

    assert LoopbackWorld(4).run(work) == [[turn * 40.0 + 6 for turn in range(100)]] * 4


def wrong_shape(bus: LoopbackBus) -> None:
    bus.all_reduce(torch.zeros(3 if bus.rank == 2 else 4))


def wrong_dtype(bus: LoopbackBus) -> None:
    bus.all_reduce(torch.zeros(4, dtype=torch.bfloat16 if bus.rank == 1 else torch.float32))


def wrong_axis(bus: LoopbackBus) -> None:
    bus.all_gather(torch.zeros(4, 4), bus.rank % 2)


def wrong_operation(bus: LoopbackBus) -> None:
    if bus.rank:
        bus.barrier()
    bus.all_reduce(torch.zeros(4))


@pytest.mark.parametrize(
    ("work", "named"),
    [
        (wrong_shape, "rank 2: collective 0, all_reduce of torch.float32 [3]"),
        (wrong_dtype, "rank 1: collective 0, all_reduce of torch.bfloat16 [4]"),
        (wrong_axis, "rank 1: collective 0, all_gather of torch.float32 [4, 4] along axis 1"),
        (wrong_operation, "rank 0: collective 0, all_reduce of torch.float32 [4]; rank 1: collective 0, barrier"),
    ],
)
def test_ranks_that_disagree_all_raise_and_are_named(work: Callable[[LoopbackBus], None], named: str) -> None:
    world = LoopbackWorld(3)

    def caught(bus: LoopbackBus) -> EngineError:
        with pytest.raises(EngineError, match="different collectives") as refused:
            work(bus)
        return refused.value

    with pytest.raises(EngineError, match="different collectives"):  # the world is lost, whoever caught what
        world.run(caught)
    with pytest.raises(EngineError, match="different collectives") as refused:
        world.run(lambda bus: bus.barrier())
    assert named in refused.value.found


def test_a_rank_that_raises_frees_the_others_at_once() -> None:
    heard: dict[int, str] = {}

    def work(bus: LoopbackBus) -> None:
        bus.barrier()
        if bus.rank == 1:
            time.sleep(0.05)
            raise ValueError("a bad weight")
        try:
            bus.all_reduce(torch.zeros(2))
        except EngineError as error:
            heard[bus.rank] = error.line()
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="a bad weight") as raised:
        LoopbackWorld(3, deadline=30).run(work)
    assert time.monotonic() - start < 5
    assert raised.value.__notes__ == ["on rank 1 of 3"]
    assert sorted(heard) == [0, 2]
    assert all("rank 1 failed" in text and "ValueError: a bad weight" in text for text in heard.values())


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_leaves_early_is_missed_at_once(first: bool) -> None:
    def work(bus: LoopbackBus) -> None:
        bus.barrier()
        if bus.rank == 0:
            time.sleep(0 if first else 0.05)
            return
        time.sleep(0.05 if first else 0)
        bus.all_reduce(torch.zeros(7))

    start = time.monotonic()
    with pytest.raises(EngineError, match="has left") as missed:
        LoopbackWorld(2, deadline=30).run(work)
    assert time.monotonic() - start < 5
    assert missed.value.where == "rank 0"
    assert missed.value.found == "rank 1 waits in collective 1, all_reduce of torch.float32 [7]"


def test_a_rank_that_hangs_is_named_after_the_deadline() -> None:
    def work(bus: LoopbackBus) -> None:
        if bus.rank == 1:
            time.sleep(0.3)
        bus.barrier()

    with pytest.raises(EngineError, match=r"not joined within 0\.05 s") as late:
        LoopbackWorld(3, deadline=0.05).run(work)
    assert "rank 1" in late.value.where


def test_runs_follow_each_other_and_results_are_in_order_of_rank() -> None:
    world = LoopbackWorld(3)
    for _ in range(5):
        assert world.run(lambda bus: bus.rank + bus.all_reduce(torch.ones(1)).item()) == [3, 4, 5]


def test_what_cannot_be_sent_is_refused_before_anybody_waits() -> None:
    with pytest.raises(EngineError, match="cannot be summed"):
        LoopbackWorld(1).run(lambda bus: bus.all_reduce(torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(EngineError, match="cannot send this tensor"):
        LoopbackWorld(1).run(lambda bus: bus.all_gather(torch.zeros(2, 2), 2))
    with pytest.raises(EngineError, match="cannot send this tensor"):
        LoopbackWorld(1).run(lambda bus: bus.all_gather(torch.zeros(2, dtype=torch.complex64), 0))
    with pytest.raises(EngineError, match="a world needs a rank"):
        LoopbackWorld(0)
