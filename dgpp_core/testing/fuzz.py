"""Damaged requests by the thousand: of their bodies, and of the HTTP around them.

Whatever comes is answered with success or with what is wrong with it, never with a fault of ours; a stream is one that
the official clients read to its end; and a known request still gets its known answer.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.testing.mutated_bodies import MODEL, ROUTES, TOOL_ROUTES, change_bytes, change_values
from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.tools.dialect import Call

KNOWN: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "colors"}], "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
PATIENCE_S = 30.0
"""How long an answer may take; a service that hangs would take for ever."""
IDLE_S = 30.0

_OPENAI_STREAMS: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletionChunk, openai.Stream[ChatCompletionChunk]),
    "/v1/completions": (Completion, openai.Stream[Completion]),
    "/v1/responses": (ResponseStreamEvent, openai.Stream[ResponseStreamEvent]),
}
"""What an event is and what reads them, by route."""


def tool_script() -> FakeScript:
    """A fake engine that calls `mutated_bodies.FUNCTION`, and says that it holds replies to grammars."""
    call = dialect("glm").render([Call("f", {"a": "x"})], after_text=True)
    replies = (FakeReply(text=f"<think>First it.</think>I look.{call}"),)
    return FakeScript(replies=replies, constrained=True, tokens_per_step=3)


def fuzz_bodies(url: str, count: int, rng: random.Random, *, tools: bool) -> Counter[int]:
    """Send ``count`` damaged bodies to random routes; answers by status.

    Args:
        tools: the service offers tools and grammars.

    Raises:
        AssertionError: an answer is none that a client can use.
        httpx.HTTPError: none came in time.
    """
    routes = [*ROUTES, *TOOL_ROUTES] if tools else ROUTES
    statuses: Counter[int] = Counter()
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client, StreamReaders(url) as readers:
        known = client.post("/v1/chat/completions", json=KNOWN).json()["choices"]
        for _ in range(count):
            route, body = rng.choice(routes)
            raw = rng.choice([change_values, change_bytes])(body, rng)
            response = client.post(route, content=raw)
            statuses[response.status_code] += 1
            _check_answer(route, raw, response)
            if response.headers["content-type"] == "text/event-stream":
                readers.read(route, json.loads(raw))
        assert client.post("/v1/chat/completions", json=KNOWN).json()["choices"] == known
    await_idle(url)
    return statuses


def _check_answer(route: str, raw: bytes, response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), (route, raw, response.text)
    if response.status_code == 200:
        assert '"error":{' not in response.text, (route, raw)
        return
    error = response.json()["error"]
    if route.startswith("/v1/messages"):
        assert response.json()["type"] == "error", (route, raw)
        assert error["type"] in ("invalid_request_error", "not_found_error"), (route, raw, error)
    else:
        assert error["type"] == "invalid_request_error", (route, raw, error)
        assert error["param"], (route, raw, error)


class StreamReaders:
    """The official clients' readers of event streams, for any body."""

    def __init__(self, url: str) -> None:
        self._openai = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        self._anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)

    def __enter__(self) -> StreamReaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._openai.close()
        self._anthropic.close()

    def read(self, route: str, body: Mapping[str, Any]) -> int:
        """Send ``body`` and read the stream to its end; how many events it had.

        Raises:
            openai.OpenAIError, anthropic.AnthropicError: the reader does not accept it.
        """
        events: Any
        if route == "/v1/messages":
            stream_class = anthropic.Stream[RawMessageStreamEvent]
            events = self._anthropic.post(route, body=body, cast_to=Message, stream=True, stream_cls=stream_class)
        else:
            kind, reader = _OPENAI_STREAMS[route]
            events = self._openai.post(route, body=body, cast_to=kind, stream=True, stream_cls=reader)
        count = sum(1 for _ in events)
        assert count, route
        return count


def await_idle(url: str) -> None:
    """Wait until nothing runs any more.

    Raises:
        AssertionError: something still does after `IDLE_S`.
    """
    end = time.monotonic() + IDLE_S
    while True:
        found = httpx.get(url + "/metrics").json()
        load = (found["service"]["requests_open"], found["scheduler"]["active"], found["scheduler"]["queued"])
        if load == (0, 0, 0):
            return
        assert time.monotonic() < end, load
        time.sleep(0.05)


def fuzz_http(url: str, count: int, rng: random.Random) -> Counter[str]:
    """Send ``count`` requests that are split, damaged, cut off or run into each other; outcomes by name.

    Raises:
        AssertionError: an answer says that the service failed.
        TimeoutError: neither an answer nor an end came.
    """
    address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
    known = httpx.post(url + "/v1/chat/completions", json=KNOWN).json()["choices"]
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        parts, whole = _damaged(rng)
        outcomes[_exchange(address, parts, whole, rng)] += 1
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.post(url + "/v1/chat/completions", json=KNOWN).json()["choices"] == known
    await_idle(url)
    return outcomes


def _request(rng: random.Random) -> bytes:
    """A valid request."""
    if rng.random() < 0.3:
        path = rng.choice(["/health", "/v1/models", "/metrics", "/", "/v1/models/fake", "/openapi.json"])
        return b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()
    route, body = rng.choice(ROUTES)
    raw = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % route.encode()
    if rng.random() < 0.3:
        middle = rng.randrange(len(raw))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (raw[:middle], raw[middle:]) if part)
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


_INSERTED = (
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"\xff", b"HTTP/1.1", b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: websocket\r\n",
    b"Connection: upgrade\r\n", b"x: " + b"y" * 17_000 + b"\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n", b" folded\r\n",
    b"%2e%2e/", b"?a=%00&b=%zz", b"Host: y\r\n", b"Accept: text/plain\r\n", b"Authorization: Bearer x\r\n",
)  # fmt: skip


def _damaged(rng: random.Random) -> tuple[list[bytes], bool]:
    """A request in the pieces it is sent in, and whether it is undamaged."""
    raw = bytearray(_request(rng))
    whole = rng.random() < 0.2
    for _ in range(0 if whole else rng.randint(1, 3)):
        head = raw.find(b"\r\n\r\n")
        at = rng.randrange(max(1, head if rng.random() < 0.7 else len(raw)))
        match rng.randrange(5):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del raw[at : at + rng.randint(1, 20)]
            case 2:
                raw[at:at] = rng.choice(_INSERTED)
            case 3:
                line = raw.find(b"\r\n", at) + 2  # between two lines, where a header can stand
                raw[line:line] = rng.choice(_INSERTED)
            case _:
                raw += _request(rng) if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 300))
    if not whole and rng.random() < 0.2:
        del raw[rng.randrange(max(1, len(raw))) :]
    cuts = sorted(rng.sample(range(len(raw) + 1), min(len(raw), rng.choice((0, 0, 1, 3, 9)))))
    return [bytes(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)], whole


def _exchange(address: tuple[str, int], parts: list[bytes], whole: bool, rng: random.Random) -> str:
    """How it ended: the statuses of all answers, or ``closed``."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = b""
        try:
            for part in parts:
                sock.sendall(part)
            if whole:
                while b"\r\n\r\n" not in answer:
                    answer += _read(sock)
            elif rng.random() < 0.3:
                return "left"
            sock.shutdown(socket.SHUT_WR)
            while more := sock.recv(1 << 16):
                answer += more
        except TimeoutError:
            raise
        except OSError:  # the service has ended the connection: what it said before counts
            pass
    statuses = [int(line[9:12]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(status < 500 for status in statuses), (parts, answer[:2000])
    assert not whole or statuses, parts
    return " ".join(map(str, statuses)) or "closed"


def _read(sock: socket.socket) -> bytes:
    part = sock.recv(1 << 16)
    if not part:
        raise ConnectionResetError
    return part
