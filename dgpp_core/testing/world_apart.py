"""A served world whose ranks are on hosts of their own, each started as `dgpp cluster up` does.

Ranks but 0 are forked from a process that has imported what they need: the seconds that torch takes are not the subject
of a trial. What runs then is `dgpp rank` itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import msgspec

from dgpp_core.testing.namespaces import INTERFACE, Hosts, enter
from dgpp_core.testing.served_world import ServedWorld, served_world

PRELOADED = ["dgpp_core.cli.main", "dgpp_core.cli.rank", "dgpp_core.cluster.peer"]
PORT = 29971


class RankStart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's command.

    Attributes:
        namespace: the host's.
        arguments: of ``dgpp rank``.
        log: where its standard output and error go.
        version: what it says its version is; empty for its own.
    """

    namespace: str
    arguments: tuple[str, ...]
    environ: dict[str, str]
    log: Path
    version: str = ""


class Ranks:
    """Starts ranks, and ends with the block those that run."""

    def __init__(self) -> None:
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._started: list[ForkServerProcess] = []

    def start(self, start: RankStart) -> ForkServerProcess:
        """A rank's process."""
        process = self._context.Process(target=_run, args=(start,))
        process.start()
        self._started.append(process)
        return process

    def __enter__(self) -> Ranks:
        self._context.Process(target=_nothing).start()  # what is forked from starts with the first process
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._started.clear()


class WorldApart(msgspec.Struct, frozen=True, eq=False):
    """A running world.

    Attributes:
        served: front end and rank 0, on the first host.
        ranks: the processes of the others, from 1 on.
    """

    served: ServedWorld
    ranks: tuple[ForkServerProcess, ...]
    epoch: int

    def pid(self, rank: int) -> int:
        """A rank's process."""
        return self.served.pid(rank, self.epoch)


def rendezvous(net: Hosts) -> str:
    """Where rank 0 listens."""
    return f"{net.address(0)}:{PORT}"


@contextlib.contextmanager
def world_apart(
    net: Hosts, folder: Path, model: Sequence[str], *, epoch: int, environ: Mapping[str, str]
) -> Iterator[WorldApart]:
    """Serve from the first host, with one rank on each; call it `Hosts.inside` that host.

    Args:
        folder: for logs and fault files.
        model: arguments that every rank is given.

    Raises:
        RuntimeError: as `served_world`.
    """
    given = ("--log-dir", str(folder), *common(net, model, epoch))
    environ = on_interface(environ)
    folder.mkdir(parents=True, exist_ok=True)
    with Ranks() as starter:
        ranks = tuple(
            starter.start(rank_start(net, rank, given, environ, folder / f"rank-{rank}.log"))
            for rank in range(1, len(net.names))
        )
        with served_world(folder, common(net, model, epoch), environ=environ) as served:
            yield WorldApart(served, ranks, epoch)


def common(net: Hosts, model: Sequence[str], epoch: int) -> list[str]:
    """What the commands of all ranks have in common."""
    return [*model, f"--world={len(net.names)}", f"--rendezvous={rendezvous(net)}", f"--epoch={epoch}"]


def on_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which the bus takes the hosts' cables."""
    return {**environ, "GLOO_SOCKET_IFNAME": INTERFACE}


def rank_start(
    net: Hosts, rank: int, arguments: Sequence[str], environ: Mapping[str, str], log: Path, version: str = ""
) -> RankStart:
    """One rank on the host of its number."""
    return RankStart(
        namespace=net.names[rank], arguments=(f"--rank={rank}", *arguments), environ=dict(environ), log=log,
        version=version,
    )  # fmt: skip


def _nothing() -> None:
    pass


def _end_with_asker() -> None:
    asker = multiprocessing.parent_process()
    assert asker is not None, "it was forked for somebody"
    wait([asker.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _run(start: RankStart) -> None:
    """In the forked process: become that rank, for as long as the one that asked for it lives."""
    threading.Thread(target=_end_with_asker, daemon=True).start()
    enter(start.namespace)
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.environ.clear()
    os.environ.update(start.environ)
    if start.version:
        import dgpp_core

        dgpp_core.__version__ = start.version
    sys.argv = ["dgpp", "rank", *start.arguments]
    runpy.run_module("dgpp_core.cli", run_name="__main__", alter_sys=True)
