"""The engine process: started with one end of a socket, watched, and reaped whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import cast

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.host.child import module_command
from dgpp_core.scheduler.messages import (
    VERSION,
    Beat,
    Boot,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Shutdown,
    ToEngine,
    decode_from_engine,
    encode,
)
from dgpp_core.server.ranks import describe_status, dump_stacks
from dgpp_core.server.watch import TICK_S, Watch, process_state

log = logging.getLogger("dgpp.server")

MAX_FRAME_BYTES = 64 << 20
LEAVE_S = 10.0
"""How long the engine may take to leave after `Shutdown`."""


class FrameReader(asyncio.Protocol):
    """Cuts the engine's stream into messages.

    Args:
        on_message: called with each.
        on_broken: called once with the reason, when the stream ends or does not make sense.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_broken: Callable[[str], None]) -> None:
        self._on_message, self._on_broken = on_message, on_broken
        self._buffer = bytearray()
        self._broken = False

    def data_received(self, data: bytes) -> None:
        """Take bytes as they come; asyncio calls it."""
        if not self._broken:
            self._buffer += data
            self._cut()

    def _cut(self) -> None:
        buffer = self._buffer
        start, end = 0, len(buffer)
        while end - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "little")
            if size > MAX_FRAME_BYTES:
                return self._break(f"the engine sent a frame of {size} bytes, more than {MAX_FRAME_BYTES}")
            if end - start - 4 < size:
                break
            try:
                message = decode_from_engine(bytes(buffer[start + 4 : start + 4 + size]))
            except msgspec.DecodeError as error:
                return self._break(f"the engine sent a frame that cannot be read: {error}")
            start += 4 + size
            self._on_message(message)
        del buffer[:start]
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end is closed; asyncio calls it."""
        self._break("the engine closed its connection")

    def _break(self, reason: str) -> None:
        if not self._broken:
            self._broken = True
            self._on_broken(reason)


class EngineProcess:
    """A running engine. Made by `engine_process`.

    Args:
        leads: it is rank 0 of a world of several.

    Attributes:
        on_message: called with each message after `Ready`.
        on_failure: called once with the reason when the engine is gone, unless it was asked to leave.
        failed: the engine's own account of its end, if it gave one.
    """

    def __init__(self, process: Process, clock: Callable[[], float], leads: bool = False) -> None:
        self._process, self._leads = process, leads
        self._clock = clock
        self._watch: Watch | None = None
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._leaving = False
        self._failure: str | None = None
        self.on_loading: Callable[[Loading], None] = lambda _: None
        self.on_message: Callable[[FromEngine], None] = lambda _: None
        self.on_failure: Callable[[str], None] = lambda _: None
        self.failed: Failed | None = None

    @property
    def status(self) -> int | None:
        """The process's exit status, once it has ended."""
        return self._process.returncode

    def attach(self, transport: asyncio.WriteTransport) -> None:
        """The socket to the process is open."""
        self._transport = transport

    def send(self, messages: Sequence[ToEngine]) -> None:
        """Write messages in order; a dead engine's are dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(map(encode, messages)))

    async def start(self, boot: Boot, on_loading: Callable[[Loading], None]) -> Ready:
        """Boot the engine and wait until it serves.

        Raises:
            EngineError: it did not come up; ``exit_code`` is the process's own or 1.
        """
        self.on_loading = on_loading
        self.send((boot,))
        ready = await self._started
        if ready.version != VERSION:
            raise EngineError(
                "engine and front end speak different versions",
                found=str(ready.version),
                expected=str(VERSION),
                hint="reinstall dgpp-core: both come from one installation",
            )
        self._watch = Watch(self._clock(), lambda: process_state(self._process.pid))
        return ready

    async def watch(self) -> None:
        """Tick the watch until the engine fails."""
        while self._watch is not None and self._failure is None:
            await asyncio.sleep(TICK_S)
            if reason := self._watch.tick(self._clock()):
                self.broken(self._named(reason))

    def receive(self, message: FromEngine) -> None:
        """Take a message of the engine's."""
        if self._watch is not None:
            self._hear(message)
        elif isinstance(message, Ready) and not self._started.done():
            self._started.set_result(message)
        elif isinstance(message, Loading):
            self.on_loading(message)
        if isinstance(message, Failed):
            self.failed = message
            log.error("the engine process says:\n%s", message.detail or message.what)  # clients get the short form
            self.broken(message.what)

    def _hear(self, message: FromEngine) -> None:
        if self._watch is not None:
            if isinstance(message, Beat):
                self._watch.beat(message, self._clock())
            else:
                self._watch.hear(self._clock())
        self.on_message(message)

    async def reap(self) -> None:
        """Wait for the process's end; the status it left tells more than its closed socket."""
        status = await self._process.wait()
        self.broken(self._named(f"the engine process {describe_status(status)}"))

    def _named(self, reason: str) -> str:
        return f"rank 0: {reason}" if self._leads else reason

    def lost(self, reason: str) -> None:
        """The stream is broken: give a dying process a moment to leave its status, which is the better reason."""
        asyncio.get_running_loop().call_later(0.1, self.broken, self._named(reason))

    def broken(self, reason: str) -> None:
        """The engine is gone; the first reason counts."""
        if self._failure is not None or self._leaving:
            return
        self._failure = reason
        if not self._started.done():
            self._started.set_exception(self._startup_error(reason))
        else:
            self.on_failure(reason)

    def _startup_error(self, reason: str) -> EngineError:
        error = EngineError("the engine did not start", found=reason, hint="its own messages stand above")
        error.exit_code = self.failed.exit_code if self.failed is not None else 1
        return error

    async def leave(self, *, force: bool) -> int:
        """End the process: by `Shutdown` if it can still listen, else at once. Its exit status, when it is reaped."""
        self._leaving = True
        if not force and self._failure is None:
            self.send((Shutdown(),))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LEAVE_S)
        if self._process.returncode is None and self._leads:
            await dump_stacks(self._process)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        return await self._process.wait()


@contextlib.asynccontextmanager
async def engine_process(
    module: str,
    arguments: Sequence[str],
    clock: Callable[[], float],
    *,
    inherit: socket.socket | None = None,
    environ: Mapping[str, str] | None = None,
) -> AsyncIterator[EngineProcess]:
    """Start ``python -m module --fd N`` and end it on leaving, killed if it was not asked to leave before.

    Args:
        module: the worker.
        arguments: further command-line arguments of it.
        clock: monotonic seconds.
        inherit: the journal's socket, if the process leads other ranks; it has the same number there.
        environ: its environment; None is this process's.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *module_command(module, "--fd", str(theirs.fileno()), *arguments),
                pass_fds=[sock.fileno() for sock in (theirs, inherit) if sock is not None],
                stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=environ,
            )  # fmt: skip
    except BaseException:
        ours.close()
        raise
    engine = EngineProcess(process, clock, leads=inherit is not None)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(lambda: FrameReader(engine.receive, engine.lost), sock=ours)
    engine.attach(cast(asyncio.WriteTransport, transport))
    reaper = asyncio.create_task(engine.reap())
    try:
        yield engine
    finally:
        await engine.leave(force=True)
        transport.close()
        reaper.cancel()
