"""The signs of life of a rank's loop: what it does, since when, and in which collective it was last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from torch import Tensor

from dgpp_core.api import Bus
from dgpp_core.cluster.records import Phase


class Sign(msgspec.Struct, frozen=True):
    """What the loop does since the moment ``since``.

    Attributes:
        collectives: how many it has begun.
        call: the one that it is in or was in last.
    """

    phase: Phase
    since: float
    collectives: int = 0
    call: str = ""


class Pulse:
    """Written by the loop's thread, read by any: a sign is replaced whole.

    Args:
        clock: seconds, monotonic.

    Attributes:
        longest: seconds that the loop was at work without a sign, at most.
        broken: a collective raised.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.sign = Sign("loading", clock())
        self.longest = 0.0
        self.broken = False

    def turn(self, phase: Phase, call: str = "") -> None:
        """The loop goes over to ``phase``, or says that it got on with it."""
        last, now = self.sign, self._clock()
        if last.phase == "working":
            self.longest = max(self.longest, now - last.since)
        self.sign = Sign(phase, now, last.collectives + bool(call), call or last.call)

    def age(self) -> float:
        """Seconds since the last sign."""
        return self._clock() - self.sign.since

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The loop is in ``phase`` for the block."""
        before = self.sign.phase
        self.turn(phase)
        try:
            yield
        finally:
            self.turn(before)


class WatchedBus:
    """Implements `Bus` around another one, with every collective that the host waits for noted in a pulse."""

    def __init__(self, bus: Bus, pulse: Pulse) -> None:
        self._bus, self._pulse = bus, pulse
        self.rank, self.world, self.capturable = bus.rank, bus.world, bus.capturable

    def all_reduce(self, partial: Tensor) -> Tensor:
        """As the bus does."""
        with self._call(f"all_reduce of {partial.dtype} {list(partial.shape)}"):
            return self._bus.all_reduce(partial)

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """As the bus does."""
        with self._call(f"all_gather of {part.dtype} {list(part.shape)} along axis {dim}"):
            return self._bus.all_gather(part, dim)

    def barrier(self) -> None:
        """As the bus does."""
        with self._call("barrier"):
            self._bus.barrier()

    def check(self) -> None:
        """As the bus does; a failure counts as a collective's."""
        with self._noted():
            self._bus.check()

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        pulse = self._pulse
        before = pulse.sign.phase
        pulse.turn("collective", f"collective {pulse.sign.collectives}, {what}")
        with self._noted():
            yield
        pulse.turn(before)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pulse.broken = True
            raise
