"""A served model over two ranks with GPUs: the journal and the graphs' collectives together, and a rank that stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dgpp_core.cli.main import cli
from dgpp_core.testing.served_world import Crowd, served_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
APART = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one a rank")


@pytest.mark.parametrize(
    ("device", "bus", "said"),
    [
        pytest.param("cuda:0", "shm", "collectives over shared memory, device cuda", id="one card"),
        pytest.param("cuda", "shm", "collectives over shared memory, device cuda", id="shared memory", marks=APART),
        pytest.param("cuda", "nccl", "collectives over NCCL, device cuda", id="NCCL", marks=APART),
    ],
)
def test_two_ranks_take_the_same_steps_and_a_lost_one_is_named(
    tmp_path: Path, device: str, bus: str, said: str
) -> None:
    done = CliRunner().invoke(cli, ["synth", "smollm2", "--tiny", str(tmp_path / "tiny")])
    assert done.exit_code == 0, done.stderr
    arguments = [
        "--plugin=smollm2", f"--checkpoint={tmp_path / 'tiny'}", "--world=2", f"--device={device}", f"--bus={bus}",
        "--no-image",
    ]  # fmt: skip
    with served_world(tmp_path / "first", arguments, environ=os.environ) as world:
        assert world.log.count(said) == 2, world.log
        alone = world.complete("The quick brown fox", 64)
        assert alone.status == 200
        crowd = Crowd(world, 6, tokens=200)
        assert world.complete("The quick brown fox", 64).text == alone.text, "in company as alone"
        assert [answer and answer.status for answer in crowd.answers(120)] == [200] * 6
        world.process.send_signal(signal.SIGTERM)
        assert world.process.wait(60) == 0, world.log
        assert "2 ranks took the same" in world.log
    with served_world(tmp_path / "second", arguments, environ=os.environ) as world:
        crowd = Crowd(world, 4)
        world.until(4)
        os.kill(world.pid(1), signal.SIGSTOP)
        assert world.seconds_to_unhealthy() <= 4.0
        assert all(answer is not None and "rank 1" in answer.text for answer in crowd.answers())
        assert world.process.wait(60) == 2
