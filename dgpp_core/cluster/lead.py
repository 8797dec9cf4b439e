"""The engine process of rank 0 in a world of several ranks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import torch

from dgpp_core.api import Bus, DgppError
from dgpp_core.bus.transports import choose
from dgpp_core.cluster.boot import Assignment, Built, build, device_of, shares_device
from dgpp_core.cluster.channel import Channel
from dgpp_core.cluster.hub import Hub
from dgpp_core.cluster.identity import Build
from dgpp_core.cluster.process import Life, process_name
from dgpp_core.cluster.rank import Rank, World
from dgpp_core.cluster.records import PROTOCOL, Era, Hello
from dgpp_core.cluster.vigil import Patience
from dgpp_core.config.addresses import Address, address_of, listening
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import Progress
from dgpp_core.scheduler.messages import Boot, Failed, Ranks

_log = logging.getLogger("dgpp.cluster")


class Lead:
    """Rank 0 of ``ranks``: forms the world, serves, and ends it.

    Args:
        boot: what the front end wants served.
        report: progress of the start.
    """

    def __init__(
        self, boot: Boot, ranks: Ranks, what: Assignment, channel: Channel, report: Progress, clock: Callable[[], float]
    ) -> None:
        self._what, self._ranks, self._channel, self._report = what, ranks, channel, report
        self._life = Life(0, ranks.epoch, ranks.log_dir, clock)
        self._engine: Engine | None = None
        listener = socket.socket(fileno=ranks.journal_fd)
        self._meeting = listening(Address(address_of(listener).host, ranks.fabric_port))
        hello = Hello(
            protocol=PROTOCOL, rank=0, world=ranks.world, epoch=ranks.epoch, process=process_name(),
            build=Build.here(what.model.plugin), settings=boot.settings,
        )  # fmt: skip
        cuda = device_of(what).type == "cuda"
        self._era = Era(
            epoch=ranks.epoch, world=ranks.world, model=boot.model, settings=boot.settings,
            fabric_port=address_of(self._meeting).port,
            bus=choose(
                ranks.fabric, world=ranks.world, here=ranks.here, cuda=cuda, shared=shares_device(what)
            ),
        )  # fmt: skip
        self.hub = Hub(
            listener, hello, self._era, self._life.stream, Patience(), clock, self._life.heartbeat, self._end
        )

    def start(self) -> Built:
        """Form the world and build this rank; raises what keeps it from serving."""
        self.hub.gather(self._ranks.timeout, self._show)
        built = build(self._what, self._connect, self._report, self._life.pulse)
        self._engine = built.engine
        self.hub.vote(built.terms(), self._life.pulse.longest, self._show)
        return built

    def rank(self, built: Built, clock: Callable[[], float], name: str) -> Rank:
        """The loop that serves."""
        world = World(self.hub.leader, self._life.stream)
        return Rank(built.served, self._channel, clock, built.compiles, name, pulse=self._life.pulse, world=world)

    def finish(self) -> None:
        """End the world in order; raises where the ranks' complete streams differ."""
        self.hub.finish()
        step, digest = self._life.stream.head
        _log.info("%d ranks took the same %d steps, digest %016x", self._ranks.world, step, digest)
        self._life.leave(self._engine)

    def fail(self, error: Exception) -> None:
        """The loop raised: end the world with the account that is nearest to the cause. Does not return."""
        self.hub.note(self._life.fault(error))
        threading.Event().wait()

    def _show(self, what: str) -> None:
        self._report(what, 0, 0)

    def _connect(self, device: torch.device) -> Bus:
        return self._life.meet(self._era, str(address_of(self._meeting)), device, self._ranks.fabric, self._meeting)

    def _end(self, error: DgppError) -> None:
        """The front end first: its clients wait."""
        with contextlib.suppress(OSError):
            self._channel.send(Failed(error.line(), str(error), error.exit_code))
        self.hub.halt(error.line())
        self._life.end(error)
