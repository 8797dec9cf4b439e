"""An engine that dies, stops, stalls or talks nonsense: open requests end with an error, and everyone is told why."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
from typing import Any

import httpx
import pytest

from dgpp_core.api.errors import EngineError
from dgpp_core.server.supervisor import EXIT_FAILED, Timing
from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript

LONG = (FakeReply(text="blue " * 2000),)
REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "max_tokens": 4000}
PATIENT = Timing(drain=2.0, notice=0.5, grace=60.0)
"""A failed service stays until it has been asked all that is asked here; `test_run.py` sees it leave by itself."""


def last_events(running: Any) -> list[str]:
    """Stream a reply to its end; the data of the last two events."""
    with httpx.stream("POST", running.url + "/v1/chat/completions", json=REQUEST | {"stream": True}, timeout=30) as got:
        assert got.status_code == 200
        return [line.removeprefix("data: ") for line in got.iter_lines() if line.startswith("data: ")][-2:]


def failing(serve_fake: Any, script: FakeScript, hurt: Any = None) -> tuple[str, int | None]:
    """Run a stream and a plain request into a failure; the reason, and the exit status."""
    with serve_fake(script, timing=PATIENT) as running, concurrent.futures.ThreadPoolExecutor() as pool:
        streamed = pool.submit(last_events, running)
        whole = pool.submit(httpx.post, running.url + "/v1/chat/completions", json=REQUEST, timeout=30)
        if hurt is not None:
            running.await_messages("submit", 2)
            hurt(running.ready.pid)
        error, done = streamed.result(30)
        response = whole.result(30)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "engine_failure"
        assert json.loads(error)["error"]["type"] == "server_error"
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_failure"
        health = httpx.get(running.url + "/health")
        assert health.status_code == 503
        assert health.json()["status"] == "failed"
        refused = httpx.post(running.url + "/v1/chat/completions", json=REQUEST)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_failure"
        reason: str = health.json()["error"]
        assert reason in json.loads(error)["error"]["message"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.ready.pid, 0)
        pytest.fail("the engine process is still there")
    return reason, running.status


def test_killed(serve_fake: Any) -> None:
    reason, status = failing(serve_fake, FakeScript(replies=LONG, step_ms=5), lambda pid: os.kill(pid, signal.SIGKILL))
    assert "SIGKILL" in reason
    assert status == EXIT_FAILED


def test_stopped(serve_fake: Any) -> None:
    reason, status = failing(serve_fake, FakeScript(replies=LONG, step_ms=5), lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "stopped" in reason
    assert status == EXIT_FAILED


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exit", "status 7"),
        ("raise", "the fake engine failed"),
        ("hang", "not answered"),
        ("garbage", "cannot be read"),
    ],
)
def test_fault(serve_fake: Any, kind: Any, words: str) -> None:
    script = FakeScript(replies=LONG, step_ms=5, fault=FakeFault(kind=kind, after_tokens=20))
    reason, status = failing(serve_fake, script)
    assert words in reason
    assert status == EXIT_FAILED


def test_tokens_before_the_failure_are_delivered(serve_fake: Any) -> None:
    script = FakeScript(fault=FakeFault(kind="exit", after_tokens=3), tokens_per_step=3)
    with serve_fake(script) as running:
        body = REQUEST | {"stream": True}
        events = httpx.post(running.url + "/v1/chat/completions", json=body, timeout=30).text.split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if "choices" in chunk)
        assert text
        assert "Red, yellow and blue.".startswith(text)
        assert "error" in chunks[-1]
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])


def test_an_engine_that_does_not_start(serve_fake: Any) -> None:
    with pytest.raises(EngineError) as raised, serve_fake(FakeScript(fault=FakeFault(kind="refuse"))):
        pass
    assert raised.value.exit_code == 2
    assert "the fake engine does not start" in raised.value.found
