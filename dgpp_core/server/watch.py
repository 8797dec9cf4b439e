"""When is an engine process that says nothing taken for dead? Pure: the clock and the process table are arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dgpp_core.scheduler.messages import Beat

TICK_S = 0.2
"""How often the front end asks."""
STOPPED_S = 1.2
"""Silence after which a process that the kernel calls stopped has failed."""
SILENT_S = 5.0
"""Silence after which any process has failed."""
STALLED_S = 120.0
"""Time without progress after which a busy engine has failed."""
OWN_PAUSE_S = 0.5
"""Lateness of our own timer that makes the measured silence ours."""


class Watch:
    """Judges the engine by its frames. An engine is heard at every frame and moves when a beat's ``progress`` grows.

    Args:
        now: the current time in seconds, as in every method.
        process_state: the letter that the kernel gives the process (``T`` is stopped), empty where unknown.
    """

    def __init__(self, now: float, process_state: Callable[[], str]) -> None:
        self._process_state = process_state
        self._heard = self._moved = self._ticked = now
        self._progress = -1
        self._busy = False

    def hear(self, now: float) -> None:
        """A frame came."""
        self._heard = now

    def beat(self, beat: Beat, now: float) -> None:
        """A beat came."""
        self._heard = now
        if beat.progress != self._progress or not beat.busy or not self._busy:
            self._moved = now
        self._progress, self._busy = beat.progress, beat.busy

    def tick(self, now: float) -> str | None:
        """Why the engine has failed, or None; call it every `TICK_S`."""
        late = now - self._ticked - TICK_S
        self._ticked = now
        if late > OWN_PAUSE_S:  # we were paused ourselves: its frames may be waiting to be read
            self._heard = self._moved = now
            return None
        silence = now - self._heard
        if silence >= SILENT_S:
            return f"the engine process has not answered for {silence:.1f} s"
        if silence >= STOPPED_S and self._process_state() in ("T", "t"):
            return f"the engine process is stopped (silent for {silence:.1f} s)"
        if self._busy and now - self._moved >= STALLED_S:
            return f"the engine has made no progress for {now - self._moved:.0f} s with requests to serve"
        return None


def process_state(pid: int) -> str:
    """The state letter of a process in Linux's process table, empty where that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
