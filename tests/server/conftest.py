"""A real front end over loopback, its engine process the fake worker, its tokenizer made here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
import uvloop

from dgpp_core.scheduler.messages import Ready
from dgpp_core.server.http import listen
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.service import Outside
from dgpp_core.server.supervisor import Stopping, Timing, serve
from dgpp_core.testing.fake_service import MARKERS, TEMPLATE, write_checkpoint
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.text.stack import TextStack, load_text

FAKE = "dgpp_core.testing.fake_worker"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer of a few hundred tokens, a chat template and generation defaults."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MARKERS, TEMPLATE)


@pytest.fixture(scope="session", name="write_checkpoint")
def write_checkpoint_fixture() -> Callable[[Path, Sequence[str], str], Path]:
    """`write_checkpoint`, for tests."""
    return write_checkpoint


@pytest.fixture(scope="session")
def text(checkpoint: Path) -> TextStack:
    """The text stack of `checkpoint`."""
    return load_text(checkpoint, None, config_eos=(1,))


class Running:
    """A front end that serves in a thread."""

    def __init__(self, url: str, ready: Ready, record: Path) -> None:
        self.url, self.ready, self._record = url, ready, record
        self.status: int | None = None

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """What the engine process was sent of ``kind``."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return [message for message in map(json.loads, lines) if message["type"] == kind]

    def await_messages(self, kind: str, count: int) -> list[dict[str, Any]]:
        """The same, once there are at least ``count``."""
        wait_for(lambda: len(self.messages(kind)) >= count)
        return self.messages(kind)

    def metrics(self) -> dict[str, Any]:
        """The JSON metrics."""
        found: dict[str, Any] = httpx.get(self.url + "/metrics").json()
        return found

    def await_idle(self) -> None:
        """Wait until no request is open and the engine says the same."""
        wait_for(lambda: self._load() == (0, 0, 0))

    def _load(self) -> tuple[int, int, int]:
        found = self.metrics()
        return found["service"]["requests_open"], found["scheduler"]["active"], found["scheduler"]["queued"]

    def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat request about colors, with ``fields`` over it."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "colors"}]} | fields
        return httpx.post(self.url + "/v1/chat/completions", json=body, timeout=30)

    def complete(self, **fields: Any) -> httpx.Response:
        """POST a completion request, with ``fields`` over it."""
        return httpx.post(self.url + "/v1/completions", json={"model": "fake", "prompt": "colors"} | fields, timeout=30)

    def openai(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=30)

    def anthropic(self) -> anthropic.Anthropic:
        """The official client of the other dialect."""
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="session", name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    """`wait_for`, for tests."""
    return wait_for


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return when ``condition`` holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serve_fake(checkpoint: Path, text: TextStack, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """``with serve_fake(script, **options) as running``: a front end for as long as the block runs.

    ``model`` is the folder of another checkpoint than `checkpoint`.
    """

    @contextlib.contextmanager
    def start(
        script: FakeScript | None = None, *, timing: Timing | None = None, model: Path | None = None, **fields: Any
    ) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp("fake")
        script = script or FakeScript()
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        options = ServeOptions(
            **{"model": "fake", "served_id": "fake", "checkpoint": str(model or checkpoint), "settings": b"{}",
               "slots": script.slots} | fields
        )  # fmt: skip
        arguments = ("--script", str(folder / "script.json"), "--record", str(folder / "record"))
        thread = _Thread(
            options,
            load_text(model, None, config_eos=(1,)) if model else text,
            arguments,
            timing or Timing(drain=2.0, notice=0.5, grace=1.0),
            folder / "record",
        )
        running = thread.ready()
        try:
            yield running
        finally:
            running.status = thread.end()

    return start


class _Thread:
    """`serve` in a thread of its own."""

    def __init__(
        self, options: ServeOptions, text: TextStack, arguments: tuple[str, ...], timing: Timing, record: Path
    ) -> None:
        self._began = threading.Event()
        self._running: Running | None = None
        self._result: int | BaseException = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: Stopping | None = None
        listener = listen("127.0.0.1", 0)

        def on_ready(url: str, ready: Ready) -> None:
            self._running = Running(url, ready, record)
            self._began.set()

        async def main() -> int:
            self._loop, self._stopping = asyncio.get_running_loop(), Stopping()
            outside = Outside(clock=time.monotonic, time=time.time, random_bytes=os.urandom)
            return await serve(
                options, text, listener, worker_module=FAKE, worker_arguments=arguments, on_ready=on_ready,
                timing=timing, stopping=self._stopping, outside=outside,
            )  # fmt: skip

        def work() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    self._result = runner.run(main())
            except BaseException as error:
                self._result = error
            self._began.set()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def ready(self) -> Running:
        assert self._began.wait(30)
        if self._running is None:
            assert isinstance(self._result, BaseException)
            raise self._result
        return self._running

    def end(self) -> int:
        assert self._loop is not None
        assert self._stopping is not None
        with contextlib.suppress(RuntimeError):  # the loop may have ended by itself
            self._loop.call_soon_threadsafe(self._stopping.ask)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


@pytest.fixture(scope="session")
def fake(serve_fake: Serve) -> Iterator[Running]:
    """A front end that most tests share: it says which colors are primary, and thinks where it is asked to think."""
    replies = (
        FakeReply(match="ponder", text="<think>I think about it first.</think>Red, yellow and blue."),
        FakeReply(match="emoji", text="世界 🧑‍💻 안녕!"),
        FakeReply(match="", text="Red, yellow and blue."),
    )
    with serve_fake(FakeScript(replies=replies, cached_tokens=3), max_connections=256) as running:
        yield running
