"""The engine process of any rank but 0: ``python -m dgpp_core.cluster.peer OPTIONS``, or ``dgpp rank``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import Bus, DgppError, EngineError
from dgpp_core.cluster.boot import Assignment, Built, build, set_threads
from dgpp_core.cluster.follower import Follower
from dgpp_core.cluster.identity import Build
from dgpp_core.cluster.member import Member, connect, join
from dgpp_core.cluster.process import Life, process_name
from dgpp_core.cluster.records import PROTOCOL, Era, Gone, Hello, Vote
from dgpp_core.cluster.vigil import MISSED, Patience
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.host.loading import load_plugins
from dgpp_core.scheduler.scheduler import Scheduler
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.text.grammar.spec import Grammar

_log = logging.getLogger("dgpp.cluster")


class PeerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is started with; everything that shapes execution comes from rank 0.

    Attributes:
        rendezvous: ``host:port`` of rank 0's journal.
        model: the spec's name.
        checkpoint: the checkpoint's folder on this host.
        settings: engine settings to insist on, as JSON; empty takes rank 0's.
        here: ranks on this host.
        log_dir: where the fault file goes.
        timeout: seconds to reach rank 0.
        fabric: this node's; the transport is rank 0's choice.
    """

    rank: int
    world: int
    rendezvous: str
    model: str
    checkpoint: str
    device: str = "auto"
    epoch: int = 1
    settings: str = ""
    image_cache: str = ""
    here: int = 1
    log_dir: str
    timeout: float = 120.0
    fabric: Fabric = Fabric()


class Peer:
    """One rank.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, options: PeerOptions, clock: Callable[[], float]) -> None:
        self._options, self._clock = options, clock
        self._life = Life(options.rank, options.epoch, options.log_dir, clock)
        self._serving = False
        self._engine: Engine | None = None

    def run(self) -> int:
        """Join, build, vote and follow to the end; the exit status.

        Raises:
            DgppError: rank 0 cannot be reached or refuses this rank.
        """
        options, patience = self._options, Patience()
        model = load_plugins(environ=os.environ).model(options.model)
        hello = Hello(
            protocol=PROTOCOL, rank=options.rank, world=options.world, epoch=options.epoch, process=process_name(),
            build=Build.here(model.plugin), settings=options.settings.encode(),
        )  # fmt: skip
        link, era = join(connect(options.rendezvous, options.timeout), hello, patience, options.timeout)
        self._member = Member(link, patience, self._clock, self._life.heartbeat, self._life.end)
        self._member.start()
        try:
            self._follow(self._serve(Assignment(
                model=model, checkpoint=Path(options.checkpoint), device=options.device,
                settings=msgspec.json.decode(era.settings, type=EngineSettings), image_cache=options.image_cache,
                rank=options.rank, world=options.world, here=options.here,
            ), era))  # fmt: skip
        except Exception as error:
            self._fail(error)
        self._member.close()
        self._life.leave(self._engine)
        return 0

    def interrupt(self) -> None:
        """A signal came. While it serves, the rank goes when rank 0 says so; a second signal ends it."""
        if not self._serving:
            sys.exit(130)
        _log.warning("rank %d ends with rank 0, at its journal's end; a second signal ends it now", self._options.rank)
        self._serving = False

    def _serve(self, what: Assignment, era: Era) -> Built:
        if era.model != self._options.model:
            expected = f"{era.model}, as rank 0 serves it"
            raise EngineError("this rank was started for another model", found=self._options.model, expected=expected)
        built = build(what, lambda device: self._connect(device, era), _quiet, self._life.pulse)
        self._engine = built.engine
        self._member.post(Vote(built.terms(), self._life.pulse.longest))
        return built

    def _follow(self, built: Built) -> None:
        life, served = self._life, built.served
        stepper = Stepper(
            Scheduler(served.limits),
            life.stream.witness(served.executor),
            lag=served.lag,
            deliver=lambda out: None,
            look=served.look,
        )

        def compile_grammar(grammar: Grammar, done: Callable[[], None]) -> None:
            made: Future[object] = served.compile_grammar(grammar)
            made.add_done_callback(lambda _: done())

        follower = Follower(stepper, life.stream, self._member.post, compile_grammar)
        self._serving = True
        while True:
            life.pulse.turn("waiting")
            record = self._member.next()
            life.pulse.turn("working")
            if follower.apply(record):
                return

    def _connect(self, device: torch.device, era: Era) -> Bus:
        host = self._options.rendezvous.rpartition(":")[0]
        return self._life.meet(era, f"{host}:{era.fabric_port}", device, self._options.fabric)

    def _fail(self, error: Exception) -> None:
        """Tell rank 0 and end; does not return."""
        fault = self._life.fault(error)
        told = fault.error
        self._member.post(Gone(told.line(), str(told), told.exit_code, collective=fault.weight == MISSED))
        self._member.note(fault)
        threading.Event().wait()


def _quiet(stage: str, done: int, total: int) -> None:
    _log.debug("%s %d of %d", stage, done, total)


def run(options: PeerOptions) -> int:
    """Run one rank to its end; the exit status. Ends the process itself where the world fails."""
    set_threads(options.here)
    peer = Peer(options, time.monotonic)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: peer.interrupt())
    return peer.run()


def main(argv: list[str]) -> int:
    """Entry point: the options as one JSON argument."""
    options = msgspec.json.decode(argv[0], type=PeerOptions)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {options.rank}: %(message)s")
    try:
        return run(options)
    except DgppError as error:
        print(f"rank {options.rank}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
