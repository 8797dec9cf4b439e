"""How soon a lost rank is noticed: ``python benchmarks/lost_ranks.py --checkpoint DIR [--trials 50] [--out FILE]``.

Each trial harms one rank of a real service under load and measures the seconds until ``/health`` is not 200 and until
the last client has its answer. After each, the service starts again by itself (``--relaunch``), and the first reply of
the next trial must be the one that the first service gave: the next start serves.

Faults: ``kill`` and ``stop`` (SIGKILL, SIGSTOP) of any rank in turn. Fails where a client gets no answer, an answer
names no rank, a reply differs, or the 99th percentile is above the goal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.testing.served_world import Crowd, ServedWorld, served_world

GOAL_S = 2.0
CLIENTS = 4
NUMBERS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
EACH_START = 25
"""Relaunches of one service, so that a leak of its front end would show."""


class Trial(msgspec.Struct, frozen=True):
    """One harmed rank; ``faults`` are broken promises, empty where all were kept."""

    fault: str
    world: int
    rank: int
    unhealthy_s: float
    answered_s: float
    load: float
    faults: tuple[str, ...] = ()


def main() -> None:
    """Run all trials, print a line each and a summary; exit 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default="glm47")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", choices=sorted(NUMBERS), nargs="+", default=sorted(NUMBERS))
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    summaries: list[dict[str, Any]] = []
    broken = 0
    for kind, world in itertools.product(options.kinds, options.worlds):
        trials = list(_trials(options.plugin, options.checkpoint, kind, world, options.trials))
        summaries.append(_summary(kind, world, trials))
        broken += sum(bool(trial.faults) for trial in trials) + (summaries[-1]["unhealthy_p99_s"] > GOAL_S)
        print(json.dumps(summaries[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(_report(summaries), indent=2) + "\n")
    sys.exit(bool(broken))


def _report(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "benchmarks/lost_ranks.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "goal_s": GOAL_S,
        "cases": cases,
    }


def _trials(plugin: str, checkpoint: Path, kind: str, ranks: int, count: int) -> Iterator[Trial]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    left, first = count, ""
    while left:
        now = min(left, EACH_START)
        arguments = [
            f"--plugin={plugin}", f"--checkpoint={checkpoint}", f"--world={ranks}", f"--relaunch={now - 1}",
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, served_world(Path(folder), arguments, environ=environ) as world:
            for at in range(now):
                if at:
                    world.await_ready()
                reply = world.complete("The quick brown fox", 16).text
                first = first or reply
                trial = _trial(world, kind, ranks, (count - left + at) % ranks, at + 1)
                if reply != first:
                    trial = msgspec.structs.replace(trial, faults=(*trial.faults, f"replied {reply!r} first"))
                print(json.dumps(msgspec.to_builtins(trial)), flush=True)
                yield trial
            if (status := world.process.wait(60)) != 2:
                raise SystemExit(f"the service left with status {status}")
        left -= now


def _trial(world: ServedWorld, kind: str, ranks: int, rank: int, epoch: int) -> Trial:
    crowd = Crowd(world, CLIENTS)
    world.until(CLIENTS)
    began = time.monotonic()
    os.kill(world.pid(rank, epoch), NUMBERS[kind])
    unhealthy = world.seconds_to_unhealthy()
    answers = crowd.answers()
    answered = time.monotonic() - began
    faults = [f"client {at} got no answer" for at, answer in enumerate(answers) if answer is None]
    faults += [
        f"{answer.status}: {answer.text}"
        for answer in answers
        if answer is not None and (answer.status < 500 or f"rank {rank}" not in answer.text)
    ]
    return Trial(kind, ranks, rank, unhealthy, answered, os.getloadavg()[0], tuple(faults))


def _summary(kind: str, world: int, trials: list[Trial]) -> dict[str, Any]:
    def at(share: float, seconds: list[float]) -> float:
        return round(sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 3)

    unhealthy, answered = [trial.unhealthy_s for trial in trials], [trial.answered_s for trial in trials]
    return {
        "fault": kind,
        "world": world,
        "trials": len(trials),
        "unhealthy_p50_s": at(0.5, unhealthy),
        "unhealthy_p99_s": at(0.99, unhealthy),
        "answered_p99_s": at(0.99, answered),
        "load": [round(min(trial.load for trial in trials), 1), round(max(trial.load for trial in trials), 1)],
        "broken": [fault for trial in trials for fault in trial.faults],
    }


if __name__ == "__main__":
    main()
