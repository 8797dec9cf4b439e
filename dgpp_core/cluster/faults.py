"""The fault file of a rank: why it ended, what it did last, and the stacks of all its threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from dgpp_core.api import ConfigError, DgppError
from dgpp_core.cluster.pulse import Pulse
from dgpp_core.cluster.stream import OperationStream

STACKS = signal.SIGUSR1
"""The signal that makes a rank write its stacks, also one whose interpreter hangs, or that is continued with it."""
STEPS = 8


class FaultFile:
    """Open from the start, so that a rank that cannot open files any more has it.

    Args:
        folder: the log directory, made if need be.
        now: Unix time in seconds.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, epoch: int, now: float) -> None:
        self.path = folder / f"rank-{rank}.epoch-{epoch}.txt"
        self._file: TextIO
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w")
            self._file.write(f"rank {rank}, epoch {epoch}, process {os.getpid()}, {datetime.fromtimestamp(now, UTC)}\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                "the log directory cannot be written to", where=str(folder), found=error.strerror or str(error),
                hint="name another one with --log-dir, or make room",
            ) from error  # fmt: skip
        faulthandler.register(STACKS, self._file, all_threads=True)

    def write(self, error: DgppError, pulse: Pulse, stream: OperationStream, now: float) -> None:
        """Why the rank ends; a full disk keeps nobody from ending."""
        sign = pulse.sign
        lines = [
            f"\nended {datetime.fromtimestamp(now, UTC)}", str(error), "",
            f"loop: {sign.phase} for {pulse.age():.2f} s, after {sign.collectives} collectives",
            f"last collective: {sign.call or 'none'}",
            f"last step: {stream.number}, digest {stream.digest:016x}",
            *(line for step in stream.recent(STEPS) for line in _step_lines(step.number, step.operations)),
            "", "stacks:", "",
        ]  # fmt: skip
        with contextlib.suppress(OSError):
            self._file.write("\n".join(lines))
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)


def _step_lines(number: int, operations: tuple[object, ...]) -> list[str]:
    return [f"  step {number}: {repr(operation)[:300]}" for operation in operations]
