"""What every engine process of a world has: its signs of life, its operations, its fault file, and how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.faults import FaultFile
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.records import Heartbeat
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import FAILED, MISSED, Fault

BUS_S = 3600.0
"""Seconds that the bus waits for a rank: the others may load for long, and one that is lost is noticed elsewhere."""
_PR_SET_PDEATHSIG = 1


class Life:
    """One rank's process.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, rank: int, epoch: int, log_dir: str, clock: Callable[[], float]) -> None:
        self.pulse, self.stream = Pulse(clock), OperationStream()
        self._clock = clock
        self.faults = FaultFile(Path(log_dir).expanduser(), rank, epoch, time.time())

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
        """Write the fault file and leave at once: a loop that hangs cannot be asked, and other ranks wait."""
        self.faults.write(error, self.pulse, self.stream, time.time())
        os._exit(error.exit_code)


def process_name() -> str:
    """Host and process id."""
    return f"{socket.gethostname()} process {os.getpid()}"


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _raised_at(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"
