"""The front end and its clients: the real `EngineClient` and `Watch`, and requests that come, go and are answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from dgpp_core.api import RequestError
from dgpp_core.scheduler.messages import (
    VERSION,
    Beat,
    Ending,
    Failed,
    FromEngine,
    Output,
    Ready,
    Shutdown,
    ToEngine,
    Update,
)
from dgpp_core.server.engine_client import EngineClient, Event, Inbox
from dgpp_core.server.timings import Timings
from dgpp_core.server.watch import TICK_S, Watch
from dgpp_core.testing.fake_engine import Pick, solo
from dgpp_core.testing.sim.process import Process
from dgpp_core.testing.sim.promises import require
from dgpp_core.testing.sim.scenario import Ask, Scenario
from dgpp_core.testing.sim.timeline import Timeline

PIPE_S = 0.0002


class Reply(Inbox):
    """What a client got.

    Attributes:
        submit: what it asked for.
        due: it will ask, or has asked.
        asked: it has.
        left: it went before the end.
        stopped: a stop string was found.
    """

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.ask, self.submit = ask, ask.submit
        self.tokens: list[int] = []
        self.ends: list[Ending | RequestError] = []
        self.due = ask.follows < 0
        self.asked = self.left = self.stopped = False

    def put(self, event: Event) -> None:
        """Note it."""
        if isinstance(event, Update):
            require(not self.ends, f"request {event.id} says nothing after its end")
            require(bool(event.tokens), "an update brings tokens")
            self.tokens += event.tokens
        else:
            self.ends.append(event)


class FrontProcess(Process):
    """Rank 0's parent process.

    Attributes:
        failure: why it says that the engine has failed.
        failed_at: when it said so.
    """

    def __init__(self, scenario: Scenario, timeline: Timeline, source: random.Random) -> None:
        super().__init__("the front end", timeline, source)
        limits = scenario.limits
        ready = Ready(
            version=VERSION, pid=1, vocab_size=1, context_tokens=limits.max_context, position_ceiling=1, pool_tokens=1,
            row_exact=True, load_seconds=0.0, plan="",
        )  # fmt: skip
        capacity = limits.slots + limits.queue
        self.client = EngineClient(self._send, ready, capacity=capacity, timings=Timings(self.clock, ""))
        self.replies = [Reply(ask) for ask in scenario.asks]
        self.failure, self.failed_at = "", -1.0
        self.stopping = False
        self._engine: Process = self
        self._put: Callable[[ToEngine], None] = lambda message: None
        self._ended: set[int] = set()
        self._scenario, self._watch = scenario, Watch(0.0, str)

    def connect(self, engine: Process, put: Callable[[ToEngine], None]) -> None:
        """The engine's process, and what takes messages there."""
        self._engine, self._put = engine, put

    def ready(self) -> None:
        """The engine serves: clients come."""
        self._watch = Watch(self.clock(), lambda: "T" if self._engine.paused else "S")
        self.every("loop", TICK_S, self._tick)
        for reply in self.replies:
            if reply.ask.follows < 0:
                self.at("loop", reply.ask.at, partial(self._ask, reply))
        if self._scenario.shutdown >= 0:
            self.at("loop", self._scenario.shutdown, self._shut_down)

    def receive(self, message: FromEngine) -> None:
        """As `EngineProcess` does."""
        if isinstance(message, Failed):
            return self.broken(message.what)
        if isinstance(message, Beat):
            self._watch.beat(message, self.clock())
        else:
            self._watch.hear(self.clock())
        self.client.receive(message)
        if isinstance(message, Output):
            self._look(message)
        return None

    def broken(self, why: str) -> None:
        """The engine has failed."""
        if not self.failure:
            self.failure, self.failed_at = why, self.timeline.now
            self.client.fail(why)

    def verify(self, pick: Pick, trusted: bool) -> None:
        """Every request was answered once, as it is when it is alone.

        Args:
            trusted: rank 0 computed what it should.
        """
        for reply in self.replies:
            if not reply.asked or reply.left:
                continue
            name = reply.submit.id
            require(len(reply.ends) == 1, f"request {name} ends exactly once, not {len(reply.ends)} times")
            text, reason = solo(reply.submit, pick)
            got, end = tuple(reply.tokens), reply.ends[0]
            if isinstance(end, RequestError):
                ok = got == text[: len(got)]
            elif end.reason == "error":
                ok = not got and bool(end.error)
            elif end.reason == "stop":
                ok = got == text[: len(got)] and reply.stopped
            else:
                ok = (got, end.reason) == (text, reason)
            require(ok or not trusted, f"request {name} is answered as it is alone: {got} {end}, not {text} {reason}")

    def _ask(self, reply: Reply) -> None:
        reply.asked = True
        number = self.client.ids(1)[0]
        before = self.replies[reply.ask.follows] if reply.ask.follows >= 0 else None
        tokens = reply.ask.submit.tokens
        if before is not None:
            tokens = (*before.submit.tokens, *before.tokens, *tokens[:6])
        reply.submit = msgspec.structs.replace(reply.ask.submit, id=number, tokens=tokens)
        try:
            self.client.submit((reply.submit,), reply)
        except RequestError as error:
            reply.put(error)
            self._next()
        if reply.ask.cancel >= 0:
            self.at("loop", reply.ask.cancel, lambda: self._cancel(reply))

    def _cancel(self, reply: Reply) -> None:
        if not reply.ends:
            reply.left = True
            self.client.cancel(reply.submit.id)

    def _look(self, output: Output) -> None:
        """Stop strings are found, and clients that waited for a reply ask again."""
        for reply in self.replies:
            stop = reply.ask.stop
            if not reply.ends and not reply.stopped and 0 <= stop <= len(reply.tokens):
                reply.stopped = True
                self.client.stop(reply.submit.id)
        if output.endings:
            self._ended.update(ending.id for ending in output.endings)
            self._next()

    def _next(self) -> None:
        for reply in self.replies:
            if not reply.due and self._over(self.replies[reply.ask.follows]):
                reply.due = True
                self.at("loop", self.random.uniform(0, 0.05), partial(self._ask, reply))
        if not self.client.open and all(reply.asked for reply in self.replies):
            self._shut_down()

    def _over(self, reply: Reply) -> bool:
        return bool(reply.ends) or (reply.left and reply.submit.id in self._ended)

    def _shut_down(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.client.abandon()
            for reply in self.replies:
                if reply.ends and isinstance(reply.ends[0], RequestError):
                    self.client.cancel(reply.submit.id)
            self._send((Shutdown(),))

    def _tick(self) -> bool:
        if reason := self._watch.tick(self.clock()):
            self.broken(reason)
        return not self.failure

    def _send(self, messages: Sequence[ToEngine]) -> None:
        for message in messages:
            self._engine.at("channel", PIPE_S, partial(self._put, message))
