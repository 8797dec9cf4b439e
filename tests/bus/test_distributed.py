"""Ranks as processes over gloo: the bits of the loopback bus, and faults that name the rank within the timeout."""

from __future__ import annotations

import functools
import multiprocessing
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed

from dgpp_core.api import EngineError
from dgpp_core.bus.distributed import join
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins

sys.path.insert(0, str(Path(__file__).parent))  # new processes are given this path, and find the programs there
import programs

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dgpp_core.bus.distributed", "dgpp_core.testing.world"])


run = functools.partial(programs.run, context=CONTEXT)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_are_those_of_the_loopback_bus_bit_for_bit(world: int) -> None:
    expected = LoopbackWorld(world).run(programs.battery)
    assert run(programs.battery, world) == expected
    assert len({tuple(results) for results in expected}) == 1


def test_engines_in_two_processes_reply_as_two_threads_do(tmp_path: Path) -> None:
    """Every process plans for itself and they agree, on log-probabilities to the bit."""
    pytest.importorskip("dgpp_llama")
    model = load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4)
    program = functools.partial(programs.replies, tmp_path, "cpu", None)
    expected = LoopbackWorld(2).run(program)
    assert run(program, 2, timeout=20) == expected
    assert expected[0] == expected[1]
    assert [len(reply.tokens) for reply in expected[0]] == [16] * 4


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
    answers = run(programs.rank_1_raises, 4, timeout=20)
    assert answers[1] == "ValueError: a bad weight"
    # A slow rank may still be reading what rank 1 sent when rank 1 is gone: it hears of the fault one call earlier.
    told = [line if isinstance(line := answers[rank], str) else line[1] for rank in (0, 2, 3)]
    assert all("rank 1 failed: ValueError: a bad weight" in line for line in told), told


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineError, match="rank 0 was not reached within"):
        join(1, 2, silent, timeout=0.3)
    for address in ("127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:65536", "::1:80", "127.0.0.1:²"):
        with pytest.raises(EngineError, match="malformed") as refused:
            join(0, 2, address)
        assert refused.value.found == address
    with pytest.raises(EngineError, match="no such rank"):
        join(2, 2, "127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="rank 0 cannot listen"):
        join(0, 2, f"127.0.0.1:{taken.getsockname()[1]}", timeout=0.3)
