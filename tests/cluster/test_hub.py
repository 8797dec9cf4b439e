"""Rank 0's end of the journal over real sockets: callers that are no ranks, votes, and the comparison at the end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dgpp_core.api import DgppError, EngineError
from dgpp_core.cluster.hub import Hub
from dgpp_core.cluster.link import Link
from dgpp_core.cluster.member import join
from dgpp_core.cluster.records import Bye, End, Era, FromLeader, Go, Halt, Heartbeat, Tick, Vote, encode
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import Patience
from dgpp_core.testing.fake_world import TERMS, hello

PATIENCE = Patience(silent=5.0, stalled=5.0, settle=0.05, leave=1.0)
ERA = Era(epoch=1, world=2, model="fake", settings=b"", fabric_port=1)


class Led:
    """A hub of a world of two."""

    def __init__(self, listener: socket.socket) -> None:
        self.address, self.stream = listener.getsockname(), OperationStream()
        self.ended: list[DgppError] = []
        self.over = threading.Event()
        self.hub = Hub(listener, hello(0, 2), ERA, self.stream, PATIENCE, time.monotonic, self._beat, self._end)

    def _beat(self) -> Heartbeat:
        return Heartbeat(step=0, digest=0, phase="waiting", age=0.0)

    def _end(self, error: DgppError) -> None:
        self.ended.append(error)
        self.over.set()

    def call(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)

    def joined(self) -> Link[FromLeader]:
        """Rank 1, taken in."""
        return join(self.call(), hello(1, 2), PATIENCE, 5.0)[0]

    def serving(self) -> Link[FromLeader]:
        """Rank 1 of a world that serves."""
        gathering = threading.Thread(target=self.hub.gather, args=(10.0, lambda what: None))
        gathering.start()
        link = self.joined()
        link.send(encode(Vote(TERMS)))
        gathering.join()
        self.hub.vote(TERMS, 0.0, lambda what: None)
        assert isinstance(until(link, Go), Go)
        return link


def until(link: Link[FromLeader], kind: type[FromLeader]) -> FromLeader:
    while True:
        record = link.receive(5.0)
        assert record is not None
        if isinstance(record, kind):
            return record


@pytest.fixture
def led() -> Iterator[Led]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Led(listener)


def test_a_caller_that_is_no_rank_disturbs_nobody(led: Led) -> None:
    waiting = threading.Thread(target=led.hub.gather, args=(10.0, lambda what: None))
    waiting.start()
    for said in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"", bytes(64)):
        with led.call() as caller:
            caller.sendall(said)
    silent = led.call()
    link = led.joined()
    waiting.join(5)
    assert not waiting.is_alive()
    assert not led.ended
    with pytest.raises(EngineError, match="refuses") as raised:
        led.joined()
    assert "comes second" in raised.value.found
    silent.close()
    link.close()


def test_what_is_told_while_serving_and_an_end_that_agrees(led: Led) -> None:
    link = led.serving()
    led.hub.leader.tick((), (3,), ())
    assert until(link, Tick) == Tick(number=1, digest=0, cancels=(3,))
    leaving = threading.Thread(target=led.hub.finish)
    leaving.start()
    assert until(link, End) == End(0, 0)
    link.send(encode(Bye(0, 0)))
    leaving.join(5)
    assert not leaving.is_alive()
    link.close()
    time.sleep(0.2)
    assert not led.ended


@pytest.mark.parametrize(("bye", "what"), [(Bye(4, 0), "differs at the end"), (None, "did not leave")])
def test_an_end_that_does_not_agree_is_an_error(led: Led, bye: Bye | None, what: str) -> None:
    link = led.serving()
    if bye is not None:
        link.send(encode(bye))
    with pytest.raises(EngineError, match=what) as raised:
        led.hub.finish()
    assert "rank 1 (host1 process 1)" in raised.value.where


def test_a_lost_rank_ends_the_world_once_and_the_rest_are_told(led: Led) -> None:
    link = led.serving()
    link.close()
    assert led.over.wait(5)
    assert [error.what for error in led.ended] == ["rank 1 is gone"]


def test_ranks_are_told_why_the_world_ends(led: Led) -> None:
    link = led.serving()
    led.hub.halt("a reason")
    assert until(link, Halt) == Halt("a reason")
    assert link.receive(5.0) is None
