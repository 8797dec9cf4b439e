"""Silence is filled with comments from a timer, whatever the engine does."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from dgpp_core.config.settings import HttpSettings
from dgpp_core.testing.fake_worker import FakeScript

REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "stream": True}


def lines_of(running: Any, **fields: Any) -> list[str]:
    body = REQUEST | fields
    return httpx.post(running.url + "/v1/chat/completions", json=body, timeout=60).text.splitlines()


def test_headers_before_the_prompt_is_computed(serve_fake: Any) -> None:
    """antirez/ds4#222: a long prefill sends no bytes, and clients and proxies drop the connection."""
    with serve_fake(FakeScript(prefill_ms=60_000)) as running:
        with httpx.stream("POST", running.url + "/v1/chat/completions", json=REQUEST) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-request-id"].startswith("chatcmpl-")
        running.await_idle()


@pytest.mark.parametrize(
    ("server", "own", "comments"), [(1, None, True), (-1, None, False), (-1, 1, True), (1, -1, False)]
)
def test_comments_during_prefill(serve_fake: Any, server: int, own: int | None, comments: bool) -> None:
    with serve_fake(FakeScript(prefill_ms=2500), http=HttpSettings(sse_ping_interval=server)) as running:
        lines = lines_of(running, **({} if own is None else {"sse_ping_interval": own}))
    assert (lines.count(": keep-alive") >= 2) == comments
    assert (": keep-alive" in lines) == comments
    first = next(line for line in lines if line.startswith("data: "))
    assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    if comments:
        assert lines[0] == ": keep-alive"


def test_tokens_that_show_nothing_are_silence_too(serve_fake: Any, checkpoint: Any) -> None:
    """An ignored end id is counted and shown as nothing; the client must hear from us all the same."""
    script = FakeScript(replies=(), step_ms=20, eos_id=1)
    with serve_fake(script) as running:
        lines = lines_of(running, max_tokens=110, ignore_eos=True, sse_ping_interval=1,
                         stream_options={"include_usage": True})  # fmt: skip
    assert lines.count(": keep-alive") >= 1
    usage = json.loads([line for line in lines if line.startswith("data: {")][-1].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == 110
