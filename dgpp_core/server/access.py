"""Who may ask, and what was asked: the check of API keys, the access log, request ids, and the bind guard."""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from litestar.connection import ASGIConnection
from litestar.enums import ScopeType
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, Guard, Message, Receive, Scope, Send

from dgpp_core.api.errors import RequestError
from dgpp_core.config.addresses import Address
from dgpp_core.config.settings import HttpSettings
from dgpp_core.server.keys import KeyRing
from dgpp_core.server.logs import REQUEST_ID, fields

log = logging.getLogger("dgpp.access")

OPEN = {"open_to_all": True}
"""Handler options of a route that needs no key: it tells nothing about requests and computes nothing."""
QUIET = frozenset({"/health", "/metrics", "/v1/metrics"})
"""Routes that monitors ask every few seconds; their lines are for debugging."""
_HOLDER = "api_key_holder"
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


def key_guard(ring: KeyRing) -> Guard:
    """A guard of every route that is not marked `OPEN`: the request must show a key of ``ring``."""

    async def check(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
        if handler.opt.get("open_to_all"):
            return
        shown = _shown_key(connection.scope)
        holder = ring.holder(shown) if shown is not None else None
        if holder is None:
            what = "this service needs an API key" if shown is None else "the API key is not one of this service's"
            raise RequestError(
                what,
                status=401,
                code="invalid_api_key",
                hint="send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )
        connection.scope.setdefault("state", {})[_HOLDER] = holder

    return check


def _shown_key(scope: Scope) -> bytes | None:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return headers.get(b"x-api-key")


class AccessLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answered request. ``status`` is 0 where the client left before there was one.

    Attributes:
        reply: the id in the reply, of a generation.
        key: the name of the API key's holder.
        duration_ms: until the last byte was handed over.
        bytes_out: of the body.
    """

    method: str
    path: str
    status: int
    client: str
    duration_ms: float
    bytes_out: int
    reply: str | None = None
    key: str | None = None

    def text(self) -> str:
        """The line of a text log."""
        more = [f"{name}={value}" for name, value in (("reply", self.reply), ("key", self.key)) if value is not None]
        return " ".join(
            [f"{self.client} {self.method} {self.path} status={self.status} bytes={self.bytes_out}",
             f"ms={self.duration_ms:.1f}", *more]
        )  # fmt: skip


class AccessLog:
    """An ASGI application around ``app`` that gives every request an id and logs its line.

    The id is the client's own ``x-request-id`` where that is up to 64 of ``A-Z a-z 0-9 . _ -``. The answer carries it
    as ``x-request-id``, unless it has an id of its own there, as generations do.

    Args:
        clock: monotonic seconds.
        random_bytes: for ids.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float], random_bytes: Callable[[int], bytes]) -> None:
        self._app, self._clock, self._random_bytes = app, clock, random_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        own = dict(scope["headers"]).get(b"x-request-id", b"")
        number = own.decode() if _CLIENT_ID.fullmatch(own) else f"req-{self._random_bytes(8).hex()}"
        began, status, size, reply = self._clock(), 0, 0, None

        async def sending(message: Message) -> None:
            nonlocal status, size, reply
            if message["type"] == "http.response.body":
                size += len(message["body"])
            elif message["type"] == "http.response.start":
                status = message["status"]
                given = dict(message["headers"]).get(b"x-request-id")
                if given is None:
                    headers = [*message["headers"], (b"x-request-id", number.encode())]
                    message = {**message, "headers": headers}
                else:
                    reply = given.decode()
            await send(message)

        token = REQUEST_ID.set(number)
        try:
            await self._app(scope, receive, sending)
        finally:
            quiet = scope["path"] in QUIET and status == 200
            client = scope.get("client")
            line = AccessLine(
                method=scope["method"],
                path=scope["path"],
                status=status,
                client=client[0] if client else "-",
                duration_ms=round((self._clock() - began) * 1e3, 2),
                bytes_out=size,
                reply=reply,
                key=scope.get("state", {}).get(_HOLDER),
            )
            log.log(logging.DEBUG if quiet else logging.INFO, "%s", line.text(), extra=fields(line))
            REQUEST_ID.reset(token)


def exposure(http: HttpSettings) -> list[str]:
    """What to warn of before the service listens: who else can reach it, and what they can do then."""
    if ipaddress.ip_address(http.bind_host).is_loopback:
        return []
    where = f"the service listens on {Address(http.bind_host, http.port)}, beyond this machine, "
    if http.api_key_file:
        return [where + "without TLS: keys and conversations can be read on the way; put a TLS proxy before it"]
    return [
        where + "without API keys: whoever can reach it can have replies made for as long as they like, keep others"
        " waiting, and read the metrics and the page. Make a key with `dgpp key make NAME --file FILE` and serve with"
        " --api-key-file FILE, or listen on 127.0.0.1"
    ]
