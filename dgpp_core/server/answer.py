"""ASGI answers of the generation routes: a stream of events or one body, each ended at once by a client that leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from litestar.types import Receive, Scope, Send

from dgpp_core.api.errors import RequestError
from dgpp_core.server.blocks import Collected, collect
from dgpp_core.server.generation import Event, Usage
from dgpp_core.server.job import Job
from dgpp_core.server.replies import Head
from dgpp_core.server.service import Exchange
from dgpp_core.text.tokenizer import Tokenizer

log = logging.getLogger("dgpp.server")

Result = TypeVar("Result")
WholeBody = Callable[[Head, Job, Sequence[Collected], Usage, Tokenizer], msgspec.Struct]


class Encoder(Protocol):
    """Events to bytes of a stream.

    Attributes:
        keep_alive: what is sent in a silence.
    """

    keep_alive: bytes

    def begin(self) -> bytes:
        """What is sent with the headers."""
        ...

    def encode(self, events: Sequence[Event]) -> bytes:
        """``events`` as clients read them."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The end of a stream whose choices are complete."""
        ...

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that cannot go on."""
        ...


class EventStream:
    """An ASGI application that streams one exchange. Headers go out at once, before there is any output."""

    def __init__(self, exchange: Exchange, encoder: Encoder) -> None:
        self._exchange, self._encoder = exchange, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or as much of it as the client stays for."""
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._exchange.close()

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            *((name.encode(), value.encode()) for name, value in request_ids(self._exchange).items()),
        ]
        encoder = self._encoder
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if begin := encoder.begin():
                await _body(send, begin)
            async for batch in self._exchange.batches():
                await _body(send, encoder.encode(batch) if batch else encoder.keep_alive)
        except RequestError as error:
            await _body(send, encoder.fail(error), more=False)
            return
        except Exception as error:  # the status is out already: a cut stream would not say that it is one
            log.error("the stream %s failed", self._exchange.head.id, exc_info=error)
            await _body(send, encoder.fail(internal_error()), more=False)
            return
        await _body(send, encoder.end(self._exchange.generation.usage), more=False)


async def _body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def whole_body(exchange: Exchange, body: WholeBody, tokenizer: Tokenizer, receive: Receive) -> bytes | None:
    """The reply in one piece as JSON; None where the client left before it was complete.

    Raises:
        RequestError: the engine failed or the server stops.
    """
    try:
        events = await unless_gone(receive, _gather(exchange))
        if events is None:
            return None
        generation = exchange.generation
        choices = collect(events, generation.job.n)
        return msgspec.json.encode(body(exchange.head, generation.job, choices, generation.usage, tokenizer))
    finally:
        exchange.close()


async def _gather(exchange: Exchange) -> list[Event]:
    return [event async for batch in exchange.batches() for event in batch]


def request_ids(exchange: Exchange) -> dict[str, str]:
    """The headers that name an exchange: OpenAI's clients read the first, Anthropic's the second."""
    return {"x-request-id": exchange.head.id, "request-id": exchange.head.id}


def internal_error() -> RequestError:
    """What a client may know of a fault of ours."""
    return RequestError("the server failed on this request; its log says why", status=500)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``, or None if the client leaves first; ``work`` is cancelled then.

    Args:
        receive: of a request whose body has been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
