"""Ranks as processes over gloo: the bits of the loopback bus, and faults that name the rank within the timeout."""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from dgpp_core.api import EngineError
from dgpp_core.bus.distributed import join
from dgpp_core.bus.loopback import LoopbackWorld

sys.path.insert(0, str(Path(__file__).parent))  # new processes are given this path, and find the programs there
import programs

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dgpp_core.bus.distributed"])


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def run(
    program: Callable[..., object],
    world: int,
    *,
    ranks: Sequence[int] = (),
    settings: Sequence[str] = (),
    silent: int = -1,
) -> list[Any]:
    """The answers of processes that are ``ranks`` of a world, all of it by default; None for the silent one."""
    address, running = free_address(), []
    for number, rank in enumerate(ranks or range(world)):
        answer, theirs = CONTEXT.Pipe(duplex=False)
        given = (rank, world, address, settings[number] if settings else "", program, theirs)
        running.append((CONTEXT.Process(target=programs.start, args=given), rank, answer))
        running[-1][0].start()
        theirs.close()
    try:
        return [None if rank == silent else _receive(answer) for _, rank, answer in running]
    finally:
        for process, _, _ in running:
            process.kill()
            process.join()


def _receive(answer: Connection) -> Any:
    assert answer.poll(30), "a rank hangs"
    return answer.recv()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_are_those_of_the_loopback_bus_bit_for_bit(world: int) -> None:
    expected = LoopbackWorld(world).run(programs.battery)
    assert run(programs.battery, world) == expected
    assert len({tuple(results) for results in expected}) == 1


@pytest.mark.parametrize("world", [2, 4])
def test_a_killed_rank_is_named_by_all_others(world: int) -> None:
    answers = run(programs.rank_1_dies, world, silent=1)
    for rank in set(range(world)) - {1}:
        seconds, first, again = answers[rank]
        assert seconds < programs.TIMEOUT
        assert f"rank {rank} of {world}, collective 2, all_reduce of torch.float32 [3]" in first
        assert "no answer from rank 1" in first
        assert again == first


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    for seconds, first, _ in run(programs.rank_1_stops, 4, silent=1)[::2]:
        assert seconds < programs.TIMEOUT + 2
        assert "no answer from rank 1: Timed out" in first


def test_a_rank_with_a_fault_of_its_own_tells_the_others() -> None:
    answers = run(programs.rank_1_raises, 4)
    assert answers[1] == "ValueError: a bad weight"
    assert all("rank 1 failed: ValueError: a bad weight" in answers[rank][1] for rank in (0, 2, 3))


def test_what_ranks_disagree_about_is_named_on_each() -> None:
    for line in run(programs.shapes_differ, 2):
        assert "the ranks issued different collectives" in line
        assert "rank 0: collective 2, all_gather of torch.float32 [4, 6] along axis 0" in line
        assert "rank 1: collective 2, all_gather of torch.float32 [4, 5] along axis 0" in line
    for line in run(programs.one_more, 2):
        assert "rank 0: collective 1, barrier" in line
        assert "rank 1: collective 1, all_reduce" in line


@pytest.mark.parametrize(
    ("world", "ranks", "settings", "named"),
    [
        (2, [0, 1], ["a", "b"], "ranks with another settings cannot form a world; where: rank 1"),
        (3, [0, 1, 1], ["", "", ""], "two processes claim one rank; where: rank 1"),
        (3, [0, 2], ["", ""], "rank 1 of 3 did not come within 2 s"),
    ],
)
def test_a_world_that_does_not_fit_is_not_formed(world: int, ranks: list[int], settings: list[str], named: str) -> None:
    answers = run(programs.battery, world, ranks=ranks, settings=settings)
    assert any(named in answer for answer in answers)
    assert all(isinstance(answer, str) for answer in answers)


def test_an_address_nobody_can_use_is_refused() -> None:
    with pytest.raises(EngineError, match="rank 0 was not reached within"):
        join(1, 2, free_address(), timeout=0.3)
    with pytest.raises(EngineError, match="malformed") as refused:
        join(0, 2, "127.0.0.1")
    assert refused.value.found == "127.0.0.1"
    with pytest.raises(EngineError, match="no such rank"):
        join(2, 2, "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="rank 0 cannot listen"):
        join(0, 2, f"127.0.0.1:{taken.getsockname()[1]}", timeout=0.3)
