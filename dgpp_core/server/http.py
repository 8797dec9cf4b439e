"""The HTTP server: uvicorn with our own signals, a connection limit, and the error object where no route is reached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dgpp_core.api.errors import ConfigError, RequestError
from dgpp_core.config.addresses import Address, bound, next_step
from dgpp_core.server.replies import error_body

log = logging.getLogger("dgpp.access")

MAX_HEADER_BYTES = 16_384
FIRST_REQUEST_S = 30.0
"""How long a connection may stay open before its first byte."""
REQUEST_S = 30.0
"""How long a header section may take to arrive, and how long a body may pause: a client that stalls must not hold one
of the few connections for ever."""
LINGER_S = 1.0
"""How long a refused connection may take to read why."""
MAX_PORT = 65_535
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:(?P<port>[0-9]{0,5}))?")
"""A host of RFC 3986, 3.2.2, and a port."""


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner: uvicorn's own end the process as serving ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def stop(self) -> None:
        """Serve what runs and then leave; called again, leave at once."""
        self.force_exit, self.should_exit = self.should_exit, True


def http_server(app: ASGIApp, *, max_connections: int, drain_s: float, request_s: float = REQUEST_S) -> Server:
    """A server for ``app``; ``drain_s`` is how long running requests may take to end once it stops."""

    class Protocol(_Protocol):
        limit, patience = max_connections, request_s

    return Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(drain_s),
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is known before the engine is started.

    Raises:
        ConfigError: the address cannot be bound.
    """
    address = Address(host, port)
    try:
        listener = bound(address)
    except OSError as error:
        raise ConfigError(
            "the HTTP address cannot be used",
            where=str(address),
            found=error.strerror or str(error),
            hint=next_step(error, "--port or --host"),
        ) from error
    listener.setblocking(False)
    return listener


class _Protocol(HttpToolsProtocol):
    """One connection."""

    limit: int
    patience: float
    _stalled: asyncio.TimerHandle | None = None
    _refused = False
    _in_headers = False
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            self.connections.discard(self)
            what = f"{self.limit} connections are open, which is the limit (engine.max_connections)"
            self._refuse(RequestError(what, status=503, code="overloaded", hint="try again in a moment"))
        else:
            self.timeout_keep_alive_task = self.loop.call_later(FIRST_REQUEST_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        continues = self._in_headers
        super().data_received(data)
        if continues and self._in_headers:
            self._header_bytes += len(data)
            self._check_headers(self._header_bytes)

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        self._expect_more()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._expect_more()
        self._check_headers(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        self._check_host([value for name, value in self.headers if name == b"host"])
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._expect_more()
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect_no_more()
        if not self._refused:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_more()
        super().connection_lost(exc)

    def _expect_more(self) -> None:
        self._expect_no_more()
        self._stalled = self.loop.call_later(self.patience, self._on_stall)

    def _expect_no_more(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _on_stall(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (self._in_headers and answering):  # it is us who are not ready for more
            self._expect_more()
        elif not self._in_headers and self.cycle.response_started:  # answered without its body
            self.transport.close()
        else:
            self._refuse(RequestError(f"the request stopped arriving for {self.patience:g} s", status=408))

    def _check_headers(self, size: int) -> None:
        if size > MAX_HEADER_BYTES and not self._refused:
            self._refuse(RequestError(f"the header section is larger than {MAX_HEADER_BYTES} bytes", status=431))

    def _check_host(self, hosts: Sequence[bytes]) -> None:
        """RFC 9112, 3.2: more than one Host, or one that is none, is a 400. No address is made of it then."""
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if hosts and (found is None or int(found["port"] or 0) > MAX_PORT):
            self._refuse(RequestError("the Host header is not one host, with or without a port", status=400))

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(f"this is not HTTP/1.1: {msg}", status=400))

    def _refuse(self, error: RequestError) -> None:
        """Answer and close, leaving the client time to read: closing at once would reset what it has not read."""
        if self._refused:
            return
        self._refused = True
        self._expect_no_more()
        log.info("%s refused, status=%d: %s", self.client[0] if self.client else "-", error.status, error.what)
        body = error_body(error)
        retry = b"retry-after: 1\r\n" if error.code == "overloaded" else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n" % (
            len(body),
            retry,
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)
