"""Log lines, request ids, the bind guard, and clients that stall."""

from __future__ import annotations

import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dgpp_core.config.settings import HttpSettings
from dgpp_core.server import http
from dgpp_core.server.access import exposure
from dgpp_core.server.keys import hashed
from dgpp_core.server.logs import REQUEST_ID, LogFormat, set_up


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    found = logging.getLogger()
    handlers, level = list(found.handlers), found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def lines(root: logging.Logger, form: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up(form, level, stream)
    return stream


def test_json_lines_have_ids_fields_and_tracebacks(root: logging.Logger) -> None:
    stream = lines(root, "json")
    token = REQUEST_ID.set("req-7")
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        logging.getLogger("dgpp.server").error("no %s", "good", exc_info=error)
    REQUEST_ID.reset(token)
    logging.getLogger("dgpp.server").debug("not shown")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert (found["level"], found["logger"], found["message"]) == ("error", "dgpp.server", "no good")
    assert found["request_id"] == "req-7"
    assert "ValueError: a\nb" in found["error"]


def test_text_lines_have_the_request_id(root: logging.Logger) -> None:
    stream = lines(root, "text", "warn")
    token = REQUEST_ID.set("req-7")
    logging.getLogger("x").warning("careful")
    REQUEST_ID.reset(token)
    logging.getLogger("x").warning("again")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING x: [req-7] careful")
    assert second.endswith("WARNING x: again")


def test_every_request_has_a_line_with_its_id(root: logging.Logger, serve_fake: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"sha256:{hashed(b'open sesame').hex()} ali\n")
    stream = lines(root, "json")
    with (
        serve_fake(http=HttpSettings(api_key_file=str(tmp_path / "keys"))) as running,
        httpx.Client(base_url=running.url, headers={"x-api-key": "open sesame"}) as client,
    ):
        body = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "stream": True}
        reply = client.post("/v1/chat/completions", json=body)
        bad = client.post("/v1/chat/completions", json=body | {"temperature": 9}, headers={"x-request-id": "mine.1"})
        odd = client.get("/nowhere?secret=1", headers={"x-request-id": "no good"})
        client.get("/health")
        client.get("/v1/models", headers={"x-api-key": "wrong"})
    ours = [line for line in stream.getvalue().splitlines() if '"logger":"dgpp.' in line]
    found = [json.loads(line) for line in ours]
    access = sorted((line for line in found if line["logger"] == "dgpp.access"), key=lambda line: line["status"])
    assert [(line["method"], line["path"], line["status"], line.get("key")) for line in access] == [
        ("POST", "/v1/chat/completions", 200, "ali"),
        ("POST", "/v1/chat/completions", 400, "ali"),
        ("GET", "/v1/models", 401, None),
        ("GET", "/nowhere", 404, None),
    ]
    first, second, _, third = access
    assert first["reply"] == reply.headers["x-request-id"]
    assert first["reply"].startswith("chatcmpl-")
    assert first["bytes_out"] == len(reply.content)
    assert second["request_id"] == bad.headers["x-request-id"] == "mine.1"
    assert third["request_id"] == odd.headers["x-request-id"]
    assert third["request_id"].startswith("req-")
    (request,) = [line for line in found if line["logger"] == "dgpp.request"]
    assert request["request_id"] == first["request_id"]
    assert (request["id"], request["finish"], request["cached"]) == (first["reply"], "stop", 0)
    assert 0 <= request["first_ms"] <= request["total_ms"] <= first["duration_ms"] + 5
    assert not [line for line in ours if "sesame" in line or "secret" in line]


@pytest.mark.parametrize(
    ("host", "file", "said"),
    [("127.0.0.1", "", ""), ("127.9.9.9", "", ""), ("0.0.0.0", "", "without API keys"),
     ("192.168.1.5", "", "without API keys"), ("0.0.0.0", "keys", "without TLS"), ("127.0.0.1", "keys", ""),
     ("::1", "", ""), ("::", "", "listens on [::]:18080"), ("fd00::1", "keys", "without TLS")],
)  # fmt: skip
def test_what_is_exposed_is_said(host: str, file: str, said: str) -> None:
    warnings = exposure(HttpSettings(bind_host=host, api_key_file=file))
    assert len(warnings) == bool(said)
    if said:
        assert said in warnings[0]
        assert host in warnings[0]
        assert "127.0.0.1" in warnings[0] or file


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([HEAD], 408),
        ([HEAD[:20]], 408),
        ([HEAD, b"x: 1\r\n", b"y: 2\r\n", b"z: 3\r\n"], 408),
        ([HEAD + b"\r\n{"], 408),
        ([b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD], 200),
    ],
)
def test_a_client_that_stalls_is_told_and_closed(
    serve_fake: Any, monkeypatch: pytest.MonkeyPatch, parts: list[bytes], status: int
) -> None:
    """A request that never becomes whole must not hold one of the few connections for ever."""
    monkeypatch.setitem(http.http_server.__kwdefaults__, "request_s", 0.6)
    with serve_fake() as running, socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as held:
        held.settimeout(10)
        for part in parts:
            held.sendall(part)
            time.sleep(0.25)
        answer = b""
        while data := held.recv(65536):
            answer += data
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1 + (status == 200)
    assert b"stopped arriving" in answer


def test_a_slow_body_is_waited_for_while_it_comes(serve_fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(http.http_server.__kwdefaults__, "request_s", 1.5)
    body = json.dumps({"model": "fake", "prompt": "colors"}).encode()
    assert len(body) / 4 * 0.25 > 1.5

    def slowly() -> Iterator[bytes]:
        for at in range(0, len(body), 4):
            time.sleep(0.25)
            yield body[at : at + 4]

    with serve_fake() as running:
        assert httpx.post(running.url + "/v1/completions", content=slowly(), timeout=30).status_code == 200
