"""A rank is lost while its GPU runs graphs with collectives: ``python benchmarks/lost_gpu_ranks.py [--trials 3]``.

Each trial starts a world of two ranks with a GPU each, harms one of them under load (SIGKILL or SIGSTOP, rank 1 or 0 in
turn for the first, rank 1 for the second), and measures the seconds until ``/health`` is not 200, until the last client
has its answer, and until every process has ended. The first reply of each world is that of the first one: after every
fault the next start serves. Fails where a client gets no answer or a time is above the goal.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import click
import msgspec
import torch
from click.testing import CliRunner

from dgpp_core.cli.main import cli
from dgpp_core.testing.served_world import Crowd, served_world

GOAL_S, END_S, CLIENTS = 2.0, 15.0, 4
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One harmed rank; times in seconds."""

    bus: str
    fault: str
    rank: int
    unhealthy_s: float
    answered_s: float
    ended_s: float
    unanswered: int
    unnamed: int
    status: int
    first_reply: str

    @property
    def kept(self) -> bool:
        """Whether all that is promised was kept."""
        soon = max(self.unhealthy_s, self.answered_s) <= GOAL_S
        return soon and not self.unanswered and not self.unnamed and self.status == 2


def trial(folder: Path, checkpoint: Path, plugin: str, bus: str, fault: str, rank: int) -> Trial:
    """One world, from its start to its end."""
    arguments = [
        f"--plugin={plugin}", f"--checkpoint={checkpoint}", "--world=2", "--device=cuda", f"--bus={bus}", "--no-image",
    ]  # fmt: skip
    with served_world(folder, arguments, environ=os.environ) as world:
        first = world.complete("The quick brown fox", 32)
        crowd = Crowd(world, CLIENTS)
        world.until(CLIENTS)
        os.kill(world.pid(rank), SIGNALS[fault])
        began = time.monotonic()
        unhealthy = world.seconds_to_unhealthy()
        answers = crowd.answers()
        answered = time.monotonic() - began
        status = world.process.wait(END_S)
        return Trial(
            bus=bus, fault=fault, rank=rank, unhealthy_s=unhealthy, answered_s=answered,
            ended_s=time.monotonic() - began, unanswered=sum(answer is None for answer in answers),
            unnamed=sum(answer is not None and f"rank {rank}" not in answer.text for answer in answers),
            status=status, first_reply=first.text,
        )  # fmt: skip


@click.command(help=__doc__)
@click.option("--plugin", default="glm47")
@click.option("--trials", default=3, help="Of each fault over each transport.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False))
def main(plugin: str, trials: int, output: Path | None) -> None:
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        done = CliRunner().invoke(cli, ["synth", plugin, "--tiny", str(checkpoint)])
        if done.exit_code:
            raise click.ClickException(done.output)
        for bus in ("nccl", "shm"):
            for fault in SIGNALS:
                for number in range(trials):
                    rank = (1 + number) % 2 if fault == "kill" else 1
                    found.append(trial(Path(folder) / str(len(found)), checkpoint, plugin, bus, fault, rank))
                    click.echo(msgspec.json.encode(found[-1]).decode())
                    if output is not None:
                        report = {"card": torch.cuda.get_device_name(), "trials": msgspec.to_builtins(found)}
                        output.write_text(json.dumps(report, indent=2) + "\n")
    broken = [each for each in found if not each.kept or each.first_reply != found[0].first_reply]
    worst = max(max(each.unhealthy_s, each.answered_s) for each in found)
    click.echo(f"{len(found)} trials, {len(broken)} broke a promise; the slowest answer after {worst:.2f} s")
    raise SystemExit(bool(broken))


if __name__ == "__main__":
    main()
