"""The front end's side of the engine: which request an output belongs to, and what happens when the engine is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from dgpp_core.api.errors import RequestError
from dgpp_core.scheduler.messages import (
    Beat,
    Cancel,
    Ending,
    FromEngine,
    Output,
    Ready,
    Stats,
    Stop,
    Submit,
    ToEngine,
    Update,
)
from dgpp_core.server.timings import Timings

Event = Update | Ending | RequestError


class Inbox:
    """What the engine has for one HTTP request, whose choices share it. One reader."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Add an event and wake the reader."""
        self._events.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self, timeout: float | None) -> list[Event]:
        """Everything that has come, waiting for the first; empty after ``timeout`` seconds of silence."""
        if not self._events:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(timeout, _wake, waiter) if timeout is not None else None
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        events, self._events = self._events, []
        return events


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class EngineClient:
    """Requests in the engine, by id. Knows nothing of sockets: ``send`` takes messages, `receive` gets them.

    A request stays *open* until its `Ending` comes, also when its client has left: it holds its place that long.

    Args:
        send: hands messages to the engine, in order.
        ready: what the engine said when it was ready.
        capacity: open requests that are taken at most, running and waiting.
        timings: follows what goes and comes.
    """

    def __init__(
        self,
        send: Callable[[Sequence[ToEngine]], None],
        ready: Ready,
        *,
        capacity: int,
        timings: Timings | None = None,
    ) -> None:
        self._send = send
        self.timings = timings or Timings(time.monotonic, "")
        self._inboxes: dict[int, Inbox | None] = {}
        self._next_id = 0
        self.ready = ready
        self.capacity = capacity
        self.stats = Stats()
        self.refusal: RequestError | None = None
        self.failure: str | None = None

    @property
    def open(self) -> int:
        """Requests that have not ended in the engine."""
        return len(self._inboxes)

    @property
    def leaving(self) -> int:
        """Open requests that nobody waits for any more."""
        return sum(inbox is None for inbox in self._inboxes.values())

    def ids(self, count: int) -> tuple[int, ...]:
        """Ids for ``count`` new requests."""
        first = self._next_id
        self._next_id += count
        return tuple(range(first, first + count))

    def submit(self, requests: Sequence[Submit], inbox: Inbox) -> None:
        """Hand in requests together: all are taken or none.

        Raises:
            RequestError: 503 `overloaded`, `server_shutdown` or `engine_failure`.
        """
        if self.refusal is not None:
            raise self.refusal
        if self.open + len(requests) > self.capacity:
            raise RequestError(
                f"the server is busy: {self.open} requests are running or waiting of at most {self.capacity}",
                status=503,
                code="overloaded",
                hint="try again in a moment",
            )
        self._inboxes.update((request.id, inbox) for request in requests)
        self.timings.sent(requests)
        self._send(requests)

    def stop(self, request: int) -> None:
        """A stop string matched."""
        self._end(request, Stop(request))

    def cancel(self, request: int) -> None:
        """Nobody waits for the request any more; later outputs are dropped."""
        self._end(request, Cancel(request))
        if request in self._inboxes:
            self._inboxes[request] = None

    def _end(self, request: int, message: Stop | Cancel) -> None:
        if self.failure is None and request in self._inboxes:
            self._send((message,))

    def receive(self, message: FromEngine) -> None:
        """Pass an engine's message on to the requests it is about."""
        self.timings.came(message)
        if isinstance(message, Output):
            inboxes = self._inboxes
            for update in message.updates:
                if (inbox := inboxes.get(update.id)) is not None:
                    inbox.put(update)
            for ending in message.endings:
                if (inbox := inboxes.pop(ending.id, None)) is not None:
                    inbox.put(ending)
        elif isinstance(message, Beat):
            self.stats = message.stats

    def drain(self) -> None:
        """Take no new requests; those in the engine go on."""
        if self.refusal is None:
            self.refusal = shutting_down()

    def abandon(self) -> None:
        """End every open request with `server_shutdown`."""
        self.drain()
        for inbox in self._inboxes.values():
            if inbox is not None:
                inbox.put(shutting_down())

    def fail(self, reason: str) -> None:
        """The engine is gone: every open request ends with the reason, and so does every later one."""
        if self.failure is not None:
            return
        self.failure = reason
        self.refusal = RequestError(f"the engine failed: {reason}", status=503, code="engine_failure")
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            if inbox is not None:
                inbox.put(self.refusal)


def shutting_down() -> RequestError:
    """What requests get while the server stops."""
    return RequestError("the server is shutting down", status=503, code="server_shutdown")
