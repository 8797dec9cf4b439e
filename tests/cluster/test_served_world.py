"""A served model over several processes: the replies of one rank, and what a lost rank does to those who wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from dgpp_core.testing.served_world import Crowd, ServedWorld, served_world

PROMPTS = ("Hello", "The quick brown fox", "x" * 50)
LIMIT_S = 4.0
"""The promise is 2 s; the rest is for a machine that does other things too."""

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def texts(world: ServedWorld) -> list[str]:
    answers = [world.complete(prompt, 24) for prompt in PROMPTS]
    assert [answer.status for answer in answers] == [200] * len(PROMPTS), world.log
    return [answer.text for answer in answers]


def lose(world: ServedWorld, rank: int, number: signal.Signals, epoch: int = 1) -> list[str]:
    """Harm a rank under load; what the clients, every one of them, are told."""
    crowd = Crowd(world, 4)
    world.until(4)
    os.kill(world.pid(rank, epoch), number)
    assert world.seconds_to_unhealthy() <= LIMIT_S
    answers = [answer for answer in crowd.answers() if answer is not None]
    assert len(answers) == 4, "nobody is left without an answer"
    assert {answer.status for answer in answers} <= {500, 503}
    return [answer.text for answer in answers]


@pytest.fixture(scope="module")
def alone(glm: Path, environ: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The replies of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    with served_world(folder, ["--plugin=glm47", f"--checkpoint={glm}"], environ=environ) as world:
        return texts(world)


def test_two_ranks_reply_as_one_and_start_again_after_a_loss(
    glm: Path, environ: Mapping[str, str], tmp_path: Path, alone: list[str]
) -> None:
    arguments = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2", "--relaunch=1"]
    with served_world(tmp_path, arguments, environ=environ) as world:
        assert texts(world) == alone
        assert world.log.count("collectives over shared memory") == 2, "every rank says what it uses"
        for told in lose(world, 1, signal.SIGKILL):
            assert "rank 1" in told
        world.await_ready()
        assert texts(world) == alone
        for told in lose(world, 1, signal.SIGSTOP, epoch=2):
            assert "rank 1 is silent" in told
        assert world.process.wait(60) == 2
        assert "epoch 2, 0 more times" in world.log
        assert "rank 1 is gone" in world.fault_file(0)
        assert "last collective: collective" in world.fault_file(0, 2)
        for rank in (0, 1):
            assert "most recent call first" in world.fault_file(rank, 2), "stacks, also of the stopped one"


def test_four_ranks_reply_as_one_and_leave_together(
    glm: Path, environ: Mapping[str, str], tmp_path: Path, alone: list[str]
) -> None:
    with served_world(tmp_path, ["--plugin=glm47", f"--checkpoint={glm}", "--world=4"], environ=environ) as world:
        assert texts(world) == alone
        pids = [world.pid(rank) for rank in range(4)]
        world.process.send_signal(signal.SIGTERM)
        assert world.process.wait(60) == 0, world.log
        assert "4 ranks took the same" in world.log
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_the_loss_of_rank_0_is_named_and_ends_the_others(
    glm: Path, environ: Mapping[str, str], tmp_path: Path, alone: list[str]
) -> None:
    """Over torch.distributed, whose store goes with rank 0."""
    arguments = ["--plugin=glm47", f"--checkpoint={glm}", "--world=2", "--bus=gloo"]
    with served_world(tmp_path, arguments, environ=environ) as world:
        assert texts(world) == alone
        assert world.log.count("collectives over TCP (gloo)") == 2, "every rank says what it uses"
        pids = [world.pid(rank) for rank in range(2)]
        for told in lose(world, 0, signal.SIGSTOP):
            assert "rank 0" in told
        assert world.process.wait(60) == 2
        assert "rank 0 is" in world.fault_file(1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
