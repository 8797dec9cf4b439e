"""How soon a rank that does not belong is refused: ``python benchmarks/refused_ranks.py --checkpoint DIR``.

Each trial starts one rank, on a host of its own (a network namespace), that must not come in, and measures the seconds
from its start until it has ended and, where it is for rank 0 to refuse it, rank 0's log names it.

Kinds: ``version``, one that says it is of another version of dgpp, and ``settings``, one that insists on another
setting: both end the start by name, of all ranks. ``epoch``, one of an older start, is refused, and ``disk``, whose log
directory has no room, ends: the others wait on, and serve when the right one comes. After all trials of a kind the next
start must give the same reply.

Fails where a rank or rank 0 does not name what differs with both values, one does not end, a reply differs, or the 99th
percentile is above the goal.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
from lost_ranks import GOAL_S, PROMPT, TOKENS, asked, at_share, log_folder, machine

from dgpp_core import __version__
from dgpp_core.testing.namespaces import Hosts, hosts
from dgpp_core.testing.served_world import LOG, ServedWorld, await_line, started_service
from dgpp_core.testing.small_disk import fill
from dgpp_core.testing.world_apart import Ranks, common, on_interface, rank_start, world_apart

END_S = 60.0
EPOCH = 7
OTHER_VERSION = "99.0"
CAPACITIES = 4096, 8192


class Kind(msgspec.Struct, frozen=True):
    """What is refused, and in what words.

    Attributes:
        said: by the rank.
        named: in rank 0's log, with ``{rank}``; empty where it does not get to know.
        ends: whether the start ends with it.
    """

    said: tuple[str, ...]
    named: tuple[str, ...] = ()
    ends: bool = False


_VERSIONS = (f"version '{OTHER_VERSION}'", f"version '{__version__}', as rank 0 has it")
_SETTINGS = (f"kv_capacity {CAPACITIES[1]}", f"kv_capacity {CAPACITIES[0]}, as rank 0 has it")
KINDS = {
    "version": Kind(_VERSIONS, ("rank {rank} (", *_VERSIONS), ends=True),
    "settings": Kind(_SETTINGS, ("rank {rank} (", *_SETTINGS), ends=True),
    "epoch": Kind((f"started for epoch {EPOCH - 1}",), ("rank {rank} (", f"started for epoch {EPOCH - 1}")),
    "disk": Kind(("the log directory cannot be written to",)),
}


class Bench(msgspec.Struct, frozen=True, eq=False):
    """One kind in one world.

    Attributes:
        model: arguments of rank 0 and of ranks that belong.
        wrong: arguments of the one that does not.
    """

    kind: str
    net: Hosts
    model: tuple[str, ...]
    wrong: tuple[str, ...]
    environ: Mapping[str, str]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return len(self.net.names)


def main() -> None:
    """Run all trials and print a summary of each kind; exit 1 where a promise was broken."""
    options, model = asked(__doc__, KINDS)
    cases: list[dict[str, Any]] = []
    for world, kind in itertools.product(options.worlds, options.kinds):
        with hosts(world) as net, tempfile.TemporaryDirectory() as folder:
            bench = _bench(kind, net, model, Path(folder))
            cases.append(net.inside(0, partial(_case, bench, options.trials)))
        print(json.dumps(cases[-1]), flush=True)
        if options.out is not None:
            report = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "goal_s": GOAL_S}
            options.out.write_text(json.dumps({**report, "cases": cases}, indent=2) + "\n")
    sys.exit(any(case["broken"] for case in cases))


def _bench(kind: str, net: Hosts, model: tuple[str, ...], folder: Path) -> Bench:
    environ = on_interface({**os.environ, "OMP_NUM_THREADS": "1"})
    if kind != "settings":
        return Bench(kind, net, model, model, environ)
    files = [folder / f"{capacity}.json" for capacity in CAPACITIES]
    for file, capacity in zip(files, CAPACITIES, strict=True):
        body = {"model": "zai-org/GLM-4.7", "world_size": len(net.names), "engine": {"kv_capacity": capacity}}
        file.write_text(json.dumps(body))
    environ["DGPP_NODES"] = " ".join(f"host-{rank}" for rank in range(len(net.names)))
    right, wrong = ((*model, f"--config={file}") for file in files)
    return Bench(kind, net, right, wrong, environ)


def _case(bench: Bench, count: int) -> dict[str, Any]:
    if KINDS[bench.kind].ends:
        trials = list(_ended_starts(bench, count))
        with (
            tempfile.TemporaryDirectory() as folder,
            world_apart(bench.net, Path(folder), bench.model, epoch=EPOCH, environ=bench.environ) as world,
        ):
            reply = world.served.complete(PROMPT, TOKENS)
    else:
        trials, reply = _one_start(bench, count)
    seconds = [took for took, _ in trials]
    broken = [words for _, faults in trials for words in faults]
    if reply.status != 200:
        broken.append(f"the next start replies {reply.status}: {reply.text}")
    if at_share(0.99, seconds) > GOAL_S:
        broken.append(f"99 % are refused within {at_share(0.99, seconds)} s")
    return {
        "refused": bench.kind, "world": bench.world, "trials": len(trials), "refused_p50_s": at_share(0.5, seconds),
        "refused_p99_s": at_share(0.99, seconds), "load": round(os.getloadavg()[0], 1), "reply": reply.text,
        "broken": broken,
    }  # fmt: skip


Outcome = tuple[float, list[str]]
"""Seconds, and broken promises."""


def _ended_starts(bench: Bench, count: int) -> Iterator[Outcome]:
    """One start a trial: the other ranks are there, and the last to come is the wrong one."""
    for _, wrong in zip(range(count), itertools.cycle(range(1, bench.world)), strict=False):
        right = [rank for rank in range(1, bench.world) if rank != wrong]
        with tempfile.TemporaryDirectory() as name, Ranks() as starter:
            folder = Path(name)
            with started_service(folder, common(bench.net, bench.model, EPOCH), environ=bench.environ) as leader:
                others = [_start(bench, starter, folder, rank) for rank in right]
                _until(lambda folder=folder, wrong=wrong: f"waiting for rank {wrong}\n" in _read(folder))  # type: ignore[misc]
                took, faults = _refuse(bench, starter, folder, wrong)
                if leader.wait(END_S) == 0:
                    faults.append("rank 0 left in order")
                for rank, process in zip(right, others, strict=True):
                    process.join(END_S)
                    if process.exitcode in (0, None):
                        faults.append(f"rank {rank} left with status {process.exitcode}")
            print(json.dumps([bench.kind, bench.world, wrong, took, faults]), flush=True)
            yield took, faults


def _one_start(bench: Bench, count: int) -> tuple[list[Outcome], Any]:
    """One start for all trials, which goes on waiting for the last rank and serves when it comes."""
    last, trials = bench.world - 1, []
    with tempfile.TemporaryDirectory() as name, Ranks() as starter:
        folder = Path(name)
        with started_service(folder, common(bench.net, bench.model, EPOCH), environ=bench.environ) as leader:
            for rank in range(1, last):
                _start(bench, starter, folder, rank)
            _until(lambda: f"waiting for rank {last}\n" in _read(folder))
            for _ in range(count):
                trials.append(_refuse(bench, starter, folder, last))
                print(json.dumps([bench.kind, bench.world, last, *trials[-1]]), flush=True)
            _start(bench, starter, folder, last)
            ready = await_line(leader)
            if not ready:
                raise SystemExit(f"the world does not form: {_read(folder)}")
            served = ServedWorld(leader, ready.split()[1].removesuffix("/v1"), folder)
            return trials, served.complete(PROMPT, TOKENS)


def _start(bench: Bench, starter: Ranks, folder: Path, rank: int) -> ForkServerProcess:
    given = [*common(bench.net, bench.model, EPOCH), f"--log-dir={folder}"]
    return starter.start(rank_start(bench.net, rank, given, bench.environ, folder / f"rank-{rank}.log"))


def _refuse(bench: Bench, starter: Ranks, folder: Path, rank: int) -> Outcome:
    """Start the wrong rank and see it refused."""
    kind, before = KINDS[bench.kind], len(_read(folder))
    epoch = EPOCH - 1 if bench.kind == "epoch" else EPOCH
    version = OTHER_VERSION if bench.kind == "version" else ""
    with log_folder(small=bench.kind == "disk") as own, tempfile.TemporaryDirectory() as apart:
        if bench.kind == "disk":
            fill(own)
        given, log = [*common(bench.net, bench.wrong, epoch), f"--log-dir={own}"], Path(apart) / "said"
        began = time.monotonic()
        process = starter.start(rank_start(bench.net, rank, given, bench.environ, log, version))
        process.join(END_S)
        with contextlib.suppress(TimeoutError):
            words = [part.format(rank=rank) for part in kind.named]
            _until(lambda: all(part in _read(folder)[before:] for part in words))
        took, said, named = time.monotonic() - began, log.read_text(), _read(folder)[before:]
    faults = [f"rank {rank} does not say {part!r} but {said!r}" for part in kind.said if part not in said]
    faults += [f"rank 0 does not say {part!r} but {named!r}" for part in words if part not in named]
    if process.exitcode in (0, None):
        faults.append(f"rank {rank} left with status {process.exitcode}")
    return took, faults


def _read(folder: Path) -> str:
    return (folder / LOG).read_text()


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + END_S
    while not true():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


if __name__ == "__main__":
    main()
