"""What ranks tell each other over TCP: messages with their length before them, on sockets that never block."""

from __future__ import annotations

import select
import socket
import time

import msgspec

from dgpp_core.api.errors import EngineError

LARGEST = 1 << 20
"""Bytes of a message; a longer one is no rank's."""
_LENGTH = 4


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """What a rank says of itself; all but rank and process must be the same everywhere.

    Attributes:
        transport: and its layout, as text.
        process: host and process id, to tell a rank that came twice.
    """

    rank: int
    world: int
    version: str
    settings: str
    transport: str
    process: str


class Part(msgspec.Struct, frozen=True, tag="part"):
    """A rank's share of a round of exchange, on its way to rank 0."""

    content: bytes


class Table(msgspec.Struct, frozen=True, tag="table"):
    """Every rank's share, in order of rank, on its way back."""

    contents: list[bytes]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The world is not formed; the parts of the error that says why."""

    what: str
    where: str = ""
    found: str = ""
    expected: str = ""
    hint: str = ""


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A rank is no longer there.

    Attributes:
        reason: what went wrong with it; empty if it left when its work was done.
    """

    rank: int
    reason: str = ""


Message = Hello | Part | Table | Refused | Gone
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Wire:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.socket, self.rank = connection, -1
        self._received, self.ended = bytearray(), False

    def fileno(self) -> int:
        """For a selector."""
        return self.socket.fileno()

    def send(self, message: Message, timeout: float) -> None:
        """Hand a message to the network.

        Raises:
            EngineError: the connection is gone, or takes nothing for the timeout.
        """
        body = _ENCODER.encode(message)
        left = memoryview(len(body).to_bytes(_LENGTH, "big") + body)
        end = time.monotonic() + timeout
        try:
            while left:
                if not select.select([], [self.socket], [], max(0.0, end - time.monotonic()))[1]:
                    raise TimeoutError(f"it takes nothing for {timeout:g} s")
                left = left[self.socket.send(left) :]
        except (OSError, ValueError) as error:  # a closed socket has no number: a ValueError
            raise EngineError("a rank cannot be told anything", where=f"rank {self.rank}", found=str(error)) from error

    def receive(self) -> Message | None:
        """The next message that has arrived whole; sets ``ended`` where nothing more will.

        Raises:
            EngineError: what came is not ours.
        """
        try:
            while not self.ended:
                piece = self.socket.recv(1 << 16)
                self.ended = not piece
                self._received += piece
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        return self._next()

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _next(self) -> Message | None:
        if len(self._received) < _LENGTH:
            return None
        end = _LENGTH + int.from_bytes(self._received[:_LENGTH], "big")
        if end > LARGEST:
            raise EngineError("a stranger spoke", found=f"a message of {end} bytes", expected=f"<= {LARGEST}")
        if len(self._received) < end:
            return None
        try:
            message = _DECODER.decode(self._received[_LENGTH:end])
        except msgspec.DecodeError as error:
            raise EngineError("a stranger spoke", found=str(error)) from error
        del self._received[:end]
        return message
