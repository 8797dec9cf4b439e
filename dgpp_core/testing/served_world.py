"""A service whose model several processes share, started as an operator would, and what is needed to harm it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.host.child import module_command

START_S = 120.0
MODEL = "world"
LOG = "stderr.txt"
"""What it and its ranks write to standard error."""


class Answer(msgspec.Struct, frozen=True):
    """What a client got: a status, a good reply's text or an error's message, and after how many seconds."""

    status: int
    text: str
    seconds: float


class ServedWorld:
    """A running ``dgpp serve``. Made by `served_world`.

    Attributes:
        process: the front end's.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process, self.url, self.folder = process, url, folder

    def await_ready(self) -> None:
        """Wait until it says READY once more, having started again.

        Raises:
            RuntimeError: it ended or said nothing; has its log.
        """
        while not (line := await_line(self.process)).startswith("READY"):
            if not line:
                raise RuntimeError(f"no READY: {self.log}")

    @property
    def log(self) -> str:
        """What it and its ranks have written to standard error so far."""
        return (self.folder / LOG).read_text()

    def fault_file(self, rank: int, epoch: int = 1) -> str:
        """What a rank has left behind."""
        return (self.folder / f"rank-{rank}.epoch-{epoch}.txt").read_text()

    def pid(self, rank: int, epoch: int = 1) -> int:
        """A rank's process, as it wrote into its fault file."""
        return int(self.fault_file(rank, epoch).partition("process ")[2].partition(",")[0])

    def health(self) -> int:
        """The status of ``/health``; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def complete(self, prompt: str, tokens: int, **fields: Any) -> Answer:
        """A greedy completion that runs to its limit."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | fields
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, reply = response.status, json.load(response)
        except urllib.error.HTTPError as error:
            status, reply = error.code, json.load(error)
        text = reply["choices"][0]["text"] if status == 200 else reply["error"]["message"]
        return Answer(status, text, time.monotonic() - began)

    def metrics(self) -> dict[str, Any]:
        """The JSON metrics."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def until(self, active: int) -> None:
        """Wait until so many requests run."""
        end = time.monotonic() + 60
        while self.metrics()["scheduler"]["active"] < active:
            if time.monotonic() > end:
                raise TimeoutError(f"{active} requests do not run: {self.log[-2000:]}")
            time.sleep(0.02)

    def seconds_to_unhealthy(self) -> float:
        """From now until ``/health`` is not 200."""
        began = time.monotonic()
        while self.health() == 200:
            if time.monotonic() > began + 30:
                raise TimeoutError(f"healthy for 30 s: {self.log[-2000:]}")
            time.sleep(0.01)
        return time.monotonic() - began


class Crowd:
    """Clients of a world, each in a thread, each with one long request."""

    def __init__(self, world: ServedWorld, count: int, tokens: int = 1900) -> None:
        self._answers: list[Answer | None] = [None] * count
        self._threads = [threading.Thread(target=self._ask, args=(world, at, tokens)) for at in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, world: ServedWorld, at: int, tokens: int) -> None:
        with contextlib.suppress(OSError):
            self._answers[at] = world.complete(f"{at} and on", tokens)

    def answers(self, seconds: float = 30.0) -> list[Answer | None]:
        """What each got; None for one that was left without an answer."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return list(self._answers)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served_world(
    folder: Path, arguments: Sequence[str], *, environ: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[ServedWorld]:
    """A `started_service` that is ready.

    Raises:
        RuntimeError: it ended or said nothing for `START_S` seconds; has its log.
    """
    with started_service(folder, arguments, environ=environ, prefix=prefix) as process:
        ready = await_line(process)
        if not ready.startswith("READY"):
            raise RuntimeError(f"no READY but {ready!r}: {(folder / LOG).read_text()}")
        yield ServedWorld(process, ready.split()[1].removesuffix("/v1"), folder)


@contextlib.contextmanager
def started_service(
    folder: Path, arguments: Sequence[str], *, environ: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """``dgpp serve`` for as long as the block runs, its fault files and its `LOG` in ``folder``; killed at the end.

    Args:
        arguments: of ``dgpp serve``: what is served, and by how many ranks.
        prefix: what the command line is put behind, such as ``ip netns exec NAME``.
    """
    line = [
        *prefix, *module_command("dgpp_core.cli", "serve", f"--model-alias={MODEL}", f"--log-dir={folder}"), *arguments,
    ]  # fmt: skip
    if not any(argument.startswith("--port") for argument in arguments):
        line.append(f"--port={free_port()}")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / LOG).open("w") as errors,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environ)) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def await_line(process: subprocess.Popen[str], seconds: float = START_S) -> str:
    """The next line of its standard output; empty where it ended or said nothing."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], seconds)
    return process.stdout.readline() if readable else ""


@contextlib.contextmanager
def started_rank(
    folder: Path, arguments: Sequence[str], *, environ: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """``dgpp rank`` for as long as the block runs, its standard error a pipe; killed at the end."""
    line = [*prefix, *module_command("dgpp_core.cli", "rank", f"--log-dir={folder}"), *arguments]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=dict(environ)) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
