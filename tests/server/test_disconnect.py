"""Clients that leave at every stage: exactly one Cancel a choice, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from typing import Any

import pytest

from dgpp_core.testing.fake_worker import FakeReply, FakeScript

LONG = FakeScript(replies=(FakeReply(text="blue " * 2000),), step_ms=5, slots=2)


def send(running: Any, *, stream: bool, path: str = "/v1/chat/completions", **fields: Any) -> socket.socket:
    """A request on a connection of its own, sent and not yet answered."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "colors"}], "stream": stream} | fields
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=20)
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(raw))
    connection.sendall(head + raw)
    return connection


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_decoding(serve_fake: Any, wait_for: Any, stream: bool, path: str) -> None:
    limits = {"input": "colors", "max_output_tokens": 4000} if path == "/v1/responses" else {"max_tokens": 4000}
    with serve_fake(LONG) as running:
        connection = send(running, stream=stream, path=path, **limits)
        wait_for(lambda: running.metrics()["scheduler"]["tokens_generated"] > 5)
        if stream:
            assert b"200 OK" in connection.recv(4096)
        connection.close()
        running.await_idle()
        assert [message["id"] for message in running.messages("cancel")] == [0]
        assert running.metrics()["service"]["requests_cancelled"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_prefilling(serve_fake: Any, wait_for: Any, stream: bool) -> None:
    with serve_fake(FakeScript(prefill_ms=60_000)) as running:
        connection = send(running, stream=stream)
        wait_for(lambda: running.metrics()["scheduler"]["prefilling"] == 1)
        connection.close()
        running.await_idle()
        assert [message["id"] for message in running.messages("cancel")] == [0]


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue(serve_fake: Any, wait_for: Any, stream: bool) -> None:
    with serve_fake(FakeScript(prefill_ms=60_000, slots=1)) as running:
        first = send(running, stream=True)
        running.await_messages("submit", 1)
        queued = send(running, stream=stream)
        wait_for(lambda: running.metrics()["scheduler"]["queued"] == 1)
        queued.close()
        assert [message["id"] for message in running.await_messages("cancel", 1)] == [1]
        wait_for(lambda: running.metrics()["scheduler"]["queued"] == 0)
        first.close()
        running.await_idle()
        assert [message["id"] for message in running.messages("cancel")] == [1, 0]


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_cancels_every_choice(serve_fake: Any, stream: bool) -> None:
    with serve_fake(FakeScript(prefill_ms=60_000, slots=2)) as running:
        connection = send(running, stream=stream, n=5)
        running.await_messages("submit", 5)
        connection.close()
        running.await_idle()
        assert sorted(message["id"] for message in running.messages("cancel")) == [0, 1, 2, 3, 4]
        assert running.metrics()["service"]["requests_cancelled"] == 1


@pytest.mark.parametrize("stream", [True, False])
def test_half_closed_connections_have_left(serve_fake: Any, stream: bool) -> None:
    with serve_fake(FakeScript(prefill_ms=60_000)) as running:
        connection = send(running, stream=stream)
        running.await_messages("submit", 1)
        connection.shutdown(socket.SHUT_WR)
        running.await_idle()
        assert len(running.messages("cancel")) == 1


def test_no_cancel_after_a_normal_end(fake: Any) -> None:
    """ROCm/ATOM#1589: an abort for every reply that had ended by itself."""
    before = len(fake.messages("cancel"))
    for stream in (True, False):
        assert fake.chat(stream=stream, n=2).status_code == 200
        assert fake.complete(stream=stream).status_code == 200
    fake.await_idle()
    assert len(fake.messages("cancel")) == before


def test_a_reader_that_is_too_slow_and_then_leaves(serve_fake: Any, wait_for: Any) -> None:
    script = FakeScript(replies=(FakeReply(text="blue " * 3000),), context_tokens=100_000, slots=1)
    with serve_fake(script) as running:
        connection = send(running, stream=True, max_tokens=90_000, ignore_eos=True)
        wait_for(lambda: running.metrics()["scheduler"]["tokens_generated"] > 5_000)
        connection.close()
        running.await_idle()
        assert running.chat(max_tokens=2).status_code == 200


@pytest.mark.slow
def test_many_requests_a_third_of_which_leave(serve_fake: Any) -> None:
    """Atlas#368: slots held for ever by clients that had left."""
    generator = random.Random(5)
    script = FakeScript(step_ms=1, prefill_ms=5, slots=4)
    served: list[int] = []

    def work(plans: list[tuple[bool, bool]]) -> None:
        for stream, leaves in plans:
            if leaves:
                connection = send(running, stream=stream, max_tokens=200, ignore_eos=True)
                connection.settimeout(generator.random() * 0.05 + 0.001)
                with contextlib.suppress(TimeoutError):
                    connection.recv(100)
                connection.close()
            else:
                served.append(running.chat(stream=stream).status_code)

    plans = [(generator.random() < 0.5, generator.random() < 0.3) for _ in range(500)]
    with serve_fake(script, queue_limit=64) as running:
        threads = [threading.Thread(target=work, args=(plans[first::8],)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        running.await_idle()
        assert served == [200] * sum(not leaves for _, leaves in plans)
        cancels = [message["id"] for message in running.messages("cancel")]
        assert len(cancels) == len(set(cancels))
        assert len(cancels) <= sum(leaves for _, leaves in plans)
        assert running.chat().json()["choices"][0]["message"]["content"] == "Red, yellow and blue."


def test_leaving_while_a_grammar_is_tried(serve_fake: Any) -> None:
    """vllm#14151: the compile went on for a client that had left, and then its request was generated."""
    endless = {"name": "x", "schema": {"type": "integer", "multipleOf": 99_999_989}}
    form = {"type": "json_schema", "json_schema": endless}
    with serve_fake(FakeScript(constrained=True)) as running:
        connection = send(running, stream=True, response_format=form)
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.close()
        # Who stays waits for as long as the first would have.
        assert running.chat(response_format=form).status_code == 200
        running.await_idle()
        assert len(running.messages("submit")) == 1
        assert running.metrics()["service"]["requests_total"] == 1
