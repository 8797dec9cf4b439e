"""Ranks as processes over shared memory: the bits of the loopback bus, and faults that name the rank in time."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path

import pytest

from dgpp_core.api import EngineError
from dgpp_core.bus.forming import Layout, Terms
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.bus.shm.join import join
from dgpp_core.bus.shm.link import FOLDER, SharedMemoryLink
from dgpp_core.bus.slab import Geometry
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins

sys.path.insert(0, str(Path(__file__).parent))  # new processes are given this path, and find the programs there
import programs

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no shared memory at {FOLDER}")]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["dgpp_core.bus.distributed", "dgpp_core.bus.shm.join", "dgpp_core.testing.world"])
run = functools.partial(programs.run, context=CONTEXT, transport="shm")


def left_behind() -> list[Path]:
    return list(FOLDER.glob("dgpp-*"))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_are_those_of_the_loopback_bus_bit_for_bit(world: int) -> None:
    assert run(programs.battery, world, timeout=20) == LoopbackWorld(world).run(programs.battery)
    assert left_behind() == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks can divide."""
    pytest.importorskip("dgpp_llama")
    folder, model = tmp_path_factory.mktemp("tiny"), load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4)
    return folder


def test_engines_in_two_processes_reply_as_two_threads_do(tiny: Path) -> None:
    program = functools.partial(programs.replies, tiny, "cpu", None)
    assert run(program, 2, timeout=20) == LoopbackWorld(2).run(program)


@pytest.mark.parametrize("world", [2, 4])
def test_a_killed_rank_is_named_at_once(world: int) -> None:
    answers = run(programs.rank_1_dies, world, silent=1, timeout=20)
    for rank in set(range(world)) - {1}:
        seconds, first, again = told(answers[rank])
        assert seconds < 2
        assert "rank 1 failed: its connection ended" in first
        assert "rank 1 failed: its connection ended" in again
    assert left_behind() == []


def told(answer: object) -> tuple[float, str, str]:
    """What a rank raised. A slow one may still wait in the call before when it hears of another's end."""
    return (0.0, answer, answer) if isinstance(answer, str) else answer  # type: ignore[return-value]


def test_a_silent_rank_is_named_after_the_timeout() -> None:
    for answer in run(programs.rank_1_stops, 4, silent=1)[::2]:
        seconds, first, _ = told(answer)
        assert seconds < programs.TIMEOUT + 2
        assert "no answer from rank 1 within 2 s" in first


def test_who_watches_the_ranks_ends_the_wait_for_a_silent_one_everywhere() -> None:
    answers = run(programs.rank_1_stops_and_is_given_up, 3, silent=1, timeout=20)
    for rank in (0, 2):
        seconds, first, again = told(answers[rank])
        assert seconds < 2
        assert "rank 1 is silent" in first
        assert "rank 1 is silent" in again


def test_steps_end_when_the_rank_that_they_wait_for_is_given_up(tiny: Path) -> None:
    seconds, line = run(functools.partial(programs.steps_lose_rank_1, tiny, "cpu"), 2, silent=1, timeout=20)[0]
    assert seconds < 2
    assert "rank 1 is silent" in line


def test_a_rank_with_a_fault_of_its_own_tells_the_others() -> None:
    answers = run(programs.rank_1_raises, 4, timeout=20)
    assert answers[1] == "ValueError: a bad weight"
    for rank in (0, 2, 3):
        assert "rank 1 failed: ValueError: a bad weight" in told(answers[rank])[1]


def test_what_ranks_disagree_about_is_named_on_each() -> None:
    for line in run(programs.shapes_differ, 2):
        assert "the ranks issued different collectives" in line
        assert "rank 0: collective 1, all_gather of torch.float32 [4, 6] along axis 0" in line
        assert "rank 1: collective 1, all_gather of torch.float32 [4, 5] along axis 0" in line
    for line in run(programs.one_more, 2):
        assert "rank 0: collective 0, barrier" in line
        assert "rank 1: collective 0, all_reduce" in line


@pytest.mark.parametrize(
    ("world", "ranks", "settings", "named"),
    [
        (2, [0, 1], ["a", "b"], "ranks with another settings cannot form a world; where: rank 1"),
        (3, [0, 1, 1], ["", "", ""], "two processes claim one rank; where: rank 1"),
        (3, [0, 2], ["", ""], "rank 1 of 3 did not come within 2 s"),
    ],
)
def test_a_world_that_does_not_fit_is_not_formed(world: int, ranks: list[int], settings: list[str], named: str) -> None:
    """Every rank hears the reason, not only rank 0."""
    answers = run(programs.battery, world, ranks=ranks, settings=settings)
    assert all(named in answer for answer in answers), answers
    assert left_behind() == []


def test_no_room_for_a_slab_is_an_error_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="shared memory cannot be had"):
        SharedMemoryLink(0, Geometry(world=2, channels=1, slot_bytes=64), tmp_path / "nowhere")
    with pytest.raises(EngineError, match="shared memory cannot be had") as refused:
        SharedMemoryLink(0, Geometry(world=4, channels=248, slot_bytes=1 << 40))
    assert "space" in refused.value.found or "large" in refused.value.found
    assert left_behind() == []


def test_slabs_of_another_host_are_refused_by_name() -> None:
    geometry = Geometry(world=2, channels=1, slot_bytes=64)
    mine, gone = SharedMemoryLink(0, geometry), SharedMemoryLink(1, geometry)
    offers = [mine.offer(), gone.offer()]
    gone.close()
    with pytest.raises(EngineError, match="not to be found here") as refused:
        mine.accept(offers)
    assert "rank 1, on " in refused.value.where
    mine.close()


def test_a_world_of_one_needs_nobody() -> None:
    with join(Terms(rank=0, world=1, address="127.0.0.1:0", layout=Layout(host_slot=4096))) as bus:
        assert programs.battery(bus) == LoopbackWorld(1).run(programs.battery)[0]
