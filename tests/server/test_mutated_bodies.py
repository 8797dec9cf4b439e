"""2,000 damaged request bodies: no 5xx, no hang, and a known request still gets its known answer."""

from __future__ import annotations

import copy
import json
import random
import re
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
RESPONSES: dict[str, Any] = {
    "model": "fake", "instructions": "Be brief.", "max_output_tokens": 20, "stream": True, "seed": 7, "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "metadata": {"a": "b"},
    "reasoning": {"effort": "high", "summary": "auto"}, "text": {"format": {"type": "text"}}, "store": False,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "colors"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "dgpp1.SG0u"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"a\": [1]}"},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "y"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "y"}]},
    ],
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "fake", "max_tokens": 2000, "system": [{"type": "text", "text": "Be brief."}], "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x", "yz"], "metadata": {"user_id": "u"},
    "output_config": {"effort": "high"}, "context_management": {"edits": [{"type": "clear_thinking_1", "keep": "all"}]},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "colors", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"a": [1]}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "y"}], "is_error": True},
        ]},
    ],
}  # fmt: skip
TOKENS: dict[str, Any] = {"model": "fake", "prompt": "colors", "add_special_tokens": True, "return_token_strs": True}
IDS: dict[str, Any] = {"tokens": [1, 2, 3]}
ROUTES = [
    ("/v1/chat/completions", CHAT), ("/v1/completions", TEXT), ("/v1/responses", RESPONSES),
    ("/v1/responses/input_tokens", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", TOKENS), ("/detokenize", IDS),
]  # fmt: skip
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
        *path, key = generator.choice([path for path in places(body) if path] or [("model",)])
        parent = body
        for step in path:
            parent = parent[step]
        if generator.random() < 0.2 and body:
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
        at = generator.randrange(max(len(raw) - 1, 1))
        kind = generator.randrange(4)
        if kind == 0:
            raw[at : at + 1] = bytes([generator.randrange(256)])
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
            route, body = generator.choice(ROUTES)
            raw = generator.choice([change_values, change_bytes])(body, generator)
            response = client.post(route, content=raw)
            assert response.status_code in (200, 400, 404), (raw, response.text)
            if response.status_code == 200:
                accepted += 1
                assert not re.search(r'"error":\{|event: error', response.text), raw
            elif route.startswith("/v1/messages"):
                assert response.json()["type"] == "error"
                assert response.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
            else:
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert error["param"], (raw, error)
        assert client.post("/v1/chat/completions", json=KNOWN).json()["choices"] == known
    assert 0 < accepted < 500
    fake.await_idle()


KNOWN = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "logprobs": True, "top_logprobs": 2}
