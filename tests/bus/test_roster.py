"""How ranks meet over TCP and hear of each other's end, with real connections, and strangers among them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from dgpp_core.api import EngineError
from dgpp_core.bus.roster import Roster, enter, hello
from dgpp_core.bus.wire import LARGEST


def free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def formed(world: int, timeout: float = 5.0) -> Iterator[list[Roster]]:
    address = free()
    with ThreadPoolExecutor(world) as threads:
        found = list(threads.map(lambda rank: enter(hello(rank, world, "test", ""), address, timeout), range(world)))
    try:
        yield found
    finally:
        for roster in reversed(found):
            roster.close()


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return true()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_has_all_shares_in_order(world: int) -> None:
    with formed(world) as rosters, ThreadPoolExecutor(world) as threads:
        for turn in range(3):
            shares = [f"{turn} of {rank}".encode() for rank in range(world)]
            assert list(threads.map(lambda r, s=shares: r.gather(s[r.rank]), rosters)) == [shares] * world


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_leaves_is_missed_only_by_who_waits_for_it(gone: int) -> None:
    with formed(4) as rosters:
        for roster in rosters:
            roster.watch(lambda: None)
        rosters[gone].close()
        others = [roster for roster in rosters if roster.rank != gone]
        for roster in others:
            assert until(lambda r=roster: r.missing() == 1 << gone), "others are not thought missing"  # type: ignore[misc]
            fault = roster.fault(gone)
            assert fault is not None
            assert fault.what == f"rank {gone} has left"
            assert roster.fault(1 if gone else 3) is None


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_that_gave_up_stops_all_others(bad: int) -> None:
    with formed(4) as rosters:
        heard = [threading.Event() for _ in rosters]
        for roster, event in zip(rosters, heard, strict=True):
            roster.watch(event.set)
        rosters[bad].publish("a bad weight")
        for roster, event in zip(rosters, heard, strict=True):
            if roster.rank != bad:
                assert event.wait(5)
                fault = roster.fault(2)
                assert fault is not None
                assert fault.what == f"rank {bad} failed: a bad weight"
                assert roster.missing() == 0b1111


def test_strangers_disturb_nothing() -> None:
    """A port scan, a browser, a message that is too long and one who says nothing come while the world is formed."""
    address = free()
    host, port = address.split(":")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(enter, hello(0, 2, "test", ""), address, 10.0)
        strangers = []
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", (LARGEST + 1).to_bytes(4, "big"), b"\0\0\0\5hello", b"\0"):
            assert until(lambda: port_open(host, int(port)))
            strangers.append(socket.create_connection((host, int(port))))
            strangers[-1].sendall(said)
        second = threads.submit(enter, hello(1, 2, "test", ""), address, 10.0)
        rosters = first.result(), second.result()
        for stranger in strangers:
            stranger.close()
    for roster in reversed(rosters):
        roster.close()


def port_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("field", "value"), [("version", "9.9"), ("settings", "other"), ("transport", "smoke signals"), ("world", 3)]
)
def test_whoever_differs_is_refused_and_all_hear_of_it(field: str, value: str | int) -> None:
    address = free()
    other = msgspec.structs.replace(hello(1, 2, "test", ""), **{field: value})

    def refusal(said: object) -> str:
        with pytest.raises(EngineError) as refused:
            enter(said, address, 5.0)  # type: ignore[arg-type]
        return refused.value.line()

    with ThreadPoolExecutor(2) as threads:
        for line in threads.map(refusal, [hello(0, 2, "test", ""), other]):
            assert line.startswith(f"ranks with another {field} cannot form a world; where: rank 1, ")
            assert f"found: {value}" in line


def test_a_rank_that_falls_silent_while_the_world_is_formed_is_named() -> None:
    with formed(2, timeout=0.3) as rosters, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rosters[0].gather, b"")
        with pytest.raises(EngineError, match="rank 1 fell silent"):
            waiting.result()
        with pytest.raises(EngineError, match="rank 1 fell silent"):
            rosters[1].gather(b"")


def test_an_address_nobody_can_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineError, match="rank 0 was not reached within"):
        enter(hello(1, 2, "test", ""), silent, 0.3)
    for address in ("127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:65536", "::1:80", "127.0.0.1:²"):
        with pytest.raises(EngineError, match="malformed"):
            enter(hello(0, 2, "test", ""), address, 1.0)
    with pytest.raises(EngineError, match="no such rank"):
        enter(hello(2, 2, "test", ""), "127.0.0.1:1", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="rank 0 cannot listen"):
        enter(hello(0, 2, "test", ""), f"127.0.0.1:{taken.getsockname()[1]}", 0.3)
