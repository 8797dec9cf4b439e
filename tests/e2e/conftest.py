"""`dgpp serve` as a user starts it, with its real engine process."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dgpp_core.host.child import module_command

START_S = 300
LINE = [sys.executable, "-m", "dgpp_core.cli"]
Environ = dict[str, str]


class Running:
    """A running `dgpp serve`.

    Attributes:
        url: where it listens, without a path.
        curl: the command to try that it printed.
        engine: the process id of its engine.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, environ: Environ) -> None:
        self.process, self.url, self.environ = process, url, environ
        assert process.stdout is not None
        self.curl = process.stdout.readline().strip()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (self.engine,) = [
            int(pid) for pid in children if b"cluster.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        self._log: list[str] = []
        assert process.stderr is not None
        self._reader = threading.Thread(target=self._log.extend, args=(process.stderr,), daemon=True)
        self._reader.start()
        self.model: str = httpx.get(url + "/v1/models").json()["data"][0]["id"]

    def log(self) -> str:
        """What an ended service wrote on stderr."""
        self._reader.join(10)
        return "".join(self._log)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The reply to ``body``, which must be a good one."""
        response = httpx.post(f"{self.url}/v1/{path}", json={"model": self.model} | body, timeout=120)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def openai(self) -> openai.OpenAI:
        """The official client."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def metrics(self) -> dict[str, Any]:
        """The JSON metrics."""
        found: dict[str, Any] = httpx.get(self.url + "/metrics", timeout=30).json()
        return found

    def held(self) -> dict[str, int]:
        """What requests hold, all zero on an idle service."""
        found = self.metrics()
        scheduler = found["scheduler"]
        return {
            "open": found["service"]["requests_open"],
            "active": scheduler["active"],
            "queued": scheduler["queued"],
            "prefilling": scheduler["prefilling"],
            "blocks": scheduler["pool_blocks_in_use"] - found["prefix_cache"]["blocks_cached"],
        }

    def await_idle(self) -> None:
        """Wait until nothing is held."""
        wait_for(lambda: not any(self.held().values()), lambda: str(self.held()))


def wait_for(condition: Callable[[], bool], describe: Callable[[], str] = str, seconds: float = 60.0) -> None:
    """Return when ``condition`` holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {describe()}"
        time.sleep(0.02)


@pytest.fixture(scope="session", name="wait_for")
def wait_for_fixture() -> Callable[..., None]:
    """`wait_for`, for tests."""
    return wait_for


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Environ:
    """A service's environment: a cache of its own, or the converted checkpoints in DGPP_TEST_CACHE."""
    cache = tmp_path_factory.mktemp("cache")
    if given := os.environ.get("DGPP_TEST_CACHE"):
        (cache / "dgpp").mkdir()
        (cache / "dgpp" / "checkpoints").symlink_to(Path(given).absolute(), target_is_directory=True)
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def dgpp(environ: Environ) -> Callable[..., str]:
    """``dgpp("plan", "--json")``: what the command prints; it must succeed."""

    def call(*arguments: str, **changes: str) -> str:
        line = [*LINE, *arguments]
        done = subprocess.run(line, capture_output=True, text=True, env=environ | changes, timeout=START_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="session")
def serve(environ: Environ) -> Serve:
    """``with serve("--plugin=smollm2") as running``: the service for as long as the block runs.

    At its end a service that still runs must leave orderly.
    """

    @contextmanager
    def start(*arguments: str, **changes: str) -> Iterator[Running]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        line = module_command("dgpp_core.cli", "serve", f"--port={port}", *arguments)
        pipe = subprocess.PIPE
        with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environ | changes) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                readable, _, _ = select.select([process.stdout], [], [], START_S)
                ready = process.stdout.readline() if readable else "nothing"
                if not ready.startswith("READY"):
                    process.kill()
                    pytest.fail(f"no READY but {ready!r}: {process.stderr.read()}")
                running = Running(process, f"http://127.0.0.1:{port}", environ | changes)
                yield running
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(60) == 0, running.log()
            finally:
                process.kill()

    return start


@pytest.fixture(scope="session")
def tiny_checkpoint(dgpp: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of a tiny model with a context of 2,048 tokens."""
    folder = tmp_path_factory.mktemp("synth") / "tiny"
    dgpp("synth", "smollm2", "--tiny", str(folder))
    return folder


@pytest.fixture(scope="session")
def serve_tiny(serve: Serve, tiny_checkpoint: Path) -> Serve:
    """`serve`, of the tiny model."""
    return lambda *arguments: serve(
        "--plugin=smollm2", f"--checkpoint={tiny_checkpoint}", "--model-alias=tiny", *arguments
    )


@pytest.fixture(scope="session")
def tiny(serve_tiny: Serve) -> Iterator[Running]:
    """A service of the tiny model that many tests share; each leaves it idle."""
    with serve_tiny() as running:
        yield running
