"""2,000 damaged request bodies: no 5xx, no hang, and a known request still gets its known answer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

CHAT: dict[str, Any] = {
    "model": "fake", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "colors"}],
    "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2,
    "stop": ["x", "yz"], "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.5},
    "stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": True},
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": "fake", "prompt": "colors", "max_tokens": 20, "temperature": 0.5, "logprobs": 2, "stop": "x",
    "stream": False, "logit_bias": {"5": 1.5}, "seed": -3,
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.5, 1e300, -0.0, "", "x", "\x00", "\U0010ffff",
    "é" * 500, [], {}, [[]], [None], {"": None}, {"type": "text"}, [{"type": "text", "text": "x"}], ["x"] * 40,
    {"role": "user"},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in ``value``."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def change_values(body: dict[str, Any], generator: random.Random) -> bytes:
    """One to three values replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(generator.randint(1, 3)):
        *path, key = generator.choice([path for path in places(body) if path])
        parent = body
        for step in path:
            parent = parent[step]
        if generator.random() < 0.2:
            del parent[key]
        elif generator.random() < 0.1 and isinstance(parent, dict):
            parent[generator.choice(["tools", "tool_choice", "response_format", "n", "zzz"])] = generator.choice(ODD)
        else:
            parent[key] = copy.deepcopy(generator.choice(ODD))
    return json.dumps(body, ensure_ascii=generator.random() < 0.5).encode()


def change_bytes(body: dict[str, Any], generator: random.Random) -> bytes:
    """Bytes replaced, removed, inserted or cut off."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(raw))
        kind = generator.randrange(4)
        if kind == 0:
            raw[at] = generator.randrange(256)
        elif kind == 1:
            del raw[at : at + generator.randint(1, 10)]
        elif kind == 2:
            raw[at:at] = generator.choice([b'"', b"{", b"[", b"}", b"\\", b"\\ud800", b",", b"1e999", b"\xff", b"\x00"])
        else:
            del raw[max(at, 1) :]
    return bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_mutated_bodies(fake: Any, shard: int) -> None:
    generator = random.Random(shard)
    accepted = 0
    with httpx.Client(base_url=fake.url, timeout=30) as client:
        known = client.post("/v1/chat/completions", json=KNOWN).json()["choices"]
        for _ in range(500):
            route, body = generator.choice([("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
            raw = generator.choice([change_values, change_bytes])(body, generator)
            response = client.post(route, content=raw)
            assert response.status_code in (200, 400, 404), (raw, response.text)
            if response.status_code == 200:
                accepted += 1
                assert '"error"' not in response.text, raw
            else:
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"], (raw, error)
        assert client.post("/v1/chat/completions", json=KNOWN).json()["choices"] == known
    assert 0 < accepted < 500
    fake.await_idle()


KNOWN = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "logprobs": True, "top_logprobs": 2}
