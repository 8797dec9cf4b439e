"""What the routes of every dialect share: the service behind a request, and the way from a body to its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from dgpp_core.server.answer import Encoder, EventStream, WholeBody, request_ids, unless_gone, whole_body
from dgpp_core.server.job import Job
from dgpp_core.server.prepare import Prepare
from dgpp_core.server.replies import Head
from dgpp_core.server.service import Service
from dgpp_core.text.tokenizer import Tokenizer

log = logging.getLogger("dgpp.server")

Incoming = Request[Any, Any, State]


class Route(msgspec.Struct, frozen=True, eq=False):
    """What makes a generation route its own: the rest is shared. ``prefix`` begins the ids of its replies."""

    prefix: str
    prepare: Prepare
    stream: Callable[[Head, Job, Tokenizer, Callable[[int], bytes]], Encoder]
    whole: WholeBody


def service_of(request: Incoming) -> Service:
    """The service that the application was made for."""
    service: Service = request.app.state.service
    return service


async def generate(request: Incoming, route: Route) -> ASGIApp:
    """Answer ``request``, streamed or in one piece.

    Raises:
        RequestError: it cannot be served.
    """
    service = service_of(request)
    job = await unless_gone(request.receive, service.prepare(route.prepare, await request.body()))
    if job is None:
        log.info("%s status=499: the client left before its request was read", request.scope["path"])
        return json_answer(b"")
    exchange = service.begin(job, route.prefix)
    tokenizer = service.served.text.tokenizer
    if job.stream:
        encoder = route.stream(exchange.head, job, tokenizer, service.outside.random_bytes)
        return EventStream(exchange, encoder)
    body = await whole_body(exchange, route.whole, tokenizer, request.receive)
    return json_answer(body or b"", headers=request_ids(exchange))


def json_answer(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> ASGIResponse:
    """``body``, which is JSON already."""
    return ASGIResponse(body=body, status_code=status, media_type="application/json", headers=headers)
