"""`dgpp serve`: the engine process and the HTTP service, from start to an orderly or a named end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from dgpp_core.config.addresses import EVERYWHERE, EVERYWHERE_6, address_of, reachable
from dgpp_core.scheduler.messages import VERSION, Boot, Ready
from dgpp_core.server.access import AccessLog, exposure
from dgpp_core.server.app import create_app
from dgpp_core.server.engine_client import EngineClient
from dgpp_core.server.engine_process import EngineProcess, engine_process
from dgpp_core.server.files import Files
from dgpp_core.server.http import Server, http_server, listen
from dgpp_core.server.keys import KeyRing
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.page import page_routes
from dgpp_core.server.progress import LoadingDisplay
from dgpp_core.server.ranks import LEAVE_S, describe_status, listen_for_ranks, local_ranks, rank_environ, ranks_of
from dgpp_core.server.reasoning import without_effect
from dgpp_core.server.served import served_model
from dgpp_core.server.service import Outside, Service
from dgpp_core.server.statistics import report
from dgpp_core.server.store import FileStore
from dgpp_core.server.timings import Timings
from dgpp_core.text.grammar.frames import Tokens
from dgpp_core.text.grammar.trial import Trial
from dgpp_core.text.stack import TextStack, load_text

WORKER = "dgpp_core.cluster.worker"
EXIT_FAILED = 2
"""The engine failed while serving, or a second signal cut the end short."""

log = logging.getLogger("dgpp.server")

OnReady = Callable[[str, Ready], None]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that ends may take.

    Attributes:
        drain: running requests, once the service stops.
        notice: how long before that the rest is ended with an error, so that no stream is cut off.
        grace: how long a failed engine's service stays to say so.
    """

    drain: float = 30.0
    notice: float = 2.0
    grace: float = 3.0


DEFAULT_TIMING = Timing()


def run(
    options: ServeOptions,
    *,
    stopping: Stopping | None = None,
    worker_module: str = WORKER,
    worker_arguments: Sequence[str] = (),
    on_ready: OnReady | None = None,
    routes: Sequence[Any] = (),
    timing: Timing = DEFAULT_TIMING,
) -> int:
    """Serve until a signal ends it. The exit status is 0 for an orderly end, 2 if the engine failed or it was forced.

    Args:
        stopping: asked to stop by signals; whoever passes it knows afterwards whether it was.
        worker_module: what `python -m` runs as the engine, with ``worker_arguments``.
        on_ready: called with the service's URL when it serves; without it, READY is printed.
        routes: further Litestar routes.

    Raises:
        DgppError: nothing was served: the checkpoint's text, the address or the engine is at fault.
    """
    for warning in exposure(options.http):
        log.warning("%s", warning)
    text = load_text(Path(options.checkpoint), options.dialect, config_eos=options.config_eos)
    if text.template is not None and text.switches.ignored:
        names, follows = ", ".join(text.switches.ignored), without_effect(text.switches)
        log.warning("%s: the chat template makes nothing of %s: %s", text.template.name, names, follows)
    listener = listen(options.http.bind_host, options.http.port)
    stopping = stopping or Stopping()
    outside = Outside(clock=time.monotonic, time=time.time, random_bytes=os.urandom)

    async def main() -> int:
        with stopping.on_signals():
            return await serve(
                options,
                text,
                listener,
                worker_module=worker_module,
                worker_arguments=worker_arguments,
                on_ready=on_ready or (lambda url, ready: print_ready(options, url, ready)),
                routes=routes,
                timing=timing,
                stopping=stopping,
                outside=outside,
            )

    with contextlib.closing(listener), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


class Stopping:
    """Requests to stop: the first is orderly, the second is not."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.server: Server | None = None

    def ask(self) -> None:
        """Stop; asked again, stop at once."""
        if self.server is not None:
            self.server.stop()
        self.asked.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Ask on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.ask)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def serve(
    options: ServeOptions,
    text: TextStack,
    listener: socket.socket,
    *,
    worker_module: str,
    worker_arguments: Sequence[str] = (),
    on_ready: OnReady,
    routes: Sequence[Any] = (),
    timing: Timing,
    stopping: Stopping,
    outside: Outside,
) -> int:
    """As `run`, in a running loop, with everything from outside as arguments."""
    keys = KeyRing(Path(options.http.api_key_file).expanduser()) if options.http.api_key_file else None
    store = await asyncio.to_thread(FileStore, options.files, outside.random_bytes)
    files = Files(options.files, store.read)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(store.close)
        engine, boot = await stack.enter_async_context(_engine(options, worker_module, worker_arguments, outside))
        ready = await _start(engine, boot, stopping)
        if ready is None:  # an engine that loads does not listen: it is ended with the block
            return 0
        timings = Timings(outside.clock, options.served_id)
        client = EngineClient(engine.send, ready, capacity=options.slots + options.queue_limit, timings=timings)
        engine.on_message = client.receive
        trial = await asyncio.to_thread(_trial, text, ready)
        served = served_model(options, text, ready, int(outside.time()), trial, files)
        service = Service(served, client, outside, store)
        inner = create_app(service, routes=(*page_routes(), *routes), keys=keys)
        app = AccessLog(inner, outside.clock, outside.random_bytes)
        server = http_server(app, max_connections=options.max_connections, drain_s=timing.drain)
        stopping.server = server
        keeper = _Keeper(engine, client, server, timing, stopping)
        keeper.watch(service)
        try:
            status = await keeper.serve(listener, lambda: on_ready(f"http://{address_of(listener)}", ready))
        finally:
            if trial is not None:
                trial.close()
            files.close()
        left = await engine.leave(force=server.force_exit)
        failed = left > 0 or (left < 0 and options.world is not None)  # the ranks were not compared then
        if failed and not status:
            log.error("the engine process %s", describe_status(left))
        return EXIT_FAILED if failed else status


@contextlib.asynccontextmanager
async def _engine(
    options: ServeOptions, module: str, arguments: Sequence[str], outside: Outside
) -> AsyncIterator[tuple[EngineProcess, Boot]]:
    """The engine's process, with those of the other ranks where there are any, and what it has to be told."""
    boot = Boot(
        version=VERSION,
        model=options.model,
        checkpoint=options.checkpoint,
        device=options.device,
        settings=options.settings,
        image_cache=options.image_cache,
    )
    if options.world is None:
        async with engine_process(module, arguments, outside.clock) as engine:
            yield engine, boot
        return
    with listen_for_ranks(options.world) as journal:
        boot = msgspec.structs.replace(boot, ranks=ranks_of(options.world, journal))
        async with (
            engine_process(module, arguments, outside.clock, inherit=journal, environ=rank_environ()) as engine,
            local_ranks(options, journal, engine.broken) as others,
        ):
            journal.close()
            yield engine, boot
            if engine.status == 0:
                await asyncio.gather(*(rank.leave(LEAVE_S) for rank in others))


def _trial(text: TextStack, ready: Ready) -> Trial | None:
    """Where grammars are tried, if the engine takes any."""
    ends = text.defaults.eos_ids
    if not ready.constrained or not ends:
        return None
    trial = Trial(Tokens.of(text.tokenizer, ready.vocab_size, ends[0]))
    trial.start()
    return trial


async def _start(engine: EngineProcess, boot: Boot, stopping: Stopping) -> Ready | None:
    """The engine's readiness, or None if we were asked to stop first."""
    with LoadingDisplay(Console(stderr=True)) as display:
        starting = asyncio.ensure_future(engine.start(boot, display.show))
        asked = asyncio.ensure_future(stopping.asked.wait())
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        return None


class _Keeper:
    """Keeps the service up until it is asked to stop or its engine fails."""

    def __init__(
        self, engine: EngineProcess, client: EngineClient, server: Server, timing: Timing, stopping: Stopping
    ) -> None:
        self._engine, self._client, self._server = engine, client, server
        self._timing, self._stopping = timing, stopping
        self._tasks: list[asyncio.Task[None]] = []
        engine.on_failure = self._failed

    def watch(self, service: Service) -> None:
        """Log what it does, as often as the settings say."""
        if interval := service.served.settings.stats_interval_s:
            self._tasks.append(asyncio.create_task(report(service, interval)))

    async def serve(self, listener: socket.socket, on_ready: Callable[[], None]) -> int:
        self._tasks += [
            asyncio.create_task(self._engine.watch()),
            asyncio.create_task(self._drain()),
            asyncio.create_task(self._announce(on_ready)),
        ]
        try:
            await self._server.serve(sockets=[listener])
            if self._server.force_exit:
                await self._cut_short()
        finally:
            for task in self._tasks:
                task.cancel()
        if self._client.failure is not None:
            log.error("stopped: the engine failed: %s", self._client.failure)
            return EXIT_FAILED
        return EXIT_FAILED if self._server.force_exit else 0

    async def _cut_short(self) -> None:
        """End what still runs by name; left to the end of the loop, it would end in tracebacks."""
        self._client.abandon()
        tasks = self._server.server_state.tasks
        if tasks:
            await asyncio.wait(tuple(tasks), timeout=self._timing.notice)

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        on_ready()

    async def _drain(self) -> None:
        await self._stopping.asked.wait()
        log.info("stopping: %d requests are running", self._client.open)
        self._client.drain()
        await asyncio.sleep(max(self._timing.drain - self._timing.notice, 0.0))
        self._client.abandon()

    def _failed(self, reason: str) -> None:
        log.error("the engine failed: %s", reason)
        self._client.fail(reason)
        self._tasks.append(asyncio.create_task(self._leave_after_grace()))

    async def _leave_after_grace(self) -> None:
        await asyncio.sleep(self._timing.grace)
        self._server.should_exit = True


def print_ready(options: ServeOptions, url: str, ready: Ready) -> None:
    """READY on standard output, with a command to try; a warning where replies may depend on their company."""
    if not ready.row_exact:
        log.warning("the rehearsal found rows that depend on their neighbours: replies are not exact on this device")
    body = {"model": options.served_id, "messages": [{"role": "user", "content": "Name three primary colors."}]}
    there = url.replace(f"//{EVERYWHERE}:", f"//{reachable(EVERYWHERE)}:")
    there = there.replace(f"//[{EVERYWHERE_6}]:", f"//[{reachable(EVERYWHERE_6)}]:")
    target = f"{there}/v1/chat/completions"
    target = f"'{target}'" if "[" in there else target  # shells have a use for brackets
    print(f"READY {url}/v1 serves {options.served_id} ({ready.context_tokens} tokens a request)", flush=True)
    print(f"  curl -s {target} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", flush=True)
    print(f"  or open {there}/ in a browser, or: dgpp chat --url {there}", flush=True)
