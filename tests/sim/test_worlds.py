"""Worlds in virtual time: everything that must hold does, and a seed always tells the same story."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import msgspec
import pytest
from click.testing import CliRunner

from dgpp_core.cli.main import cli
from dgpp_core.testing.sim.runs import Tally, Violation, play, simulate
from dgpp_core.testing.sim.scenario import BORNE, Kind, draw
from dgpp_core.testing.sim.world import FOUND_S, Run, SimWorld

SEEDS = 2000
TOLD = "import sys; from dgpp_core.testing.sim.runs import play; print(*(play(seed).digest for seed in range(60)))"


@pytest.mark.slow
def test_everything_holds_with_any_seed() -> None:
    tally = simulate(range(SEEDS))
    assert not tally.violations
    assert tally.troubles.keys() == set(get_args(Kind)), "every kind of trouble is drawn"
    for kind, (_, ended) in tally.troubles.items():
        assert (ended == 0) == (kind in BORNE), f"{kind} does what it is meant to"
    assert 1.0 < tally.found_s < FOUND_S, "some faults are found by patience alone, and in time"
    assert min(tally.preempted, tally.hits, tally.evicted) > 10, "memory is low, and prefixes are reused"


def test_a_seed_is_one_story_in_any_process() -> None:
    here = [run.digest for run in map(play, range(60)) if isinstance(run, Run)]
    assert len(set(here)) == 60
    for hash_seed in ("77",):
        environ = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", TOLD], env=environ, capture_output=True, check=True, timeout=120)
        assert done.stdout.decode().split() == here


def test_without_trouble_every_request_is_answered_in_full() -> None:
    for seed in range(40):
        scenario = msgspec.structs.replace(draw(seed), troubles=(), shutdown=-1.0)
        asks = tuple(msgspec.structs.replace(ask, cancel=-1.0, stop=-1) for ask in scenario.asks)
        run = SimWorld(msgspec.structs.replace(scenario, asks=asks)).run()
        assert not run.failure
        assert run.answered == len(asks)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_world_can_be_chosen(world: int) -> None:
    runs = [play(seed, world) for seed in range(30)]
    assert {run.world for run in runs if isinstance(run, Run)} == {world}


def test_the_command_plays_one_seed_and_many() -> None:
    one = CliRunner().invoke(cli, ["simulate", "--seed", "7", "--world", "3"])
    assert one.exit_code == 0
    assert msgspec.json.decode(one.stdout)["scenario"]["world"] == 3
    many = CliRunner().invoke(cli, ["simulate", "--seeds", "20", "--first", "5", "--json"])
    assert many.exit_code == 0
    found = msgspec.json.decode(many.stdout)
    assert (found["seeds"], found["violations"]) == (20, [])
    assert found["command"] == "dgpp simulate --seeds 20 --first 5"


def test_the_command_prints_the_line_that_shows_a_violation_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seeds: object, world: int | None, report: object) -> Tally:
        found = Violation(seed=12345, what="something", replay="dgpp simulate --seed 12345 --world 2")
        report(found)  # type: ignore[operator]
        return msgspec.structs.replace(simulate(()), violations=(found,))

    monkeypatch.setattr("dgpp_core.testing.sim.runs.simulate", broken)
    done = CliRunner().invoke(cli, ["simulate", "--seeds", "1", "--world", "2"])
    assert done.exit_code == 1
    assert "dgpp simulate --seed 12345 --world 2: something" in done.stderr
