"""The engine process killed or stopped under load: requests end with error objects, the service with a reason."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

STREAMS = 8
HEALTH_S = 4.0
"""The service promises 2 s; the rest is for a machine that does other things too."""


def request(running: Any, number: int) -> tuple[bool, int, str]:
    """A long request, every second one streamed: whether it was, its status and its whole body."""
    stream = number % 2 == 0
    body = {"model": running.model, "prompt": f"{number} and on", "max_tokens": 2000, "temperature": 0}
    url = running.url + "/v1/completions"
    response = httpx.post(url, json=body | {"ignore_eos": True, "stream": stream}, timeout=60)
    return stream, response.status_code, response.text


def seconds_to_unhealthy(running: Any) -> float:
    """Time from now until `/health` says 503."""
    began = time.monotonic()
    with httpx.Client(timeout=30) as client:
        while client.get(running.url + "/health").status_code == 200:
            assert time.monotonic() < began + 30
            time.sleep(0.02)
        response = client.get(running.url + "/health")
    assert response.status_code == 503, response.text
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "stopped")])
def test_engine_lost_under_load(
    serve_tiny: Any, wait_for: Callable[..., None], number: signal.Signals, reason: str
) -> None:
    with serve_tiny(f"--max-concurrency={STREAMS}", "--kv-capacity=20480") as running:
        with ThreadPoolExecutor(STREAMS) as pool:
            replies = [pool.submit(request, running, number) for number in range(STREAMS)]
            wait_for(lambda: running.metrics()["scheduler"]["active"] == STREAMS)
            os.kill(running.engine, number)
            assert seconds_to_unhealthy(running) <= HEALTH_S
            late = httpx.post(running.url + "/v1/completions", json={"model": running.model, "prompt": "x"}, timeout=30)
            assert late.status_code == 503
            assert late.json()["error"]["message"]
            ends = [reply.result(60) for reply in replies]
        status = running.process.wait(30)
        assert status == 2
        assert reason in running.log()
        wait_for(lambda: gone(running.engine))
    assert [stream for stream, _, _ in ends].count(True) == STREAMS // 2
    for stream, code, text in ends:
        if stream:
            *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
            assert (code, last) == (200, "[DONE]"), text[-500:]
            error = json.loads(events[-1])["error"]
        else:
            assert code in (500, 503), text
            error = json.loads(text)["error"]
        assert error["message"]
        assert error["type"] == "server_error"
