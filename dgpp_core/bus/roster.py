"""How ranks find each other over TCP, and hear of each other's end. Needs no torch.

Rank 0 listens, compares what each says of itself with what it is itself, and tells all of them either everybody's
share of a round of exchange or why there will be no world. The connections stay: whoever goes is missed at once, and
rank 0 tells the others. Nobody may come back. Nothing here is encrypted or authenticated: trusted networks only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

import dgpp_core
from dgpp_core.api.errors import EngineError
from dgpp_core.bus.wire import Gone, Hello, Message, Part, Refused, Table, Wire
from dgpp_core.config.addresses import Address, listening

RETRY = 0.1
"""Seconds between attempts to reach rank 0."""
GRACE = 2.0
"""Seconds that one message to a rank may take."""
_EXPECTED = "every rank takes part to the end"


def hello(rank: int, world: int, transport: str, settings: str) -> Hello:
    """This process's own."""
    process = f"{socket.gethostname()} process {os.getpid()}"
    return Hello(
        rank=rank, world=world, version=dgpp_core.__version__, settings=settings, transport=transport, process=process
    )


class Roster:
    """The ranks of a world and who of them is gone. Made by `enter`.

    Rank 0 is connected with everybody, the others with rank 0. `gather` until the world stands, then `watch`.
    """

    def __init__(self, rank: int, world: int, wires: dict[int, Wire], timeout: float) -> None:
        self.rank, self.world = rank, world
        self._wires, self._timeout = wires, timeout
        self._gone: dict[int, str] = {}
        self._fault: EngineError | None = None
        self._changed: Callable[[], None] = lambda: None
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()

    def gather(self, share: bytes) -> list[bytes]:
        """Every rank's share, in order of rank.

        Raises:
            EngineError: a rank is gone or silent for the timeout, or another one refused.
        """
        end = time.monotonic() + self._timeout
        if self.rank:
            self._wires[0].send(Part(share), GRACE)
            message = _next(self._wires[0], end, "rank 0")
            if isinstance(message, Table):
                return message.contents
            raise _error(message, "rank 0")
        shares = {0: share}
        try:
            for rank, wire in sorted(self._wires.items()):
                message = _next(wire, end, f"rank {rank}")
                if not isinstance(message, Part):
                    raise _error(message, f"rank {rank}")
                shares[rank] = message.content
        except EngineError as error:
            self.refuse(error)
            raise
        table = Table([shares[rank] for rank in range(self.world)])
        for wire in self._wires.values():
            wire.send(table, GRACE)
        return table.contents

    def refuse(self, error: EngineError) -> None:
        """Tell the others that this rank takes no part, while the world is being formed."""
        for wire in self._wires.values():
            with contextlib.suppress(EngineError):
                wire.send(Refused(**error.parts()), GRACE)

    def watch(self, changed: Callable[[], None]) -> None:
        """From now on hear of other ranks' end; ``changed`` is called, in a thread, when `missing` is another."""
        self._changed = changed
        self._thread = threading.Thread(target=self._listen, name="roster", daemon=True)
        self._thread.start()

    def fault(self, source: int | None = None) -> EngineError | None:
        """Why nothing more is to be waited for from ``source``: it has left, or some rank went wrong; the first."""
        if self._fault is None and source in self._gone:
            return EngineError(f"rank {source} has left", where=f"rank {source}", expected=_EXPECTED)
        return self._fault

    def missing(self) -> int:
        """Ranks that nothing more will come from, as bits; all of them once one went wrong."""
        return sum(1 << rank for rank in (self._gone if self._fault is None else range(self.world)))

    def publish(self, reason: str) -> None:
        """Tell the others that this rank gave up, and why."""
        self._tell(Gone(self.rank, reason))

    def give_up(self, fault: EngineError) -> None:
        """Nobody is to be waited for any more, and the others are told. From any thread; an earlier fault stays."""
        self._fault = self._fault or fault
        self._tell(Gone(self.rank, fault.line()))
        self._changed()

    def close(self, linger: float = 0.0) -> None:
        """Leave; without a word before, the others learn that this rank's work was done.

        Args:
            linger: seconds to wait for the others to leave too.
        """
        self._tell(Gone(self.rank))
        end = time.monotonic() + linger
        while len(self._gone) < self.world - 1 and time.monotonic() < end:
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            self._wake.send(b"!")
        if self._thread is not None:
            self._thread.join()
        for wire in self._wires.values():
            wire.close()
        self._wake.close()
        self._woken.close()

    def _tell(self, message: Gone, but: int = -1) -> None:
        with self._sending:
            for rank, wire in self._wires.items():
                if rank not in (but, message.rank) and rank not in self._gone:
                    with contextlib.suppress(EngineError):
                        wire.send(message, GRACE)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, rank)
                self._heard(rank)  # what came with the last table
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._heard(key.data)
                    if self._wires[key.data].ended:
                        selector.unregister(key.fileobj)

    def _heard(self, rank: int) -> None:
        wire = self._wires[rank]
        try:
            while (message := wire.receive()) is not None:
                if isinstance(message, Gone):
                    self._left(message)
        except EngineError as error:
            self._left(Gone(rank, error.line()))
            wire.ended = True
        if wire.ended:
            self._left(Gone(rank, "its connection ended"))

    def _left(self, message: Gone) -> None:
        if message.rank in self._gone:
            return
        self._gone[message.rank] = message.reason
        if self._fault is None and message.reason:
            hint = "see the log of the rank that is named; then start all ranks again"
            what = f"rank {message.rank} failed: {message.reason}"
            self._fault = EngineError(what, where=f"rank {message.rank}", expected=_EXPECTED, hint=hint)
        if self.rank == 0:
            self._tell(message, but=message.rank)
        self._changed()


def enter(me: Hello, address: str, timeout: float, listener: socket.socket | None = None) -> Roster:
    """The roster of a world in which every rank has said the same.

    Args:
        address: ``host:port`` where rank 0 listens.
        timeout: seconds for each step.
        listener: at rank 0, a socket that listens there already; it is closed when all have come.

    Raises:
        EngineError: the address is malformed, taken or silent; a rank is missing, doubled or unlike rank 0.
    """
    if not 0 <= me.rank < me.world:
        raise EngineError("no such rank", where=f"rank {me.rank}", expected=f"0 to {me.world - 1}")
    place = place_of(address)
    wires = _host(me, listener or _listen_at(place), timeout) if me.rank == 0 else {0: _reach(me, place, timeout)}
    roster = Roster(me.rank, me.world, wires, timeout)
    roster.gather(b"")
    return roster


def place_of(address: str) -> Address:
    """Rank 0's address; raises `EngineError` where it is malformed."""
    try:
        return Address.parse(address)
    except ValueError as error:
        what = "the address of rank 0 is malformed"
        raise EngineError(what, where="address", found=address, expected=str(error)) from None


def _reach(me: Hello, place: Address, timeout: float) -> Wire:
    end, found = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        try:
            wire = Wire(socket.create_connection((place.host, place.port), timeout=max(0.05, end - time.monotonic())))
        except OSError as error:
            found = str(error)
            time.sleep(RETRY)
            continue
        wire.rank = 0
        wire.send(me, GRACE)
        return wire
    raise EngineError(
        f"rank 0 was not reached within {timeout:g} s",
        where=f"rank {me.rank}, {place}",
        found=found,
        hint="check that rank 0 runs and that its address is right",
    )


def _listen_at(place: Address) -> socket.socket:
    try:
        return listening(place)
    except OSError as error:
        where = f"rank 0, {place}"
        raise EngineError("rank 0 cannot listen", where=where, found=str(error), hint="choose a free port") from error


def _host(me: Hello, listener: socket.socket, timeout: float) -> dict[int, Wire]:
    with listener:
        return _Reception(me, listener).run(time.monotonic() + timeout, timeout)


class _Reception:
    """Rank 0 while the others come in."""

    def __init__(self, me: Hello, listener: socket.socket) -> None:
        self._me, self._listener = me, listener
        self._hellos: dict[int, Hello] = {0: me}
        self._wires: dict[int, Wire] = {}
        self._strangers: list[Wire] = []

    def run(self, end: float, timeout: float) -> dict[int, Wire]:
        """Everybody's connection, by rank."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._hellos) < self._me.world:
                    events = selector.select(max(0.0, end - time.monotonic()))
                    if not events and time.monotonic() >= end:
                        raise self._missing(timeout)
                    for key, _ in events:
                        self._serve(key.data, selector)
        except EngineError as error:
            for wire in [*self._wires.values(), *self._strangers]:
                with contextlib.suppress(EngineError):
                    wire.send(Refused(**error.parts()), GRACE)
                wire.close()
            raise
        for wire in self._strangers:
            wire.close()
        return self._wires

    def _serve(self, wire: Wire | None, selector: selectors.BaseSelector) -> None:
        if wire is None:
            with contextlib.suppress(OSError):
                wire = Wire(self._listener.accept()[0])
                self._strangers.append(wire)
                selector.register(wire, selectors.EVENT_READ, wire)
            return
        message = None
        try:
            message = wire.receive()
        except EngineError:  # not a rank: a port scan, a browser
            wire.ended = True
        if isinstance(message, Hello):
            self._admit(message, wire)
        if wire.ended or wire.rank >= 0:
            selector.unregister(wire)
        if wire.ended and wire in self._strangers:
            self._strangers.remove(wire)
            wire.close()

    def _admit(self, said: Hello, wire: Wire) -> None:
        require_alike(said, self._me)
        if there := self._hellos.get(said.rank):
            found = f"{there.process} and {said.process}"
            raise EngineError("two processes claim one rank", where=f"rank {said.rank}", found=found)
        wire.rank = said.rank
        self._hellos[said.rank], self._wires[said.rank] = said, wire
        self._strangers.remove(wire)

    def _missing(self, timeout: float) -> EngineError:
        missing = ", ".join(str(rank) for rank in range(self._me.world) if rank not in self._hellos)
        return EngineError(
            f"rank {missing} of {self._me.world} did not come within {timeout:g} s",
            where="rendezvous",
            hint="check that it was started, and with the same address",
        )


def require_alike(said: Hello, first: Hello) -> None:
    """Raise `EngineError` where a rank cannot be in rank 0's world; names the field and both values."""
    for name in ("version", "world", "settings", "transport"):
        found, expected = getattr(said, name), getattr(first, name)
        if found != expected:
            raise EngineError(
                f"ranks with another {name} cannot form a world",
                where=f"rank {said.rank}, {said.process}",
                found=str(found),
                expected=f"{expected}, as rank 0 has it",
            )
    if not 0 < said.rank < first.world:
        raise EngineError("no such rank", where=f"rank {said.rank}", expected=f"0 to {first.world - 1}")


def _next(wire: Wire, end: float, name: str) -> Message:
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        while True:
            if (message := wire.receive()) is not None:
                return message
            if wire.ended:
                raise EngineError("the rendezvous broke off", where=name, found="its connection ended")
            if not selector.select(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                raise EngineError(f"{name} fell silent while the world was formed", where=name)


def _error(message: Message, name: str) -> EngineError:
    if isinstance(message, Refused):
        return EngineError(message.what, where=message.where, found=message.found, expected=message.expected)
    return EngineError("the rendezvous broke off", where=name, found=type(message).__name__)
