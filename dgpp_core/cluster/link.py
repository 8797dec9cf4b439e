"""A connection of the journal: frames over TCP."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from dgpp_core.cluster.frames import Packer, Unpacker

_CHUNK = 1 << 18

Record = TypeVar("Record")


class Link(Generic[Record]):
    """Any thread sends, one receives.

    Args:
        decode: a body to its record.
        source: the other end, for errors.
        limit: seconds that the other end may take to accept what is sent.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], Record], source: str, limit: float) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(limit)
        self._sock, self._limit = sock, limit
        self._packer, self._unpacker = Packer(), Unpacker(decode, source)
        self._arrived: deque[Record] = deque()
        self._sending = threading.Lock()

    def send(self, body: bytes) -> None:
        """Send one record; raises `OSError` when the other end is gone or takes nothing."""
        with self._sending:
            self._sock.sendall(self._packer.pack(body))

    def send_last(self, body: bytes, seconds: float) -> None:
        """Try to send a last record and close; nothing is raised, and nothing waits for long."""
        if self._sending.acquire(timeout=seconds):
            with contextlib.suppress(OSError):
                self._sock.settimeout(seconds)
                self._sock.sendall(self._packer.pack(body))
                self._sock.shutdown(socket.SHUT_WR)

    def receive(self, seconds: float | None = None) -> Record | None:
        """The next record; None when the other end has closed.

        Args:
            seconds: how long to wait; None is for ever.

        Raises:
            EngineError: what came is damaged.
            OSError: the connection broke; `TimeoutError` after ``seconds``.
        """
        while not self._arrived:
            self._sock.settimeout(self._limit if seconds is None else seconds)
            try:
                data = self._sock.recv(_CHUNK)
            except TimeoutError:
                if seconds is None:
                    continue
                raise
            if not data:
                return None
            self._arrived.extend(self._unpacker.feed(data))
        self._sock.settimeout(self._limit)
        return self._arrived.popleft()

    def close(self) -> None:
        """Close the connection; a thread that receives returns."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
