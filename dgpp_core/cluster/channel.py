"""The engine's end of the socket to the front end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable

import msgspec

from dgpp_core.api import EngineError
from dgpp_core.scheduler.messages import FromEngine, ToEngine, decode_to_engine, encode


def read_exactly(sock: socket.socket, count: int) -> bytes | None:
    """``count`` bytes, or None when the other end closed."""
    parts: list[bytes] = []
    while count:
        part = sock.recv(min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Channel:
    """Frames over a connected socket: a thread reads into an inbox, any thread may send.

    Args:
        on_close: called in the reading thread when the front end is gone.
    """

    def __init__(self, sock: socket.socket, on_close: Callable[[], None]) -> None:
        self._sock, self._on_close = sock, on_close
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._sending = threading.Lock()

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read, name="channel", daemon=True).start()

    def receive(self) -> ToEngine | None:
        """One frame, before `start`; None when the front end is gone."""
        head = read_exactly(self._sock, 4)
        body = None if head is None else read_exactly(self._sock, int.from_bytes(head, "little"))
        if body is None:
            return None
        try:
            return decode_to_engine(body)
        except msgspec.DecodeError as error:
            raise EngineError("the front end sent a frame that is not a message", found=str(error)) from error

    def drain(self, wait: float) -> list[ToEngine]:
        """Every message that has come; waits up to ``wait`` seconds for a first one."""
        out: list[ToEngine] = []
        try:
            out.append(self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait())
            while True:
                out.append(self._inbox.get_nowait())
        except queue.Empty:
            return out

    def put(self, message: ToEngine) -> None:
        """Let `drain` find a message as if it had just come."""
        self._inbox.put(message)

    def send(self, message: FromEngine) -> None:
        """Send one message; raises `OSError` when the front end is gone."""
        frame = encode(message)
        with self._sending:
            self._sock.sendall(frame)

    def _read(self) -> None:
        try:
            while (message := self.receive()) is not None:
                self._inbox.put(message)
        except (OSError, EngineError):
            pass
        self._on_close()
