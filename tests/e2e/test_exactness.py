"""Over HTTP a reply is the same in every company, from the prefix cache or not, streamed or whole, up to the limit."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

LONG = "".join(f"{number} bottles stand on the wall. " for number in range(200))
PICKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 2026},
    "penalised": {"temperature": 0.7, "seed": 5, "presence_penalty": 0.8, "repetition_penalty": 1.2, "min_p": 0.02},
}


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 80, "ignore_eos": True} | fields


def texts(reply: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


def cached(reply: dict[str, Any]) -> int:
    found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def streamed(running: Any, **fields: Any) -> str:
    """The text of a streamed reply."""
    request = {"model": running.model, "stream": True} | fields
    with httpx.stream("POST", running.url + "/v1/chat/completions", json=request, timeout=60) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in data[:-1])


def in_company(running: Any, request: dict[str, Any], **company: Any) -> dict[str, Any]:
    """The reply to ``request`` while seven others of different lengths run."""
    others = [body(LONG[: 90 * n], max_tokens=150, temperature=1.0, seed=n, **company) for n in range(1, 8)]
    with ThreadPoolExecutor(8) as pool:
        before = running.metrics()["scheduler"]
        waiting = [pool.submit(running.post, "chat/completions", **other) for other in others]
        reply: dict[str, Any] = running.post("chat/completions", **request)
        for other in waiting:
            other.result()
    running.await_idle()
    after = running.metrics()["scheduler"]
    assert after["decode_rows"] - before["decode_rows"] > 2 * (after["decode_steps"] - before["decode_steps"])
    return reply


@pytest.mark.slow
@pytest.mark.parametrize("pick", PICKS)
def test_one_reply_however_it_is_asked_for(tiny: Any, pick: str) -> None:
    request = body(f"{pick}: " + LONG[:700], **PICKS[pick])
    cold = request | {"prefix_cache": False}
    (alone,) = texts(tiny.post("chat/completions", **cold))
    assert len(alone) > 40
    assert texts(in_company(tiny, cold, prefix_cache=False)) == [alone]
    assert texts(tiny.post("chat/completions", **request)) == [alone]
    hit = tiny.post("chat/completions", **request)
    assert cached(hit) > 0
    assert texts(hit) == [alone]
    company = in_company(tiny, request)
    assert cached(company) > 0
    assert texts(company) == [alone]
    assert streamed(tiny, **request) == alone
    assert streamed(tiny, **cold) == alone
    four = texts(tiny.post("chat/completions", **request, n=4))
    assert four[0] == alone
    assert len(set(four)) == (1 if pick == "greedy" else 4)


@pytest.mark.slow
def test_a_long_prompt_is_cached(tiny: Any) -> None:
    def ask() -> dict[str, Any]:
        reply: dict[str, Any] = tiny.post("completions", prompt="Once: " + LONG[:1560], max_tokens=20, temperature=0)
        return reply

    first, second = ask(), ask()
    assert first["usage"]["prompt_tokens"] >= 1500
    assert cached(first) == 0
    assert cached(second) >= max(1400, first["usage"]["prompt_tokens"] - 64)  # all whole blocks
    assert second["choices"] == first["choices"]


@pytest.mark.slow
def test_up_to_the_context_limit_and_not_one_token_more(tiny: Any) -> None:
    context = httpx.get(tiny.url + "/v1/models").json()["data"][0]["context"]["request_limit_tokens"]
    request = {"prompt": LONG[:500], "temperature": 0, "ignore_eos": True}
    prompt = tiny.post("completions", **request, max_tokens=1)["usage"]["prompt_tokens"]
    reply = tiny.post("completions", **request, max_tokens=context - prompt)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == context
    over = request | {"model": tiny.model, "max_tokens": context - prompt + 1}
    refused = httpx.post(tiny.url + "/v1/completions", json=over, timeout=30)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    tiny.await_idle()
