"""What holds on every route that generates, in whatever dialect it is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dgpp_core.testing.fake_worker import FakeFault, FakeReply, FakeScript

USER = [{"role": "user", "content": "colors"}]
ROUTES = {
    "chat": ("/v1/chat/completions", {"messages": USER}, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": "colors"}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "colors"}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 200}, "max_tokens"),
}
every_route = pytest.mark.parametrize("route", ROUTES)
# Where str.splitlines() breaks a line, but server-sent events do not.
LINE_ENDS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\rj\nk"


def post(running: Any, route: str, **fields: Any) -> httpx.Response:
    path, body, _ = ROUTES[route]
    return httpx.post(running.url + path, json={"model": "fake"} | body | fields, timeout=30)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which says nothing of our insides."""
    error: dict[str, Any] = response.json()["error"]
    for word in ("Traceback", 'File "', ".py", "0x", "dgpp_core"):
        assert word not in error["message"]
    return error


@every_route
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [0, -1, 2**63, -(2**63), "5", 1.5, True, [], {}, 10**9])
def test_a_token_limit_that_cannot_be_is_refused(fake: Any, route: str, value: Any, stream: bool) -> None:
    """paiml/aprender#665: a limit above the context hung."""
    name = ROUTES[route][2]
    response = post(fake, route, **{name: value, "stream": stream})
    assert response.status_code == 400
    assert name in error_of(response)["message"]


@every_route
def test_no_limit_is_the_default(fake: Any, route: str) -> None:
    if route == "messages":
        assert "max_tokens" in error_of(post(fake, route, max_tokens=None))["message"]
    else:
        assert post(fake, route, **{ROUTES[route][2]: None}).status_code == 200


@every_route
def test_a_prompt_that_is_too_long_is_refused_before_the_headers_of_a_stream(fake: Any, route: str) -> None:
    """sgl-project/sglang#12081: it got 200, with the error in the stream."""
    long = "word " * 5000
    field = {"messages": [{"role": "user", "content": long}]}
    fields = {"completions": {"prompt": long}, "responses": {"input": long}}.get(route, field)
    response = post(fake, route, stream=True, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error.get("code", error.get("details", {}).get("error_code")) == "context_length_exceeded"
    assert "4096" in error["message"]


@every_route
@pytest.mark.parametrize(
    "fields",
    [{"stream": "yes"}, {"stream": 1}, {"temperature": "0"}, {"top_p": 2}, {"seed": 1.5}, {"sse_ping_interval": 0},
     {"logit_bias": {"99999999": 5}}, {"prefix_cache": "no"}, {"model": 5}],
)  # fmt: skip
def test_one_validator(fake: Any, route: str, fields: dict[str, Any]) -> None:
    """raullenchai/Rapid-MLX PR 837: what one route refused, another took."""
    response = post(fake, route, **({"stream": True} | fields))
    assert response.status_code == 400
    assert next(iter(fields)) in error_of(response)["message"]


@every_route
@pytest.mark.parametrize(
    "options", [{"include_usage": "yes"}, {"include_obfuscation": 1}, {"fast": True}, [], 5, "x", False]
)
def test_one_validator_of_stream_options(fake: Any, route: str, options: Any) -> None:
    """The same: ``"include_usage": "yes"``."""
    response = post(fake, route, stream=True, stream_options=options)
    assert response.status_code == 400
    assert "stream_options" in error_of(response)["message"]


@pytest.fixture(scope="module")
def lines(serve_fake: Any) -> Iterator[Any]:
    with serve_fake(FakeScript(replies=(FakeReply(text=f"<think>{LINE_ENDS}</think>{LINE_ENDS}"),))) as running:
        yield running


def shown(events: list[dict[str, Any]]) -> str:
    """Reasoning and content of a stream, in whatever dialect."""
    found = ""
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {"content": choice.get("text")})
            found += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
        if event.get("type", "").endswith("delta") and event["type"] != "message_delta":
            delta = event["delta"]
            found += delta if isinstance(delta, str) else delta.get("thinking", delta.get("text", ""))
    return found


@every_route
def test_a_line_of_a_stream_is_one_line_to_every_reader(lines: Any, route: str) -> None:
    """httpx breaks lines where Unicode has a line end: events came apart there, and their JSON with them."""
    path, body, _ = ROUTES[route]
    events = []
    with httpx.stream("POST", lines.url + path, json={"model": "fake", "stream": True} | body, timeout=30) as response:
        for line in response.iter_lines():
            assert line == "" or line.startswith(("data: ", "event: "))
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    expected = f"<think>{LINE_ENDS}</think>{LINE_ENDS}" if route == "completions" else LINE_ENDS * 2
    assert shown(events) == expected


@every_route
@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_ours_is_told_without_our_insides(serve_fake: Any, route: str, stream: bool) -> None:
    """raullenchai/Rapid-MLX#1849: what a client could have mended became 200 and an internal error."""
    with serve_fake(FakeScript(fault=FakeFault(kind="error", after_tokens=1), step_ms=5)) as running:
        response = post(running, route, stream=stream)
        if stream:
            assert response.status_code == 200
            data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
            told = json.loads(data[-1])
            told = told.get("error") or told["response"]["error"]
        else:
            assert response.status_code == 503
            told = error_of(response)
        assert "gave up this request" in told["message"]
        assert post(running, route, stream=stream).status_code == 200
