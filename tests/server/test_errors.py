"""Every error a client can reach, with its status, type, param and code."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest

from dgpp_core.config.settings import HttpSettings
from dgpp_core.testing.fake_worker import FakeFault, FakeScript

USER = [{"role": "user", "content": "colors"}]
NESTED: Any = 0
for _ in range(256):
    NESTED = [NESTED]


def check(response: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    """The response is the error object with these members; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = body["error"].pop("message")
    assert body["error"] == {"type": kind, "param": param, "code": code}
    assert isinstance(message, str)
    assert message
    return str(message)


FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "messages", None),
    ({"messages": []}, "messages", None),
    ({"messages": "hello"}, "messages", None),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", None),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
     "unsupported_content_type"),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].file", None),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type",
     "unsupported_content_type"),
    ({"model": None}, "model", None),
    ({"model": 5}, "model", None),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": 2**63}, "max_tokens", None),
    ({"max_tokens": "5"}, "max_tokens", None),
    ({"max_tokens": 1.5}, "max_tokens", None),
    ({"max_tokens": True}, "max_tokens", None),
    ({"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens", None),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", None),
    ({"temperature": 2.1}, "temperature", None),
    ({"temperature": -0.1}, "temperature", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"temperature": True}, "temperature", None),
    ({"top_p": 1.1}, "top_p", None),
    ({"top_k": -1}, "top_k", None),
    ({"min_p": 2}, "min_p", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"repetition_penalty": 101}, "repetition_penalty", None),
    ({"presence_penalty": 3}, "presence_penalty", None),
    ({"frequency_penalty": -3}, "frequency_penalty", None),
    ({"seed": 2**63}, "seed", None),
    ({"seed": 1.5}, "seed", None),
    ({"logprobs": 1}, "logprobs", None),
    ({"top_logprobs": 3}, "top_logprobs", None),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs", None),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", None),
    ({"n": 0}, "n", None),
    ({"n": 129}, "n", None),
    ({"n": 100}, "n", None),
    ({"stop": ""}, "stop", None),
    ({"stop": []}, "stop", None),
    ({"stop": ["a", ""]}, "stop[1]", None),
    ({"stop": ["a"] * 5}, "stop", None),
    ({"stop": 5}, "stop", None),
    ({"logit_bias": {"99999999": 5}}, "logit_bias", None),
    ({"logit_bias": {"-1": 5}}, "logit_bias", None),
    ({"logit_bias": {"x": 5}}, "logit_bias", None),
    ({"logit_bias": {"1": 5, "01": 5}}, "logit_bias", None),
    ({"logit_bias": {"0000000000001": 5}}, "logit_bias", None),
    ({"logit_bias": {"1": 101}}, "logit_bias", None),
    ({"logit_bias": {"1": "5"}}, "logit_bias", None),
    ({"logit_bias": []}, "logit_bias", None),
    ({"stream": "yes"}, "stream", None),
    ({"stream_options": {}}, "stream_options", None),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", None),
    ({"stream": True, "stream_options": {"fast": True}}, "stream_options.fast", "unsupported_parameter"),
    ({"stream": True, "stream_options": []}, "stream_options", None),
    ({"ignore_eos": None}, "ignore_eos", None),
    ({"prefix_cache": None}, "prefix_cache", None),
    ({"sse_ping_interval": None}, "sse_ping_interval", None),
    ({"sse_ping_interval": 5}, "sse_ping_interval", None),
    ({"sse_ping_interval": 0, "stream": True}, "sse_ping_interval", None),
    ({"sse_ping_interval": -2, "stream": True}, "sse_ping_interval", None),
    ({"store": True}, "store", "invalid_parameter"),
    ({"store": "no"}, "store", "invalid_parameter"),
    ({"user": 5}, "user", "invalid_parameter"),
    ({"safety_identifier": "x" * 65}, "safety_identifier", "invalid_parameter"),
    ({"metadata": {"a": 5}}, "metadata", "invalid_parameter"),
    ({"metadata": {"a" * 65: "x"}}, "metadata", "invalid_parameter"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_parameter"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata", "invalid_parameter"),
    ({"service_tier": "flex"}, "service_tier", None),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"web_search_options": None}, "web_search_options", "unsupported_parameter"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"prompt_cache_options": {}}, "prompt_cache_options", "unsupported_parameter"),
    ({"audio": {}}, "audio", "unsupported_parameter"),
    ({"prediction": {}}, "prediction", "unsupported_parameter"),
    ({"moderation": {}}, "moderation", "unsupported_parameter"),
    ({"prompt_cache_key": "a"}, "prompt_cache_key", "unsupported_parameter"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "unsupported_parameter"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools_unsupported"),
    ({"tools": 5}, "tools", None),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", None),
    ({"response_format": {"type": "json_object"}}, "response_format", "constrained_decoding_unsupported"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", None),
    ({"reasoning_effort": "huge"}, "reasoning_effort", None),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking", None),
    ({"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs.mood", "unsupported_parameter"),
    ({"chat_template_kwargs": {"clear_thinking": True}}, "chat_template_kwargs.clear_thinking",
     "unsupported_parameter"),
    ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, "chat_template_kwargs.thinking", None),
    ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "chat_template_kwargs", None),
    ({"messages": NESTED}, "body", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), FIELDS, ids=lambda value: json.dumps(value)[:60])
def test_bad_chat_field(fake: Any, fields: dict[str, Any], param: str, code: str | None) -> None:
    message = check(fake.chat(**fields), 400, param, code)
    assert param.split("[")[0].split(".")[0] in message


LEGACY: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "prompt", None),
    ({"prompt": ["a", "b"]}, "prompt", None),
    ({"prompt": [1, 2]}, "prompt", None),
    ({"prompt": ""}, "prompt", None),
    ({"logprobs": 6}, "logprobs", None),
    ({"logprobs": True}, "logprobs", None),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"top_logprobs": 1}, "top_logprobs", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", None),
    ({"max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
]


@pytest.mark.parametrize(("fields", "param", "code"), LEGACY, ids=lambda value: json.dumps(value)[:60])
def test_bad_completion_field(fake: Any, fields: dict[str, Any], param: str, code: str | None) -> None:
    check(fake.complete(**fields), 400, param, code)


BODIES = [b"", b"{", b"[]", b"5", b'"text"', b"\xff\xfe{}", b'{"model":"fake","messages":[NaN]}',
          b'{"model":"fake","messages":[{"role":"user","content":"\\ud83d"}]}', b"[" * 100_000,
          b'{"model":"fake","max_tokens":' + b"9" * 5000 + b"}"]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:30]))
def test_bad_body(fake: Any, body: bytes) -> None:
    check(httpx.post(fake.url + "/v1/chat/completions", content=body), 400, "body", None)


def test_no_model(fake: Any) -> None:
    check(httpx.post(fake.url + "/v1/chat/completions", json={"messages": USER}), 400, "model", None)


@pytest.mark.parametrize("key", ["model", "temperature", "chat_template_kwargs"])
def test_duplicate_key(fake: Any, key: str) -> None:
    body = f'{{"model":"fake","messages":[],"{key}":null,"{key}":null}}'
    response = httpx.post(fake.url + "/v1/chat/completions", content=body)
    check(response, 400, key, "invalid_parameter")


def test_duplicate_key_in_template_kwargs(fake: Any) -> None:
    body = '{"model":"fake","messages":[],"chat_template_kwargs":{"thinking":true,"thinking":true}}'
    check(httpx.post(fake.url + "/v1/chat/completions", content=body), 400, "thinking", "invalid_parameter")


def test_other_model(fake: Any) -> None:
    check(fake.chat(model="other"), 404, "model", "model_not_found")
    check(fake.complete(model="other"), 404, "model", "model_not_found")
    check(httpx.get(fake.url + "/v1/models/other"), 404, "model", "model_not_found")


@pytest.mark.parametrize("path", ["/v1", "/v1/batches", "/v1/embeddings", "/v1/chat"])
def test_unknown_route(fake: Any, path: str) -> None:
    message = check(httpx.post(fake.url + path, json={}), 404, None, None)
    assert "POST" in message
    assert path in message


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/chat/completions"), ("DELETE", "/v1/completions"), ("POST", "/v1/models"), ("PUT", "/health"),
     ("POST", "/metrics"), ("POST", "/v1/models/fake"), ("POST", "/"), ("POST", "/page/main.js"),
     ("PUT", "/v1/files"), ("POST", "/v1/files/x"), ("DELETE", "/v1/files/x/content")],
)  # fmt: skip
def test_wrong_method(fake: Any, method: str, path: str) -> None:
    check(httpx.request(method, fake.url + path), 405, None, None)


@pytest.mark.parametrize("chunked", [False, True])
def test_body_limit(serve_fake: Any, chunked: bool) -> None:
    content: Any = iter([b"{" + b" " * 3000, b" " * 3000 + b"}"]) if chunked else b" " * 5000
    with serve_fake(http=HttpSettings(max_body_bytes=4096)) as running:
        response = httpx.post(running.url + "/v1/chat/completions", content=content)
        message = check(response, 413, None, "request_too_large")
    assert "http.max_body_bytes" in message
    assert "4096" in message


def test_chunked_request_bodies_are_taken(fake: Any) -> None:
    body = json.dumps({"model": "fake", "messages": USER}).encode()
    response = httpx.post(fake.url + "/v1/chat/completions", content=iter([body[:20], body[20:]]))
    assert response.json()["choices"][0]["message"]["content"] == "Red, yellow and blue."


def test_too_long_a_stream_is_refused_before_its_headers(fake: Any) -> None:
    """sgl-project/sglang#12081: a prompt that is too long got 200, with the error in the stream."""
    long = [{"role": "user", "content": "word " * 5000}]
    message = check(fake.chat(messages=long, stream=True), 400, "max_tokens", "context_length_exceeded")
    assert "4096" in message


def test_explicit_limit_is_not_clamped_and_the_default_is(serve_fake: Any) -> None:
    """paiml/aprender#665: a limit above the context hung."""
    with serve_fake(FakeScript(context_tokens=64), default_max_tokens=1000) as running:
        prompt = running.chat().json()["usage"]["prompt_tokens"]
        assert running.messages("submit")[0]["max_tokens"] == 64 - prompt
        assert running.chat(max_tokens=64 - prompt).status_code == 200
        check(running.chat(max_tokens=65 - prompt), 400, "max_tokens", "context_length_exceeded")


def test_overload(serve_fake: Any) -> None:
    with serve_fake(FakeScript(slots=1, prefill_ms=60_000), queue_limit=2) as running:
        with httpx.Client(base_url=running.url) as client, client.stream(
            "POST", "/v1/chat/completions", json={"model": "fake", "messages": USER, "n": 3, "stream": True}
        ) as held:  # fmt: skip
            assert held.status_code == 200
            response = running.chat()
            check(response, 503, None, "overloaded")
            assert response.headers["retry-after"] == "1"
            check(running.chat(n=4), 400, "n", None)
            assert running.metrics()["service"]["requests_shed"] == 1
        running.await_idle()


def test_one_failed_request_leaves_the_others(serve_fake: Any) -> None:
    fault = FakeFault(kind="error", after_tokens=1)
    with serve_fake(FakeScript(fault=fault, step_ms=5)) as running:
        check(running.chat(), 503, None, "engine_failure")
        assert running.chat().status_code == 200


def test_connection_limit(serve_fake: Any) -> None:
    with serve_fake(max_connections=3) as running:
        port = int(running.url.rpartition(":")[2])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for _ in range(2):
            check(httpx.get(running.url + "/health"), 503, None, "overloaded")
        for connection in held:
            connection.close()
        for _ in range(200):
            if httpx.get(running.url + "/health").status_code == 200:
                break
        else:
            pytest.fail("closed connections still count")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 400_000, 431),
    ],
)
def test_broken_http(fake: Any, request_bytes: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", int(fake.url.rpartition(":")[2]))) as connection:
        connection.settimeout(20)

        def send() -> None:
            connection.sendall(request_bytes)

        sender = threading.Thread(target=send)
        sender.start()
        answer = b""
        while part := connection.recv(65536):
            answer += part
        sender.join()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "host", [b": application/json", b"[", b"x:99999", b"x:y", b"x@y:z", b"a b", b"//", b"x\r\nHost: y"]
)
@pytest.mark.parametrize("line", [b"GET /health", b"GET /nope", b"POST /v1/messages", b"GET /page.js"])
def test_a_host_that_is_none_is_refused(fake: Any, host: bytes, line: bytes) -> None:
    """An address made of it would be none, and asking for its path a fault of ours."""
    answer = raw_answer(fake, line + b" HTTP/1.1\r\nHost: " + host + b"\r\nContent-Length: 0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) == 400
    assert "Host" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("host", [b"", b"x", b"x:", b"x:65535", b"[::1]:80", b"127.0.0.1:18080", b"a_b.example", None])
def test_other_hosts_are_served(fake: Any, host: bytes | None) -> None:
    line = b"" if host is None else b"Host: " + host + b"\r\n"
    for path, status in ((b"/health", 200), (b"/nope", 404), (b"/%5bx", 404)):
        answer = raw_answer(fake, b"GET " + path + b" HTTP/1.1\r\n" + line + b"Connection: close\r\n\r\n")
        assert int(answer.split()[1]) == status


def raw_answer(fake: Any, request: bytes) -> bytes:
    """What comes for these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", int(fake.url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_rejects_are_counted(fake: Any) -> None:
    before = fake.metrics()["service"]["rejects_bad"]
    fake.chat(temperature=3)
    assert fake.metrics()["service"]["rejects_bad"] == before + 1
