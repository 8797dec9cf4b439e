"""The generation service: what the routes share, and the life of one request with its log line and counts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from dgpp_core.api.errors import RequestError
from dgpp_core.server.counters import Counters
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.generation import CallStart, Event, Finish, Generation
from dgpp_core.server.job import Job
from dgpp_core.server.logs import fields
from dgpp_core.server.replies import Head
from dgpp_core.server.served import Served
from dgpp_core.server.store import FileStore

THREAD_BYTES = 16_384
"""Bodies above this size are prepared in a thread, so that running streams do not wait for a tokenizer."""

HELD_THREADS = 8
"""Requests whose grammar is being tried; other requests do not wait for them."""

ATTACHED = (b"image", b'"file', b"_file", b'"document"')
"""What a body with images or files has in it, unless it spells that with escapes."""
ATTACHED_THREADS = 8
"""Requests whose images and files are being read; other requests do not wait for them."""

log = logging.getLogger("dgpp.request")

Prepared = TypeVar("Prepared")


class Outside(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the service takes from outside: time and randomness.

    Attributes:
        clock: monotonic seconds.
        time: Unix time in seconds.
        random_bytes: so many unpredictable bytes.
    """

    clock: Callable[[], float]
    time: Callable[[], float]
    random_bytes: Callable[[int], bytes]


class Service:
    """One served model with its engine.

    Attributes:
        store: uploaded files.
        registry: histograms, for the Prometheus exposition.
    """

    def __init__(self, served: Served, client: EngineClient, outside: Outside, store: FileStore) -> None:
        self.served, self.client, self.outside, self.store = served, client, outside, store
        self.registry = CollectorRegistry()
        self.counters = Counters(self.registry, served.options.served_id)
        self._beside = ThreadPoolExecutor(HELD_THREADS, "held")
        self._attached = ThreadPoolExecutor(ATTACHED_THREADS, "attached")

    async def prepare(self, prepare: Callable[[bytes, Served], Prepared], body: bytes) -> Prepared:
        """What ``prepare`` makes of ``body``.

        Raises:
            RequestError: it cannot be served.
        """
        # A grammar may take seconds until it is given up. An escape may spell the names of the fields with one.
        escaped = b"\\u" in body
        held = self.served.constrained and (escaped or any(word in body for word in (b"format", b"tools")))
        loop = asyncio.get_running_loop()
        if any(word in body for word in ATTACHED):
            return await loop.run_in_executor(self._attached, prepare, body, self.served)
        if held:
            return await loop.run_in_executor(self._beside, prepare, body, self.served)
        if escaped or len(body) > THREAD_BYTES:
            return await asyncio.to_thread(prepare, body, self.served)
        return prepare(body, self.served)

    def begin(self, job: Job, prefix: str) -> Exchange:
        """Hand the job to the engine; the reply's id begins with ``prefix``.

        Raises:
            RequestError: 503, the engine takes no requests now.
        """
        self.counters.requests += 1
        began = self.outside.clock()  # before the engine has it: writing to its process may let that run first
        try:
            generation = Generation(job, self.served, self.client, self._draw_seed)
        except RequestError as error:
            self.counters.shed += error.code == "overloaded"
            self.counters.failed += error.code == "engine_failure"
            raise
        head = Head(
            id=f"{prefix}{self.outside.random_bytes(8).hex()}",
            created=int(self.outside.time()),
            model=self.served.options.served_id,
        )
        return Exchange(self, generation, head, began)

    def _draw_seed(self) -> int:
        return int.from_bytes(self.outside.random_bytes(8), "little")


class GenerationLine(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says of a generation: tokens, and milliseconds until its first event and in all.

    Of the prompt, ``cached`` were reused of ``known`` whose rows the prefix cache had; ``miss`` says why none were.
    """

    id: str
    status: int
    prompt: int
    completion: int
    cached: int
    known: int
    miss: str
    finish: str
    first_ms: float | None
    total_ms: float

    def text(self) -> str:
        """The line of a text log."""
        pairs = msgspec.structs.asdict(self).items()
        return " ".join([self.id, *(f"{name}={value}" for name, value in pairs if name != "id")])


class Exchange:
    """One request being answered. Iterate `batches` once and `close` it whatever happens."""

    def __init__(self, service: Service, generation: Generation, head: Head, began: float) -> None:
        self.generation, self.head = generation, head
        self._service, self._began = service, began
        self._first: float | None = None
        self._status = 200
        self._reasons: list[str] = []
        self._closed = False

    async def batches(self) -> AsyncIterator[Sequence[Event]]:
        """As `Generation.batches`, noted for the log."""
        try:
            async for batch in self.generation.batches():
                if batch:
                    self._note(batch)
                yield batch
        except RequestError as error:
            self._status = error.status
            self._service.counters.failed += error.code == "engine_failure"
            raise

    def _note(self, batch: Sequence[Event]) -> None:
        if self._first is None:
            self._first = self._service.outside.clock()
        for event in batch:
            if isinstance(event, Finish):
                self._reasons.append(event.reason)
            self._service.counters.tool_calls += isinstance(event, CallStart)

    def close(self) -> None:
        """Free everything; a request that has not ended is cancelled. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.generation.close()
        left = self._status == 200 and len(self._reasons) < self.generation.job.n
        status = 499 if left else self._status  # the usual number for a client that went away
        self._count(left)
        usage = self.generation.usage
        line = GenerationLine(
            id=self.head.id,
            status=status,
            prompt=usage.prompt,
            completion=usage.completion,
            cached=usage.cached,
            known=usage.known,
            miss=usage.miss.replace(" ", "_") or "none",
            finish=",".join(self._reasons) or "none",
            first_ms=None if self._first is None else round((self._first - self._began) * 1e3, 1),
            total_ms=round((self._service.outside.clock() - self._began) * 1e3, 1),
        )
        log.info("%s", line.text(), extra=fields(line))

    def _count(self, left: bool) -> None:
        counters, usage = self._service.counters, self.generation.usage
        counters.cancelled += left
        counters.tokens += usage.completion
        counters.finished.update(self._reasons)
        if self._first is None or left or self._status != 200:
            return
        now = self._service.outside.clock()
        counters.latency.observe(now - self._began)
        counters.prompt_tokens.observe(usage.prompt)
        counters.reply_tokens.observe(usage.completion)
        if usage.completion > self.generation.job.n:
            counters.token_time.observe((now - self._first) / (usage.completion - self.generation.job.n))
