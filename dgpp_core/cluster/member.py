"""A follower's end of the journal: the connection and threads around a `Follower`."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.link import Link
from dgpp_core.cluster.records import (
    Era,
    FromFollower,
    FromLeader,
    Go,
    Halt,
    Heartbeat,
    Hello,
    Refused,
    encode,
    from_leader,
)
from dgpp_core.cluster.vigil import BEAT_S, ENDED, FAILED, JUDGE_S, Fate, Fault, Patience, Vigil, while_loading
from dgpp_core.config.addresses import Address

RELEASED = 3
"""Exit status of a follower that goes because rank 0 has gone or has ended the world."""
RETRY_S = 0.25
_LEADER = {0: "its journal"}


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to rank 0's journal, which may not listen yet.

    Args:
        address: as `Address`.

    Raises:
        EngineError: the address is malformed, or nothing listens there within ``timeout`` seconds.
    """
    try:
        place = Address.parse(address)
    except ValueError as error:
        what = "the address of rank 0's journal is malformed"
        raise EngineError(what, found=address, expected=str(error)) from None
    until = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((place.host, place.port), timeout=max(until - time.monotonic(), 1))
        except OSError as error:
            if time.monotonic() + RETRY_S >= until:
                hint = "check that rank 0 runs and that its address is right"
                what = f"rank 0's journal was not reached within {timeout:g} s"
                raise EngineError(what, where=address, found=str(error), hint=hint) from error
        time.sleep(RETRY_S)


def join(sock: socket.socket, hello: Hello, patience: Patience, timeout: float) -> tuple[Link[FromLeader], Era]:
    """Ask rank 0 to be taken in.

    Raises:
        EngineError: it refuses, says nothing within ``timeout`` seconds, or closes.
    """
    link = Link(sock, from_leader, "rank 0", patience.silent)
    try:
        link.send(encode(hello))
        answer = link.receive(timeout)
    except OSError as error:
        raise EngineError("rank 0 does not answer", where=f"rank {hello.rank}", found=str(error)) from error
    match answer:
        case Era():
            return link, answer
        case Refused(reason=reason):
            raise EngineError("rank 0 refuses this rank", where=f"rank {hello.rank}", found=reason)
        case Halt(reason=reason):
            raise EngineError("rank 0 ends the world", where=f"rank {hello.rank}", found=reason)
        case _:
            raise EngineError("rank 0 closed the connection", where=f"rank {hello.rank}", hint="see rank 0's log")


class Member:
    """What a follower hears and says.

    Args:
        beat: this rank's heartbeat of now.
        end: called once, in a thread of the member, with why this rank has to go; ends the process.
    """

    def __init__(
        self,
        link: Link[FromLeader],
        patience: Patience,
        clock: Callable[[], float],
        beat: Callable[[], Heartbeat],
        end: Callable[[DgppError], None],
    ) -> None:
        self._link, self._patience, self._clock, self._beat, self._end = link, patience, clock, beat, end
        self._arrived: queue.SimpleQueue[FromLeader] = queue.SimpleQueue()
        self._vigil = Vigil(_LEADER, while_loading(patience), clock())
        # Rank 0 says why a collective failed, or is found to have gone, in the time in which it would be lost.
        self._fate = Fate(patience, missed=patience.silent + patience.settle)
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to listen and to beat."""
        for work in (self._listen, self._pulse, self._judge):
            threading.Thread(target=work, name=f"member{work.__name__}", daemon=True).start()

    def post(self, record: FromFollower) -> None:
        """Say something to rank 0; that it is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._link.send(encode(record))

    def next(self) -> FromLeader:
        """What rank 0 says next; waits for it."""
        return self._arrived.get()

    def note(self, fault: Fault) -> None:
        """This rank has an account of why it ends."""
        with self._lock:
            self._fate.note(fault, self._clock())

    def close(self) -> None:
        """Leave in order."""
        self._closed.set()
        self._link.close()

    def _listen(self) -> None:
        found = "its connection is closed"
        try:
            while (record := self._link.receive()) is not None:
                self._hear(record)
        except EngineError as error:
            found = error.line()
        except OSError as error:
            found = str(error)
        if not self._closed.is_set():
            lost = EngineError("rank 0 is gone", found=found, hint="see rank 0's log")
            self.note(Fault(FAILED, _released(lost)))

    def _hear(self, record: FromLeader) -> None:
        now = self._clock()
        with self._lock:
            if isinstance(record, Go):
                self._vigil = Vigil(_LEADER, self._patience, now)
            self._vigil.hear(0, now)
        if isinstance(record, Halt):  # the loop may be in a collective that never ends
            self.note(Fault(ENDED, _released(EngineError("rank 0 ends the world", found=record.reason))))
        elif not isinstance(record, Heartbeat):
            self._arrived.put(record)

    def _pulse(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.post(self._beat())

    def _judge(self) -> None:
        while not self._closed.wait(JUDGE_S):
            now = self._clock()
            with self._lock:
                if (fault := self._vigil.judge(now)) is not None:
                    self._fate.note(Fault(fault.weight, _released(fault.error)), now)
                fate = self._fate.sealed(now)
            if fate is not None:
                return self._end(fate)
        return None


def _released(error: DgppError) -> DgppError:
    error.exit_code = RELEASED
    return error
