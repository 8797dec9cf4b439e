"""Many streams read at once by one thread that does nothing else: what is measured is the service, not its client."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from dgpp_core.api.errors import DgppError

Clock = Callable[[], float]
_READ_BYTES = 1 << 18


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that was read to its end.

    Attributes:
        events: the JSON of each event, without ``[DONE]``.
        reads: reads that it took, which is at most how often the service wrote to it.
        first_s: seconds from the first request until its first event came, in any stream's time.
    """

    events: tuple[dict[str, Any], ...]
    reads: int
    first_s: float


class Streams(msgspec.Struct, frozen=True):
    """All of them, and seconds from the first request to the last byte."""

    streams: tuple[Stream, ...]
    seconds: float

    @property
    def chunks(self) -> int:
        """Events of all streams."""
        return sum(len(stream.events) for stream in self.streams)

    @property
    def reads(self) -> int:
        """Reads of all streams."""
        return sum(stream.reads for stream in self.streams)


class _Connection:
    """One stream: what has come of it, unread until all have ended."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.parts: list[bytes] = []
        self.first = 0.0

    def take(self, now: float) -> bool:
        """Read what is there; whether there may be more."""
        part = self.sock.recv(_READ_BYTES)
        if part:
            self.parts.append(part)
            if not self.first and b"data: " in part:
                self.first = now
        return bool(part)


class _Response:
    """Callbacks of the HTTP parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def read_streams(
    url: str,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    clock: Clock,
    *,
    key: str = "",
    timeout: float = 120.0,
) -> Streams:
    """Send ``bodies`` to ``path`` of the service at ``url``, each on its own connection, and read all to their ends.

    Args:
        key: the API key to show; empty for none.
        timeout: seconds without a byte from anyone.

    Raises:
        DgppError: the service cannot be reached, refuses, or a stream does not end as it must.
    """
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 80)
    try:
        connections = [_Connection(socket.create_connection(address, timeout=timeout)) for _ in bodies]
    except OSError as error:
        hint = "start one with `dgpp serve --plugin NAME`, or name a running one with --url"
        raise DgppError("the service cannot be reached", where=url, found=str(error), hint=hint) from None
    requests = [_request(path, parts.netloc.rpartition("@")[2], body, key) for body in bodies]
    try:
        seconds, start = _exchange(connections, requests, clock, timeout, url)
    finally:
        for connection in connections:
            connection.sock.close()
    return Streams(tuple(_stream(connection, start, url) for connection in connections), seconds)


def _request(path: str, host: str, body: Mapping[str, Any], key: str) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    return f"{head}\r\n".encode() + payload


def _exchange(
    connections: Sequence[_Connection], requests: Sequence[bytes], clock: Clock, timeout: float, url: str
) -> tuple[float, float]:
    """Seconds that all took, and when they began."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.sock, selectors.EVENT_READ, connection)
        start, left = clock(), len(connections)
        for connection, request in zip(connections, requests, strict=True):
            connection.sock.sendall(request)
        while left:
            ready = selector.select(timeout)
            if not ready:
                raise DgppError("a stream stopped", where=url, found=f"no byte for {timeout:g} s")
            now = clock()
            for key, _ in ready:
                if not key.data.take(now):
                    selector.unregister(key.fileobj)
                    left -= 1
        return clock() - start, start


def _stream(connection: _Connection, start: float, url: str) -> Stream:
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    parser.feed_data(b"".join(connection.parts))
    status = parser.get_status_code()
    if status != 200:
        raise DgppError("the service refused", where=url, found=f"{status} {bytes(response.body[:500])!r}")
    events = bytes(response.body).decode().split("\n\n")
    if not response.complete or events[-2:] != ["data: [DONE]", ""]:
        raise DgppError("a stream was cut off", where=url, found=repr(events[-1]), expected="data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2] if not event.startswith(":")]
    if failed := next((chunk for chunk in chunks if "error" in chunk), None):
        raise DgppError("a stream ended in an error", where=url, found=str(failed["error"]))
    return Stream(events=tuple(chunks), reads=len(connection.parts), first_s=connection.first - start)
