"""The posting loop: sends each row that a rank's kernels or host have made ready to every peer.

What moves the bytes is a `Port`: a copy into the peer's mapped slab, or a network card's write to it. A payload goes
before its header. A loop turns in a thread of its own where kernels make rows ready, natively where the transport has a
native loop (`dgpp_core.bus.native`); a host that makes its own rows ready turns it while it waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.slab import HEADER, Slab

LINGER = 0.005
"""Seconds that a loop spins after a message before it naps: decode steps follow each other faster."""
NAP = 50e-6
BURST = 64 * 1024
"""Bytes: a decode step's vectors."""
_MASK = 0xFFFFFFFF


class Port(Protocol):
    """Moves bytes from this rank's slab to the same place, or another, of a peer's."""

    def write(self, peer: int, channel: int, source: int, target: int, size: int) -> None:
        """Begin to copy ``size`` bytes from offset ``source`` to the peer's offset ``target``, in order of calls.

        Raises:
            EngineError: the peer cannot be reached.
        """
        ...

    def poll(self) -> None:
        """See to what was begun; raises `EngineError` where it failed."""
        ...

    def idle(self) -> bool:
        """Whether all that was begun has arrived."""
        ...


class Poster(Protocol):
    """A posting loop, one turn at a time."""

    def advance(self) -> bool:
        """Send what is ready; whether there was any. Raises `EngineError` as the port."""
        ...

    def posted(self) -> bool:
        """Whether all that is ready has been given to the port, for every peer: it then arrives without more turns."""
        ...

    def idle(self) -> bool:
        """Whether all that was ready has been sent and has arrived."""
        ...

    def run(self) -> None:
        """`advance` over and over, napping while nothing comes; until `stop`, or sooner."""
        ...

    def stop(self) -> None:
        """Let `run` return; from any thread."""
        ...


def drain(poster: Poster, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Turn a loop until it is idle: what was posted need not have arrived yet, and needs this end of a connection.

    Raises:
        EngineError: as the port, or it is not idle within ``timeout`` seconds.
    """
    end = clock() + timeout
    while poster.advance() or not poster.idle():
        if clock() > end:
            raise EngineError(f"what was ready could not be sent within {timeout:g} s", where="posting loop")


def order_of(rank: int, world: int) -> list[int]:
    """The peers in the order they are served: from the next rank on, so that ranks do not all begin with the same."""
    return [(rank + step) % world for step in range(1, world)]


class PythonPoster:
    """The loop in the interpreter: right on every machine, and slow.

    Args:
        pace: seconds that a peer is left alone for each byte it was sent, so that several ranks do not overrun one
            port; 0 for no limit.
        burst: bytes to a peer that are not paced after a pause.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        slab: Slab,
        rank: int,
        port: Port,
        *,
        pace: float = 0.0,
        burst: int = BURST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        geometry = slab.geometry
        self._slab, self._rank, self._port = slab, rank, port
        self._peers = order_of(rank, geometry.world)
        self._posted = [0] * (2 * geometry.channels)
        self._waiting = {peer: deque[tuple[int, int, int]]() for peer in self._peers}
        self._free = dict.fromkeys(self._peers, 0.0)
        self._pace, self._burst, self._clock, self._busy = pace, burst, clock, clock()

    def advance(self) -> bool:
        """Send what is ready and due."""
        for row, word in enumerate(self._slab.ready.tolist()):
            generation, stride = word & _MASK, word >> 32
            if generation != self._posted[row]:
                self._posted[row] = generation
                for peer in self._peers:
                    self._waiting[peer].append((row // 2, generation, stride))
        sent = False
        for peer in self._peers:
            while (queue := self._waiting[peer]) and (not self._pace or self._clock() >= self._free[peer]):
                self._post(peer, *queue.popleft())
                sent = True
        self._port.poll()
        return sent

    def posted(self) -> bool:
        """Whether nothing is ready that was not seen, or waits to be due."""
        seen = [word & _MASK for word in self._slab.ready.tolist()] == self._posted
        return seen and not any(self._waiting.values())

    def idle(self) -> bool:
        """Whether nothing waits to be due or to arrive."""
        return self.posted() and self._port.idle()

    def run(self) -> None:
        """One turn, and a nap if nothing came for a while."""
        if self.advance():
            self._busy = self._clock()
        else:  # the interpreter is wanted elsewhere too
            time.sleep(NAP if self._clock() - self._busy > LINGER else 0)

    def stop(self) -> None:
        """`run` returns soon by itself."""

    def _post(self, peer: int, channel: int, generation: int, stride: int) -> None:
        geometry = self._slab.geometry
        source = geometry.row(channel, generation) + stride * peer
        target = geometry.slot(self._rank, channel, generation)
        size = self._slab.header(source).size
        if size:
            self._port.write(peer, channel, source + HEADER, target + HEADER, (size + 3) // 4 * 4)
        self._port.write(peer, channel, source, target, HEADER)
        if self._pace:
            self._free[peer] = max(self._clock() - self._pace * self._burst, self._free[peer]) + self._pace * size


class PostingThread:
    """A loop in a thread of its own, until it is stopped or fails.

    Args:
        failed: told of the error that ended the loop, in its thread.
    """

    def __init__(self, poster: Poster, failed: Callable[[EngineError], None]) -> None:
        self._poster, self._failed = poster, failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posting", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Send what is still ready, then end the loop.

        Args:
            timeout: seconds for the first.
        """
        self._stop.set()
        self._poster.stop()
        self._thread.join()
        with contextlib.suppress(EngineError):
            drain(self._poster, timeout)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._poster.run()
        except EngineError as error:
            self._failed(error)
