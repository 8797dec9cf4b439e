"""A log directory without room: a world goes on with it, and ends as with any other; a rank does not start with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dgpp_core.testing.served_world import Crowd, served_world, started_rank
from dgpp_core.testing.small_disk import fill, small_disk

LIMIT_S = 4.0
"""The promise is 2 s; the rest is for a machine that does other things too."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a file system that can be filled is mounted by root alone"),
]


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk() as folder:
        yield folder


@pytest.mark.alone
def test_a_world_goes_on_and_a_lost_rank_is_named(glm: Path, environ: Mapping[str, str], disk: Path) -> None:
    with served_world(disk, ["--plugin=glm47", f"--checkpoint={glm}", "--world=2"], environ=environ) as world:
        before, pid = world.complete("Hello", 8), world.pid(1)
        fill(disk)
        assert world.complete("Hello", 8).text == before.text
        crowd = Crowd(world, 4)
        world.until(4)
        os.kill(pid, signal.SIGKILL)
        assert world.seconds_to_unhealthy() <= LIMIT_S
        answers = [answer for answer in crowd.answers() if answer is not None]
        assert len(answers) == 4, "nobody is left without an answer"
        assert all("rank 1" in answer.text for answer in answers)
        assert world.process.wait(60) == 2


def test_a_rank_without_room_for_its_fault_file_says_so(glm: Path, environ: Mapping[str, str], disk: Path) -> None:
    fill(disk)
    model = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2", "--rank=1", "--rendezvous=127.0.0.1:1"]
    with started_rank(disk, model, environ=environ) as rank:
        said = rank.communicate(timeout=90)[1]
    assert rank.returncode == 2
    assert "the log directory cannot be written to" in said
    assert "No space left on device" in said
