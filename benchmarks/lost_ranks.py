"""How soon a lost rank is noticed: ``python benchmarks/lost_ranks.py --checkpoint DIR [--trials 50] [--out FILE]``.

Each trial starts a world whose ranks are on hosts of their own (network namespaces), harms one rank under load, and
measures the seconds until ``/health`` is not 200, until the last client has its answer, and until every process has
ended. The first reply of each must be that of the first world: after every fault the next start serves.

Faults: ``kill`` and ``stop`` (SIGKILL, SIGSTOP) of any rank in turn; ``cut``, its cable pulled, and ``loss``, a link
that stays up and carries nothing; ``disk``, a log directory that is full before the rank is killed, with which the
world must have gone on. ``lossy`` harms nothing: a world whose link loses 5 % of the packets gives the same replies.

Fails where a client gets no answer, an answer names no rank, a process stays, a reply differs, or the 99th percentile
of the first two times is above the goal.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.testing.namespaces import Hosts, hosts
from dgpp_core.testing.served_world import Crowd
from dgpp_core.testing.small_disk import fill, small_disk
from dgpp_core.testing.world_apart import WorldApart, world_apart

GOAL_S = 2.0
END_S = 15.0
CLIENTS = 4
PROMPT, TOKENS = "The quick brown fox", 16
KINDS = ("kill", "stop", "cut", "loss", "disk", "lossy")
LOSSY_PERCENT = 5.0
RELEASED = 3
"""Exit status of a rank that ends because the world does."""


class Trial(msgspec.Struct, frozen=True):
    """One harmed rank; ``faults`` are broken promises, empty where all were kept. Times in seconds."""

    fault: str
    world: int
    rank: int
    unhealthy_s: float
    answered_s: float
    ended_s: float
    load: float
    faults: tuple[str, ...] = ()


class Bench(msgspec.Struct, frozen=True, eq=False):
    """What all trials have in common."""

    model: tuple[str, ...]
    net: Hosts
    environ: dict[str, str]

    @contextlib.contextmanager
    def world(self, folder: Path, epoch: int) -> Iterator[WorldApart]:
        """The next start."""
        with world_apart(self.net, folder, self.model, epoch=epoch, environ=self.environ) as world:
            yield world


def asked(told: str | None, kinds: Iterable[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The options of a command line, and the arguments that name the model."""
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugin", default="glm47")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", choices=list(kinds), nargs="+", default=list(kinds))
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    return options, (f"--plugin={options.plugin}", f"--checkpoint={options.checkpoint}")


def main() -> None:
    """Run all trials, print a line each and a summary; exit 1 where a promise was broken."""
    options, model = asked(__doc__, KINDS)
    summaries: list[dict[str, Any]] = []
    for world, kind in itertools.product(options.worlds, options.kinds):
        with hosts(world) as net:
            bench = Bench(model, net, {**os.environ, "OMP_NUM_THREADS": "1"})
            run = partial(_lossy if kind == "lossy" else _harmful, bench, kind, options.trials)
            summaries.append(net.inside(0, run))
        print(json.dumps(summaries[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(_report(summaries), indent=2) + "\n")
    sys.exit(any(case["broken"] for case in summaries))


def _report(cases: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "benchmarks/lost_ranks.py", *sys.argv[1:]]),
        "machine": machine(),
        "goal_s": GOAL_S,
        "cases": cases,
    }


def machine() -> str:
    """What it ran on."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _harmful(bench: Bench, kind: str, count: int) -> dict[str, Any]:
    world, trials, first = len(bench.net.names), [], ""
    ranks = range(world) if kind in ("kill", "stop", "disk") else range(1, world)
    for at, rank in zip(range(count), itertools.cycle(ranks), strict=False):
        with log_folder(small=kind == "disk") as folder, bench.world(folder, at + 1) as apart:
            reply = apart.served.complete(PROMPT, TOKENS).text
            first = first or reply
            if kind == "disk":
                fill(folder)
                reply = apart.served.complete(PROMPT, TOKENS).text
            trial = _trial(bench.net, apart, kind, rank)
        if reply != first:
            trial = msgspec.structs.replace(trial, faults=(*trial.faults, f"replied {reply!r}, not {first!r}"))
        print(json.dumps(msgspec.to_builtins(trial)), flush=True)
        trials.append(trial)
    return _summary(kind, world, trials)


def _trial(net: Hosts, apart: WorldApart, kind: str, rank: int) -> Trial:
    crowd = Crowd(apart.served, CLIENTS)
    try:
        apart.served.until(CLIENTS)
    except OSError as error:
        left = apart.served.process.poll(), [process.exitcode for process in apart.ranks]
        told = [answer and answer.text for answer in crowd.answers(1.0)]
        log = apart.served.log[-2000:]
        raise SystemExit(f"it ended before it was harmed: front end, ranks {left}, clients {told}: {log}") from error
    pid = apart.pid(rank)
    began = time.monotonic()
    with _harmed(net, kind, rank, pid):
        unhealthy = apart.served.seconds_to_unhealthy()
        answers = crowd.answers()
        answered = time.monotonic() - began
        faults = [f"client {at} got no answer" for at, answer in enumerate(answers) if answer is None]
        faults += [
            f"{answer.status}: {answer.text}"
            for answer in answers
            if answer is not None and (answer.status < 500 or f"rank {rank}" not in answer.text)
        ]
        faults += _ends(apart, spared=rank if kind in ("kill", "stop", "disk") else 0)
    ended = time.monotonic() - began
    return Trial(kind, len(net.names), rank, unhealthy, answered, ended, os.getloadavg()[0], tuple(faults))


@contextlib.contextmanager
def _harmed(net: Hosts, kind: str, rank: int, pid: int) -> Iterator[None]:
    match kind:
        case "loss":
            with net.drop(rank, 100):
                yield
        case "cut":
            with net.cut_off(rank):
                yield
        case _:
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            yield


def _ends(apart: WorldApart, spared: int) -> list[str]:
    """What does not end as it has to: the front end with 2, the ranks with `RELEASED`, but for the harmed one."""
    faults = []
    try:
        if (status := apart.served.process.wait(END_S)) != 2:
            faults.append(f"the front end left with status {status}")
    except subprocess.TimeoutExpired:
        faults.append("the front end stays")
    for rank, process in enumerate(apart.ranks, 1):
        if rank != spared:
            process.join(END_S)
            if process.exitcode != RELEASED:
                faults.append(f"rank {rank} left with status {process.exitcode}")
    return faults


def log_folder(*, small: bool) -> contextlib.AbstractContextManager[Path]:
    """A folder for as long as the block runs; ``small`` is one that can be filled."""
    return small_disk() if small else _folder()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _lossy(bench: Bench, kind: str, count: int) -> dict[str, Any]:
    """Requests to one world whose last rank's link loses packets."""
    rank, seconds, broken = len(bench.net.names) - 1, [], []
    with tempfile.TemporaryDirectory() as name, bench.world(Path(name), 1) as apart:
        first = apart.served.complete(PROMPT, TOKENS).text
        with bench.net.drop(rank, LOSSY_PERCENT):
            for at in range(count):
                answer = apart.served.complete(PROMPT, TOKENS)
                seconds.append(answer.seconds)
                if answer.text != first or apart.served.health() != 200:
                    broken.append(f"request {at}: {answer.status} {answer.text!r}, not {first!r}")
                    break
    return {
        "fault": kind,
        "percent": LOSSY_PERCENT,
        "world": len(bench.net.names),
        "trials": len(seconds),
        "reply_p50_s": at_share(0.5, seconds),
        "reply_p99_s": at_share(0.99, seconds),
        "broken": broken,
    }


def at_share(share: float, seconds: list[float]) -> float:
    """A percentile, in thousandths."""
    return round(sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 3)


def _summary(kind: str, world: int, trials: list[Trial]) -> dict[str, Any]:
    def of(field: Callable[[Trial], float], share: float) -> float:
        return at_share(share, [field(trial) for trial in trials])

    broken = [fault for trial in trials for fault in trial.faults]
    unhealthy, answered = (of(lambda t: t.unhealthy_s, 0.99), of(lambda t: t.answered_s, 0.99))
    if max(unhealthy, answered) > GOAL_S:
        broken.append(f"99 % are noticed within {unhealthy} s and answered within {answered} s")
    return {
        "fault": kind,
        "world": world,
        "trials": len(trials),
        "unhealthy_p50_s": of(lambda t: t.unhealthy_s, 0.5),
        "unhealthy_p99_s": unhealthy,
        "answered_p50_s": of(lambda t: t.answered_s, 0.5),
        "answered_p99_s": answered,
        "ended_p99_s": of(lambda t: t.ended_s, 0.99),
        "load": [round(min(trial.load for trial in trials), 1), round(max(trial.load for trial in trials), 1)],
        "broken": broken,
    }


if __name__ == "__main__":
    main()
