"""Whether a grammar compiles, found out in processes that can be killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import select
import subprocess
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import IO, cast

import msgspec

from dgpp_core.api.errors import EngineError
from dgpp_core.host.child import module_command
from dgpp_core.text.grammar.frames import Tokens, Verdict, write_frame
from dgpp_core.text.grammar.limits import COMPILE_SECONDS, MAX_SOURCE
from dgpp_core.text.grammar.sources import GrammarError

START_SECONDS = 60.0
"""Time for a process to come up, on a machine that is busy loading weights."""

TOO_MUCH = "compiling it takes more"
"""How a verdict begins that is about the work and not about what is written."""

_CLOSED = "the service is stopping"


class Trial:
    """Tries grammars, each source once. Safe to use from several threads.

    Args:
        tokens: the model's control tokens.
        processes: grammars tried at once; a process is started when it is first needed.
        seconds: time for one.
        remembered: sources whose verdict is kept.
    """

    def __init__(
        self, tokens: Tokens, *, processes: int = 2, seconds: float = COMPILE_SECONDS, remembered: int = 1024
    ) -> None:
        self._seconds, self._remembered = seconds, remembered
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, Future[str]] = {}
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all = [_Process(tokens) for _ in range(processes)]
        for process in self._all:
            self._idle.put(process)

    def start(self) -> None:
        """Start a process now, so that the first request need not wait for it.

        Raises:
            EngineError: it does not come up.
        """
        process = self._idle.get()
        try:
            process.start()
        except (TimeoutError, OSError) as error:
            raise EngineError(
                "the process that tries grammars does not start",
                found=str(error) or type(error).__name__,
                expected=f"an answer within {START_SECONDS:g} s",
                hint="its own message stands above; llguidance and numpy must import within 2 GiB of address space",
            ) from error
        finally:
            self._idle.put(process)

    def check(self, source: str) -> None:
        """Return if ``source`` compiles and has a text. Who asks while it is being tried gets the same verdict.

        Raises:
            GrammarError: it does not, or not in time.
        """
        key = hashlib.blake2b(source.encode(), digest_size=16).digest()
        error = self.known(key)
        if error is None:
            error = self._shared(source, key)
        if error:
            raise GrammarError(error)

    def known(self, key: bytes) -> str | None:
        """The verdict that is remembered for a digest."""
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
            return self._verdicts.get(key)

    def close(self) -> None:
        """End every process, and every check that waits for one: nothing compiles from now on."""
        self._closed.set()
        for process in self._all:
            process.kill()

    def _shared(self, source: str, key: bytes) -> str:
        with self._lock:
            running = self._running.get(key)
            if running is None:
                mine = self._running[key] = Future[str]()
        if running is not None:
            return running.result()
        try:
            mine.set_result(self._try(source, key))
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._running[key]
        return mine.result()

    def _try(self, source: str, key: bytes) -> str:
        if len(source) > MAX_SOURCE:
            return f"it is larger than {MAX_SOURCE} characters"
        process = self._idle.get()
        try:
            if self._closed.is_set():
                return _CLOSED
            process.start()
            error = process.ask(source, self._seconds)
        except TimeoutError:
            process.kill()
            return f"{TOO_MUCH} than {self._seconds:g} s"  # not remembered: the machine may have been busy
        except OSError:
            process.kill()
            return _CLOSED if self._closed.is_set() else f"{TOO_MUCH} memory than there is for it"
        finally:
            self._idle.put(process)
        with self._lock:
            self._verdicts[key] = error
            if len(self._verdicts) > self._remembered:
                self._verdicts.popitem(last=False)
        return error


class _Process:
    """One process, used by one thread at a time."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs.

        Raises:
            TimeoutError, OSError: it does not come up.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            module_command("dgpp_core.text.grammar.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._send(self._tokens)
        self._receive(START_SECONDS)

    def ask(self, source: str, seconds: float) -> str:
        """What is wrong with ``source``, or nothing.

        Raises:
            TimeoutError: no answer came in time.
            OSError: the process died.
        """
        self._send(source)
        return self._receive(seconds).error

    def kill(self) -> None:
        """End it at once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # closing sends what a process that died never read
                    cast(IO[bytes], pipe).close()

    def _send(self, message: object) -> None:
        assert self._process is not None, "it was started"
        write_frame(cast(IO[bytes], self._process.stdin), message)  # type: ignore[arg-type]

    def _receive(self, seconds: float) -> Verdict:
        assert self._process is not None, "it was started"
        pipe = cast(IO[bytes], self._process.stdout).fileno()
        end, frame = time.monotonic() + seconds, b""
        while len(frame) < 4 or len(frame) < 4 + int.from_bytes(frame[:4], "little"):
            if not select.select([pipe], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError
            if not (part := os.read(pipe, 65536)):
                raise BrokenPipeError
            frame += part
        return msgspec.msgpack.decode(frame[4:], type=Verdict)
