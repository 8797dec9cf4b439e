"""A process of virtual time: threads that wait for their turn, and what a signal does to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from dgpp_core.testing.sim.timeline import Call, LocalClock, Timeline

WAKE_S = 0.01
"""Seconds within which the threads of a process that is continued run again, in any order."""


class Process:
    """Threads are names: calls of one come in order, those of several as they fall.

    Args:
        source: of everything about the process that is left to chance.

    Attributes:
        alive: it has not ended.
        paused: it is stopped, as by SIGSTOP: nothing of it runs.
    """

    def __init__(self, name: str, timeline: Timeline, source: random.Random) -> None:
        self.name, self.timeline, self.random = name, timeline, source
        self.clock = LocalClock(timeline, source.uniform(0, 1e6), source.uniform(0.999, 1.001))
        self.alive, self.paused = True, False
        self._late: dict[str, list[Call]] = {}

    def at(self, thread: str, delay: float, call: Call) -> None:
        """Have a thread make a call ``delay`` seconds from now; later if the process is stopped then."""
        self.timeline.after(delay, lambda: self._run(thread, call))

    def on(self, thread: str, time: float, call: Call) -> None:
        """The same at a time of the timeline."""
        self.timeline.at(time, lambda: self._run(thread, call))

    def every(self, thread: str, seconds: float, call: Callable[[], bool]) -> None:
        """Have a thread make a call again and again, until it returns False."""

        def again() -> None:
            if call():
                self.every(thread, seconds, call)

        self.at(thread, seconds, again)

    def pause(self) -> None:
        """Stop."""
        self.paused = True

    def resume(self) -> None:
        """Go on; each thread makes up for what it missed before it takes what comes."""
        self.paused = False
        for thread in self._late:
            self.timeline.after(self.random.uniform(0, WAKE_S), partial(self._wake, thread))

    def exit(self) -> None:
        """Be gone."""
        self.alive = False

    def _wake(self, thread: str) -> None:
        while self.alive and not self.paused and self._late.get(thread):
            self._late[thread].pop(0)()
        if not self.paused:
            self._late.pop(thread, None)

    def _run(self, thread: str, call: Call) -> None:
        if self.alive and (self.paused or thread in self._late):
            self._late.setdefault(thread, []).append(call)
        elif self.alive:
            call()
