"""Requests and their outputs, without a process; and the frames, byte by byte."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from dgpp_core.api.errors import RequestError
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.messages import (
    VERSION,
    Beat,
    Cancel,
    Ending,
    FromEngine,
    Loading,
    Output,
    Ready,
    Stats,
    Stop,
    Submit,
    Update,
    encode,
)
from dgpp_core.server.engine_client import EngineClient, Inbox
from dgpp_core.server.engine_process import MAX_FRAME_BYTES, FrameReader

READY = Ready(
    version=VERSION, pid=1, vocab_size=9, context_tokens=9, position_ceiling=9, pool_tokens=9, row_exact=True,
    load_seconds=0, plan="",
)  # fmt: skip


class Engine:
    """A client with what it sent."""

    def __init__(self, capacity: int = 4) -> None:
        self.sent: list[Any] = []
        self.client = EngineClient(self.sent.extend, READY, capacity=capacity)

    def submit(self, count: int) -> tuple[tuple[int, ...], Inbox]:
        inbox, ids = Inbox(), self.client.ids(count)
        requests = [Submit(id=request, tokens=(1,), max_tokens=1, params=GREEDY) for request in ids]
        self.client.submit(requests, inbox)
        return ids, inbox


def take(inbox: Inbox) -> list[Any]:
    return asyncio.run(inbox.take(0.0))


def test_choices_are_admitted_together_or_not_at_all() -> None:
    engine = Engine(capacity=4)
    engine.submit(3)
    with pytest.raises(RequestError) as raised:
        engine.submit(2)
    assert (raised.value.status, raised.value.code) == (503, "overloaded")
    assert len(engine.sent) == 3
    engine.submit(1)


def test_a_request_holds_its_place_until_it_ends_in_the_engine() -> None:
    engine = Engine(capacity=1)
    (request,), inbox = engine.submit(1)
    engine.client.cancel(request)
    assert engine.sent[-1] == Cancel(request)
    with pytest.raises(RequestError):
        engine.submit(1)
    engine.client.receive(Output((Update(request, (5,)),), (Ending(request, "cancelled"),)))
    assert take(inbox) == []
    assert engine.client.open == 0
    engine.submit(1)


def test_nothing_is_sent_for_a_request_that_has_ended() -> None:
    engine = Engine()
    (request,), _ = engine.submit(1)
    engine.client.receive(Output((), (Ending(request, "eos"),)))
    engine.client.cancel(request)
    engine.client.stop(request)
    assert not any(isinstance(message, Cancel | Stop) for message in engine.sent)


def test_outputs_reach_their_own_request_in_order() -> None:
    engine = Engine()
    (first,), one = engine.submit(1)
    (second,), two = engine.submit(1)
    engine.client.receive(Output((Update(second, (1,)), Update(first, (2,)))))
    engine.client.receive(Output((Update(second, (3,)),), (Ending(second, "eos"),)))
    assert take(one) == [Update(first, (2,))]
    assert take(two) == [Update(second, (1,)), Update(second, (3,)), Ending(second, "eos")]


def test_failure_ends_every_request_once_and_for_all() -> None:
    engine = Engine()
    (request,), inbox = engine.submit(1)
    engine.client.fail("it broke")
    engine.client.fail("and again")
    (error,) = take(inbox)
    assert (error.status, error.code) == (503, "engine_failure")
    assert "it broke" in error.what
    engine.client.cancel(request)
    assert len(engine.sent) == 1
    with pytest.raises(RequestError) as raised:
        engine.submit(1)
    assert raised.value.code == "engine_failure"
    assert engine.client.failure == "it broke"


def test_stopping_and_leaving_in_the_same_moment_cancels_once() -> None:
    """FreeToken#222: a disconnect in the tick in which the server stops."""
    engine = Engine()
    (request,), inbox = engine.submit(1)
    engine.client.abandon()
    engine.client.cancel(request)
    engine.client.abandon()
    assert engine.sent.count(Cancel(request)) == 1
    assert [error.code for error in take(inbox)] == ["server_shutdown"]
    with pytest.raises(RequestError) as raised:
        engine.submit(1)
    assert raised.value.code == "server_shutdown"


def test_beats_are_kept() -> None:
    engine = Engine()
    engine.client.receive(Beat(3, True, Stats(ticks=3)))
    assert engine.client.stats == Stats(ticks=3)


def test_inbox_wakes_its_reader() -> None:
    async def main() -> list[Any]:
        inbox = Inbox()
        reading = asyncio.create_task(inbox.take(None))
        await asyncio.sleep(0)
        inbox.put(Ending(1, "eos"))
        inbox.put(Ending(2, "eos"))
        return await reading

    assert asyncio.run(main()) == [Ending(1, "eos"), Ending(2, "eos")]


MESSAGES: list[FromEngine] = [
    Loading("weights", 1, 2), READY, Beat(1, True, Stats(ticks=4)), Output((Update(1, (2, 3)),), (Ending(1, "eos"),)),
] * 5  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_frames_cut_anywhere(seed: int) -> None:
    generator = random.Random(seed)
    got: list[FromEngine] = []
    broken: list[str] = []
    reader = FrameReader(got.append, broken.append)
    raw = b"".join(map(encode, MESSAGES))
    while raw:
        size = generator.choice([1, 2, 3, 5, 40, 1000])
        reader.data_received(raw[:size])
        raw = raw[size:]
    assert got == MESSAGES
    assert broken == []
    reader.connection_lost(None)
    assert len(broken) == 1


@pytest.mark.parametrize(
    "junk", [b"\x03\x00\x00\x00abc", (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\x01\x00\x00\x00\x80"]
)
def test_frames_that_make_no_sense(junk: bytes) -> None:
    got: list[FromEngine] = []
    broken: list[str] = []
    reader = FrameReader(got.append, broken.append)
    reader.data_received(encode(READY) + junk)
    reader.data_received(encode(READY))
    reader.connection_lost(None)
    assert got == [READY]
    assert len(broken) == 1
