"""One direction of a connection: bytes in order, late, in any pieces, and damaged where a fault says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from dgpp_core.api import EngineError
from dgpp_core.cluster.frames import Packer, Unpacker
from dgpp_core.testing.sim.process import Process

Record = TypeVar("Record")
Damage = Literal["flip", "drop", "double", "swap", "cut"]
"""What happens to frames: a bit of the next one flips, it is lost, it comes twice, it comes after the one behind it; or
nothing comes any more."""


class Wire(Generic[Record]):
    """From one process to another.

    Args:
        decode: the body of a frame to its record.
        source: who sends, for errors.
        receiver: whose thread ``listen`` reads.
        latency: seconds that bytes take, at least.
        hear: takes a record.
        broken: called once, with why nothing more is read: what is wrong with the bytes, or "" where the sender closed.

    Attributes:
        until: nothing arrives before this time.
    """

    def __init__(
        self,
        decode: Callable[[bytes], Record],
        source: str,
        receiver: Process,
        latency: float,
        *,
        hear: Callable[[Record], None],
        broken: Callable[[str], None],
    ) -> None:
        self._receiver, self._latency, self._hear, self._broken = receiver, latency, hear, broken
        self._packer, self._unpacker = Packer(), Unpacker(decode, source)
        self._random: random.Random = receiver.random
        self._buffer: list[bytes] = []
        self._closed = self._done = False
        self._arrival = 0.0
        self._kept = b""
        self._damage: Damage | None = None
        self._struck: Callable[[], None] = lambda: None
        self.until = 0.0

    def arm(self, damage: Damage, struck: Callable[[], None]) -> None:
        """Damage what is sent next; ``struck`` is called when that has happened."""
        self._damage, self._struck = damage, struck

    def send(self, body: bytes) -> None:
        """Send a record."""
        frame = self._packer.pack(body)
        if self._damage is not None:
            self._carry(self._damaged(frame, self._damage))
        else:
            self._carry(frame + self._kept)
            self._kept = b""

    def close(self) -> None:
        """The sender closes, or has ended."""
        self._move(self._end)

    def _damaged(self, frame: bytes, damage: Damage) -> bytes:
        if damage != "cut":
            self._damage = None
        self._struck()
        match damage:
            case "flip":
                at = self._random.randrange(len(frame))
                return frame[:at] + bytes([frame[at] ^ 1 << self._random.randrange(8)]) + frame[at + 1 :]
            case "double":
                return frame * 2
            case "swap":
                self._kept = frame
                return b""
        return b""

    def _carry(self, data: bytes) -> None:
        def arrive() -> None:
            self._buffer.append(data)
            self._receiver.at("listen", 0.0, self._read)

        if data:
            self._move(arrive)

    def _move(self, arrive: Callable[[], None]) -> None:
        """Nothing overtakes anything on its way."""
        timeline = self._receiver.timeline
        soonest = max(timeline.now, self.until) + self._latency * self._random.uniform(1, 1.5)
        self._arrival = max(self._arrival, soonest)
        timeline.at(self._arrival, arrive)

    def _end(self) -> None:
        self._closed = True
        self._receiver.at("listen", 0.0, self._read)

    def _read(self) -> None:
        data, self._buffer = b"".join(self._buffer), []
        if self._done:
            return None
        cut = self._random.randrange(len(data)) if data and self._random.random() < 0.2 else 0
        try:
            for piece in (data[:cut], data[cut:]):
                for record in self._unpacker.feed(piece):
                    self._hear(record)
        except EngineError as error:
            return self._stop(error.line())
        return self._stop("") if self._closed else None

    def _stop(self, why: str) -> None:
        self._done = True
        self._broken(why)
