"""Virtual time: what happens next, and the clocks that processes read."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Call = Callable[[], object]


class Timeline:
    """Calls in the order of their times, those of one time in the order in which they were planned.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._count = itertools.count()

    def after(self, delay: float, call: Call) -> None:
        """Have ``call`` made ``delay`` seconds from now."""
        self.at(self.now + delay, call)

    def at(self, time: float, call: Call) -> None:
        """Have ``call`` made at ``time``, which has not gone by."""
        heapq.heappush(self._calls, (time, next(self._count), call))

    def step(self) -> bool:
        """Make the next call; False where there is none."""
        if not self._calls:
            return False
        self.now, _, call = heapq.heappop(self._calls)
        call()
        return True


class LocalClock:
    """A process's monotonic clock. It starts anywhere, runs a little fast or slow, and may leap forward.

    Args:
        start: what it shows at the start, in seconds.
        rate: seconds that it counts a second.
    """

    def __init__(self, timeline: Timeline, start: float, rate: float) -> None:
        self._timeline, self._start, self._rate = timeline, start, rate

    def __call__(self) -> float:
        return self._start + self._timeline.now * self._rate

    def leap(self, seconds: float) -> None:
        """Go forward at once."""
        self._start += seconds
