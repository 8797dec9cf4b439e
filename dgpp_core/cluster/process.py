"""What every engine process of a world has: its signs of life, its operations, its fault file, and how it ends."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from dgpp_core.api import Bus, DgppError, EngineError
from dgpp_core.bus.forming import Terms
from dgpp_core.bus.meet import RankBus, meet
from dgpp_core.cluster.faults import FaultFile
from dgpp_core.cluster.pulse import Pulse, WatchedBus
from dgpp_core.cluster.records import Era, Heartbeat
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import FAILED, MISSED, Fault
from dgpp_core.config.fabric import Fabric
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine

BUS_S = 3600.0
"""Seconds that the bus waits for a rank: the others may load for long, and one that is lost is noticed elsewhere."""


class Life:
    """One rank's process.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, rank: int, epoch: int, log_dir: str, clock: Callable[[], float]) -> None:
        self.pulse, self.stream = Pulse(clock), OperationStream()
        self._rank, self._clock = rank, clock
        self._bus: RankBus | None = None
        self.faults = FaultFile(Path(log_dir).expanduser(), rank, epoch, time.time())

    def meet(
        self, era: Era, address: str, device: torch.device, fabric: Fabric, listener: socket.socket | None = None
    ) -> Bus:
        """Join the other ranks over the transport that rank 0 has chosen.

        Args:
            address: ``host:port`` where the bus meets.
            fabric: this node's.
            listener: at rank 0, as of `Terms`.

        Raises:
            EngineError: as `dgpp_core.bus.meet.meet`.
        """
        terms = Terms(
            rank=self._rank, world=era.world, address=address, device=device, timeout=BUS_S,
            settings=f"epoch {era.epoch}", listener=listener,
        )  # fmt: skip
        pace = msgspec.json.decode(era.settings, type=EngineSettings).bulk_pace_gbps
        self._bus = meet(era.bus, terms, fabric, pace=None if pace < 0 else pace)
        return WatchedBus(self._bus, self.pulse)

    def leave(self, engine: Engine | None) -> None:
        """Part from the other ranks in order, with nothing captured left that could still call them."""
        if engine is not None:
            engine.release()
        if self._bus is not None:
            self._bus.close()

    def heartbeat(self) -> Heartbeat:
        """How the rank is now."""
        sign, (step, digest) = self.pulse.sign, self.stream.head
        return Heartbeat(step=step, digest=digest, phase=sign.phase, age=self._clock() - sign.since, call=sign.call)

    def fault(self, error: Exception) -> Fault:
        """The account of an exception that ends the rank's loop."""
        if not isinstance(error, DgppError):
            found = f"{type(error).__name__}: {error}"
            error = EngineError("an error that dgpp did not foresee", found=found, where=_raised_at(error))
        return Fault(MISSED if self.pulse.broken else FAILED, error)

    def end(self, error: DgppError) -> None:
        """Write the fault file and leave at once: a loop that hangs cannot be asked, and other ranks wait.

        Those that wait in a collective, kernels of this rank's device among them, are let go before.
        """
        try:
            self.faults.write(error, self.pulse, self.stream, time.time())
            if self._bus is not None:
                self._bus.abort(error.line())
        finally:
            os._exit(error.exit_code)


def process_name() -> str:
    """Host and process id."""
    return f"{socket.gethostname()} process {os.getpid()}"


def _raised_at(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"
