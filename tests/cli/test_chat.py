"""``dgpp serve`` and ``dgpp chat`` together as a user has them, and the client against services that misbehave."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dgpp_core.api import ConfigError, DgppError, RequestError
from dgpp_core.cli.chat import Chat
from dgpp_core.cli.client import Client, Piece
from dgpp_core.host.child import module_command

START_S = 120
LINE = [sys.executable, "-m", "dgpp_core.cli"]


def environ(toy_package: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(toy_package), "OMP_NUM_THREADS": "1"}


def wait_for(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stdout.readline()
        if not line or word in line:
            return line
    return ""


@pytest.fixture(scope="module")
def service(toy_package: Path, toy_checkpoint: Path) -> Iterator[str]:
    """The URL of a running `dgpp serve`; it must end orderly at SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve = ("serve", "--plugin=toy", f"--checkpoint={toy_checkpoint}", f"--port={port}", "--model-alias=toy")
    line = module_command("dgpp_core.cli", *serve)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environ(toy_package))
    try:
        assert wait_for(process, "READY").startswith("READY")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0


def chat(toy_package: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LINE, "chat", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env=environ(toy_package),
        timeout=START_S,
    )


GREEDY = ("--temperature=0", "--max-tokens=12")


@pytest.mark.slow
def test_streamed_whole_and_printed_replies_are_one(toy_package: Path, service: str) -> None:
    client = Client(service + "/v1")
    assert client.model() == "toy"
    body = Chat(client, None, {"temperature": 0, "max_tokens": 12}).body("hello")
    whole = client.complete(body)["choices"][0]["message"]["content"]
    pieces = list(client.stream(body))
    assert "".join(piece.text for piece in pieces) == whole
    assert [piece.finish for piece in pieces if piece.finish] == ["length"]
    printed = chat(toy_package, f"--url={service}", "--message=hello", *GREEDY)
    assert (printed.returncode, printed.stdout) == (0, whole + "\n")
    assert "cut off" in printed.stderr
    as_json = chat(toy_package, f"--url={service}", "--message=hello", "--json", *GREEDY)
    assert json.loads(as_json.stdout)["choices"][0]["message"]["content"] == whole


@pytest.mark.slow
def test_a_conversation_remembers_and_forgets(toy_package: Path, service: str) -> None:
    done = chat(toy_package, f"--url={service}", *GREEDY, text="hello\nhello\n/reset\nhello\n\n/exit\nnever\n")
    assert done.returncode == 0, done.stderr
    first, second, third = (reply for reply in done.stdout.split("> ") if reply)
    assert first == third
    assert first != second


@pytest.mark.slow
def test_a_refused_request_is_printed_and_the_chat_goes_on(toy_package: Path, service: str) -> None:
    done = chat(toy_package, f"--url={service}", "--temperature=9", text="hello\n/exit\n")
    assert done.returncode == 0
    assert "error:" in done.stderr
    assert "temperature" in done.stderr
    once = chat(toy_package, f"--url={service}", "--temperature=9", "--message=hello")
    assert once.returncode == 1
    assert "temperature" in once.stderr


@pytest.mark.slow
def test_chat_can_start_its_own_service(toy_package: Path, toy_checkpoint: Path) -> None:
    done = chat(toy_package, "--plugin=toy", f"--checkpoint={toy_checkpoint}", "--message=hello", *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_service_that_cannot_start_is_reported(toy_package: Path) -> None:
    done = chat(toy_package, "--plugin=toy", "--checkpoint=/nowhere", "--message=hello")
    assert done.returncode == 2
    assert "neither a folder nor" in done.stderr
    assert "the service did not start" in done.stderr


def test_a_start_and_a_url_exclude_each_other(toy_package: Path) -> None:
    assert chat(toy_package, "--plugin=toy", "--url=http://127.0.0.1:1").returncode == 2
    assert chat(toy_package, "--url=http://127.0.0.1:1", "--json").returncode == 2


# The client against services that misbehave.

Serve = Callable[[int, bytes], Client]


@pytest.fixture
def answering() -> Iterator[Serve]:
    """A client of a service that answers everything with one status and body, and then closes."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> Client:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return Client(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def chunk(text: str, finish: str | None = None) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def test_comments_and_reasoning_are_understood(answering: Serve) -> None:
    thinking = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]}
    usage = 'data: {"choices": [], "usage": {}}\n\n'
    stream = (
        f": ping\n\ndata: {json.dumps(thinking)}\n\n{chunk('ä')}: ping\n\n{chunk('', 'stop')}{usage}data: [DONE]\n\n"
    )
    pieces = list(answering(200, stream.encode()).stream({}))
    assert pieces == [Piece(reasoning="hm"), Piece("ä"), Piece("", "", "stop")]


def test_an_error_in_the_stream_is_raised_after_what_came(answering: Serve) -> None:
    stream = chunk("a") + 'data: {"error": {"message": "the engine failed"}}\n\ndata: [DONE]\n\n'
    pieces = answering(200, stream.encode()).stream({})
    assert next(pieces) == Piece("a")
    with pytest.raises(DgppError, match="the engine failed"):
        next(pieces)


def test_a_stream_that_ends_early_is_an_error(answering: Serve) -> None:
    pieces = answering(200, chunk("a").encode()).stream({})
    assert next(pieces) == Piece("a")
    with pytest.raises(DgppError) as caught:
        next(pieces)
    assert caught.value.found == "the stream ended early"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "no such model", "param": "model", "code": "model_not_found"}}', "no such model"),
        (b"<html>", "the service answered with status 404"),
        (b'{"error": "x"}', "the service answered with status 404"),
    ],
)
def test_a_refusal_carries_the_services_words(answering: Serve, body: bytes, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        answering(404, body).complete({})
    assert caught.value.status == 404


def test_no_service_is_an_error_that_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(DgppError) as caught:
        Client(f"http://127.0.0.1:{port}").model()
    assert "dgpp serve" in caught.value.hint


@pytest.mark.parametrize("url", ["127.0.0.1:1", "https://x", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        Client(url)
