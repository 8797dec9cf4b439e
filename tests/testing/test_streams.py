"""The lean stream reader and the fake service give what the official client gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dgpp_core.api import DgppError
from dgpp_core.testing.fake_service import fake_service
from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript
from dgpp_core.testing.services import RunningService
from dgpp_core.testing.streams import read_streams

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "stream": True}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    replies = (FakeReply(text="Red, yellow and blue 世界."),)
    with fake_service(FakeScript(replies=replies)) as running:
        yield running


def text_of(events: tuple[dict[str, Any], ...]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def test_streams_are_what_the_official_client_reads(service: RunningService) -> None:
    bodies = [BODY | {"max_tokens": count} for count in (1, 3, 100)]
    found = read_streams(service.url, CHAT, bodies, time.perf_counter)
    client = openai.OpenAI(base_url=service.url + "/v1", api_key="none")
    for stream, body in zip(found.streams, bodies, strict=True):
        chunks = list(client.chat.completions.create(**body))
        assert len(stream.events) == len(chunks)
        assert text_of(stream.events) == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert 0 < stream.first_s <= found.seconds
        assert stream.reads >= 1
    assert text_of(found.streams[2].events) == "Red, yellow and blue 世界."
    assert found.chunks == sum(len(stream.events) for stream in found.streams)


def test_a_refusal_and_a_service_that_is_not_there_are_named(service: RunningService) -> None:
    with pytest.raises(DgppError, match="404"):
        read_streams(service.url, CHAT, [BODY | {"model": "other"}], time.perf_counter)
    with pytest.raises(DgppError, match="cannot be reached"):
        read_streams("http://127.0.0.1:1", CHAT, [BODY], time.perf_counter)


def test_a_stream_that_ends_in_an_error_is_not_counted() -> None:
    script = FakeScript(fault=FakeFault(kind="error", after_tokens=2), step_ms=5)
    with fake_service(script) as running, pytest.raises(DgppError, match="as its script says"):
        read_streams(running.url, CHAT, [BODY], time.perf_counter)
