"""Clients that leave at every stage, damaged bodies: nothing stays behind and known answers stay known."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

KNOWN = {"prompt": "A known question " * 8, "max_tokens": 60, "temperature": 0.8, "seed": 11, "ignore_eos": True}
WORDS = (
    "sea",
    "calm",
    "that morning",
    "and",
    "a small",
    "boat",
    "came back",
    "with",
    "more fish",
    "than it could",
    "carry",
)
CANCELLED, CONCURRENCY = 0.3, 16

pytestmark = pytest.mark.slow


def known(running: Any) -> Any:
    """The known answer; the first time from the model, later also from the prefix cache."""
    return running.post("completions", **KNOWN)["choices"]


class Client:
    """Sends one random request after the other; the plan of each comes from its number alone."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client, self._model = client, model
        self.finished = self.left = 0

    async def one(self, number: int) -> None:
        """One request: finished, or left at a random stage."""
        draw = random.Random(number)
        stream, leaves = draw.random() < 0.5, draw.random() < CANCELLED
        path, body = self._body(draw, stream)
        try:
            async with asyncio.timeout(draw.choice([0.0, 0.02, 0.1, 0.3]) if leaves and not stream else None):
                lines_until = draw.choice([0, 1, 3, 20]) if leaves and stream else None
                await self._send(path, body, lines_until)
        except TimeoutError:
            self.left += 1

    def _body(self, draw: random.Random, stream: bool) -> tuple[str, dict[str, Any]]:
        prompt = " ".join(draw.choices(WORDS, k=draw.choice([1, 10, 60, 200])))
        body: dict[str, Any] = {
            "model": self._model, "stream": stream, "max_tokens": draw.randint(1, 80), "seed": draw.randint(0, 9),
            "temperature": draw.choice([0, 1.0]),
        }  # fmt: skip
        if draw.random() < 0.3:
            return "/v1/completions", body | {"prompt": prompt}
        return "/v1/chat/completions", body | {
            "messages": [{"role": "user", "content": prompt}], "n": draw.choice([1, 1, 1, 3]),
        }  # fmt: skip

    async def _send(self, path: str, body: dict[str, Any], lines_until: int | None) -> None:
        async with self._client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            text, lines = "", 0
            async for line in response.aiter_lines():
                text += line + "\n"
                lines += 1
                if lines_until is not None and lines > lines_until:
                    self.left += 1
                    return
        assert '"error"' not in text
        assert '"finish_reason":"' in text
        self.finished += 1


async def storm(running: Any, requests: int) -> Client:
    """So many requests, `CONCURRENCY` at a time."""
    limits = httpx.Limits(max_connections=CONCURRENCY)
    numbers = iter(range(requests))
    async with httpx.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:
        sender = Client(client, running.model)

        async def work() -> None:
            for number in numbers:
                await sender.one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())
    return sender


def storm_passes_without_a_trace(running: Any, requests: int) -> None:
    before = known(running)
    done = asyncio.run(storm(running, requests))
    assert done.finished + done.left == requests
    assert done.left >= 0.8 * CANCELLED * requests
    running.await_idle()
    assert set(running.held().values()) == {0}
    service = running.metrics()["service"]
    assert service["requests_cancelled"] >= done.left / 3  # the others left before they were in or after the end
    assert service["requests_failed"] == 0
    assert known(running) == before


def test_two_hundred_requests_of_which_a_third_leaves(serve_tiny: Any) -> None:
    """`benchmarks/soak.py` makes thousands of them."""
    with serve_tiny("--max-concurrency=8", "--kv-capacity=8192") as running:
        storm_passes_without_a_trace(running, 200)


def test_the_same_where_requests_grow_and_are_preempted(serve_tiny: Any) -> None:
    pool = ("--max-concurrency=8", "--kv-capacity=2048", "--block-tokens=16")
    with serve_tiny(*pool, "--admission=grow", "--admission-window=16") as running:
        storm_passes_without_a_trace(running, 80)
        assert running.metrics()["scheduler"]["requests_preempted"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_replies_that_nobody_reads_are_not_generated(tiny: Any, wait_for: Callable[..., None], stream: bool) -> None:
    tokens, clients = 900, 8
    before = tiny.metrics()["scheduler"]["tokens_generated"]

    async def ask() -> None:
        body = {"model": tiny.model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(base_url=tiny.url, timeout=120) as client, asyncio.TaskGroup() as group:
            posts = [group.create_task(client.post("/v1/completions", json=body)) for _ in range(clients)]
            await asyncio.to_thread(wait_for, lambda: tiny.metrics()["scheduler"]["active"] == clients)
            for post in posts:
                assert post.cancel()

    asyncio.run(ask())
    tiny.await_idle()
    generated = tiny.metrics()["scheduler"]["tokens_generated"] - before
    assert 0 < generated < tokens * clients / 2


ODD: list[Any] = [
    None, None, False, True, 1, -1, 0, 0.5, 10**30, 1e300, "", "\x00", "x" * 3000, [], [None], {}, {"": None}, ["x"] * 9
]  # fmt: skip


def damaged(draw: random.Random) -> tuple[str, bytes]:
    """A request's path, and its body with values or bytes changed."""
    shared = {"model": "tiny", "max_tokens": 12, "temperature": 0.5, "seed": 3, "top_k": 5, "stop": ["zz"]}
    chat = {"messages": [{"role": "user", "content": "colors"}], "n": 2, "logprobs": True, "top_logprobs": 2}
    path, body = draw.choice(
        [("/v1/chat/completions", shared | chat), ("/v1/completions", shared | {"prompt": "colors", "logprobs": 2})]
    )
    if draw.random() < 0.5:
        body[draw.choice(sorted(body))] = draw.choice(ODD)
        body["stream"] = draw.random() < 0.3
        return path, json.dumps(body).encode()
    raw = bytearray(json.dumps(body).encode())
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(raw))
        raw[at : at + draw.randint(0, 4)] = draw.choice([b"", b'"', b"}", b"[", b"\\ud800", b"\xff", b"\x00", b"9"])
    return path, bytes(raw)


def test_two_hundred_damaged_bodies(tiny: Any, wait_for: Callable[..., None]) -> None:
    before = known(tiny)
    seen: list[int] = []
    with httpx.Client(base_url=tiny.url, timeout=60) as client:
        for number in range(200):
            path, raw = damaged(random.Random(number))
            response = client.post(path, content=raw)
            assert response.status_code in (200, 400, 404), (raw, response.text)
            assert ('"error"' in response.text) == (response.status_code != 200), (raw, response.text)
            seen.append(response.status_code)
    assert seen.count(200) > 5
    assert seen.count(400) > 50
    wait_for(lambda: not any(tiny.held().values()))
    assert known(tiny) == before
