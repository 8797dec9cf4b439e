"""Ranks as processes that share one card, over shared memory: the bits of the loopback bus, eager and captured."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins

sys.path.insert(0, str(Path(__file__).parents[1] / "bus"))  # new processes are given this path
import programs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
CONTEXT = multiprocessing.get_context("spawn")
run = functools.partial(programs.run, context=CONTEXT, device="cuda", transport="shm", timeout=60.0)


@pytest.mark.parametrize("world", [2, 4])
def test_results_are_those_of_the_loopback_bus_bit_for_bit(world: int) -> None:
    program = functools.partial(programs.battery, device="cuda")
    assert run(program, world) == LoopbackWorld(world).run(program)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_are_the_fold_of_the_host_whichever_way_they_go(world: int) -> None:
    """In one hop and, with three ranks and more, in two; one launch and several."""
    assert run(programs.sums_against_the_fold, world) == [""] * world


@pytest.mark.parametrize(("world", "turns"), [(2, 1000), (4, 100)])
def test_a_captured_collective_is_the_eager_one(world: int, turns: int) -> None:
    assert run(functools.partial(programs.captured, turns), world) == [""] * world


def test_ranks_that_issue_something_else_are_named() -> None:
    lines = run(programs.device_calls_differ, 2)
    assert any("the ranks issued different collectives on their devices" in line for line in lines), lines
    assert all("rank" in line and "tag" in line for line in lines), lines


@pytest.mark.parametrize(
    ("how", "limit", "told"),
    [
        ("dies", 2, "its connection ended"),
        ("stops", 8, "no answer from rank 1"),
        ("is given up", 2, "rank 1 is silent"),
    ],
)
def test_a_kernel_that_waits_for_a_lost_rank_gives_up(how: str, limit: float, told: str) -> None:
    """At once where the rank is gone or who watches it has given it up, after the timeout where it is only silent."""
    program = functools.partial(programs.rank_1_leaves_a_kernel_waiting, how)
    seconds, line = run(program, 2, silent=1, timeout=6.0)[0]
    assert seconds < limit, seconds
    assert "rank 1" in line
    assert told in line, line


def test_captured_steps_end_when_the_rank_that_they_wait_for_is_given_up(tiny: Path) -> None:
    seconds, line = run(functools.partial(programs.steps_lose_rank_1, tiny, "cuda"), 2, silent=1)[0]
    assert seconds < 2, seconds
    assert "rank 1 is silent" in line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks can divide."""
    pytest.importorskip("dgpp_llama")
    folder, model = tmp_path_factory.mktemp("tiny"), load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4)
    return folder


@pytest.mark.parametrize("static", [False, True])
def test_engines_of_two_processes_reply_the_same(tiny: Path, static: bool) -> None:
    """With decode steps run as they come, and from captured graphs with the collectives inside."""
    first, second = run(functools.partial(programs.replies, tiny, "cuda", static), 2)
    assert first == second
    assert [len(reply.tokens) for reply in first] == [16] * 4
