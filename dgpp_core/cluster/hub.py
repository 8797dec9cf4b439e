"""Rank 0's end of the journal: the connections and threads around a `Leader`."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.identity import Terms
from dgpp_core.cluster.leader import Leader
from dgpp_core.cluster.link import Link
from dgpp_core.cluster.records import (
    Era,
    FromFollower,
    FromLeader,
    Heartbeat,
    Hello,
    Refused,
    encode,
    from_follower,
)
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import BEAT_S, FAILED, JUDGE_S, Fate, Fault, Patience
from dgpp_core.config.addresses import Address, address_of

HELLO_S = 5.0
"""How long a connection may take to say who it is."""
_log = logging.getLogger("dgpp.cluster")


class Hub:
    """Accepts followers for as long as the world lives: those that come too late are told why.

    Args:
        listener: where followers connect; closed with the hub.
        hello: what rank 0 says of itself.
        era: what is said to those that are taken in.
        beat: rank 0's own heartbeat of now.
        end: called once, in a thread of the hub, with why the world has failed; ends the process.
    """

    def __init__(
        self,
        listener: socket.socket,
        hello: Hello,
        era: Era,
        stream: OperationStream,
        patience: Patience,
        clock: Callable[[], float],
        beat: Callable[[], Heartbeat],
        end: Callable[[DgppError], None],
    ) -> None:
        self.leader = Leader(hello, stream, self._post, patience, clock())
        self._listener, self._era, self._patience, self._clock = listener, era, patience, clock
        self._beat, self._end = beat, end
        self._links: dict[int, Link[FromFollower]] = {}
        self._fate = Fate(patience)
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def gather(self, timeout: float, report: Callable[[str], None]) -> None:
        """Wait until every rank has joined; rank 0 itself may do other things before it votes.

        Args:
            report: called with what is waited for, when that changes.

        Raises:
            EngineError: a rank did not come in time.
        """
        for work in (self._accept, self._judge):
            self._start(work)
        if self._await(lambda: self.leader.missing, timeout, report):
            missing = ", ".join(f"rank {rank}" for rank in self.leader.missing)
            raise EngineError(
                f"{missing} of {self._era.world} did not come within {timeout:g} s",
                where=str(address_of(self._listener)),
                hint="check that it was started, with the address of rank 0's journal; its log says why it did not",
            )

    def vote(self, terms: Terms, longest: float, report: Callable[[str], None]) -> None:
        """Rank 0 is built on ``terms``; wait for the others' votes, however long they build, and begin to serve."""
        with self._changed:
            self._note(self.leader.propose(terms, longest))
        self._await(lambda: self.leader.undecided, None, report)
        with self._changed:
            self.leader.go(self._clock())

    def finish(self) -> None:
        """End the world in order.

        Raises:
            EngineError: a rank did not leave, or its operation stream is another.
        """
        self.leader.end()
        self._await(lambda: self.leader.staying, self._patience.leave, lambda what: None)
        with self._changed:
            self.leader.settle()
        self._closed.set()
        self._listener.close()

    def note(self, fault: Fault) -> None:
        """Rank 0 itself has an account of why the world ends."""
        with self._changed:
            self._note(self.leader.own(fault))

    def halt(self, reason: str) -> None:
        """Tell every follower that is still there why it has to go; waits for nobody."""
        body = encode(self.leader.halted(reason))
        for link in tuple(self._links.values()):
            link.send_last(body, JUDGE_S)

    def _await(self, what: Callable[[], Sequence[int]], timeout: float | None, report: Callable[[str], None]) -> bool:
        """Wait until no rank is left in ``what``; whether some are after ``timeout``."""
        shown: Sequence[int] = ()
        until = None if timeout is None else self._clock() + timeout
        with self._changed:
            while ranks := what():
                if ranks != shown:
                    report("waiting for " + ", ".join(f"rank {rank}" for rank in ranks))
                    shown = ranks
                left = None if until is None else until - self._clock()
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
        return False

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name=f"hub{work.__name__}", daemon=True).start()

    def _post(self, ranks: Sequence[int], record: FromLeader) -> None:
        body = encode(record)
        for rank in ranks:
            try:
                self._links[rank].send(body)
            except OSError as error:
                self._lost(rank, f"it cannot be sent to: {error}")

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            self._start(self._welcome, sock, str(Address(*address[:2])))

    def _welcome(self, sock: socket.socket, address: str) -> None:
        """Take in one caller and listen to it, or tell it why not."""
        link = Link(sock, from_follower, address, self._patience.silent)
        try:
            hello = link.receive(HELLO_S)
        except (EngineError, OSError) as error:
            _log.warning("a caller of the journal at %s is no rank: %s", address, error)
            return link.close()
        if not isinstance(hello, Hello):
            return link.close()
        with self._changed:
            reason = self._admit(hello, link)
        if reason:
            _log.warning("refused: %s", reason)
            link.send_last(encode(Refused(reason)), HELLO_S)
            return link.close()
        self._start(self._pulse, link)
        return self._listen(hello.rank, link)

    def _admit(self, hello: Hello, link: Link[FromFollower]) -> str:
        """Why the caller is not taken in; where it differs from rank 0, the world ends with it."""
        try:
            if reason := self.leader.admit(hello, self._clock()):
                return reason
        except EngineError as error:
            self._note(Fault(FAILED, error))
            return error.line()
        self._links[hello.rank] = link
        with contextlib.suppress(OSError):  # its listener says so
            link.send(encode(self._era))
        self._changed.notify_all()
        return ""

    def _listen(self, rank: int, link: Link[FromFollower]) -> None:
        found = ""
        try:
            while (record := link.receive()) is not None:
                with self._changed:
                    self._note(self.leader.hear(rank, record, self._clock()))
                    self._changed.notify_all()
        except EngineError as error:
            found = error.line()
        except OSError as error:
            found = str(error)
        self._lost(rank, found)

    def _pulse(self, link: Link[FromFollower]) -> None:
        """A thread for each link: one that takes nothing must not keep the others waiting."""
        with contextlib.suppress(OSError):
            while not self._closed.wait(BEAT_S):
                link.send(encode(self._beat()))

    def _judge(self) -> None:
        while not self._closed.wait(JUDGE_S):
            now = self._clock()
            with self._changed:
                self._note(self.leader.judge(now, self._beat()))
                fate = self._fate.sealed(now)
            if fate is not None:
                return self._end(fate)
        return None

    def _lost(self, rank: int, found: str) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._note(self.leader.lost(rank, found))
            self._changed.notify_all()

    def _note(self, fault: Fault | None) -> None:
        if fault is not None:
            self._fate.note(fault, self._clock())
