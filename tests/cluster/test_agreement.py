"""Loops, journal and agreement without processes: the same steps everywhere, and a rank that differs is named."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dgpp_core.api import EngineError
from dgpp_core.cluster.vigil import FAILED
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Cancel, Stop, Submit
from dgpp_core.testing.fake_engine import hashed_pick, solo
from dgpp_core.testing.fake_world import VOCAB, FakeWorld
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar

LIMITS = Limits(slots=3, blocks=24, block_tokens=4, max_context=64, prefill_budget=6, queue=40, admission="grow")
PICK = hashed_pick(VOCAB)


def submit(name: int, prompt: Sequence[int] = (1, 2, 3), tokens: int = 6, **fields: object) -> Submit:
    return Submit(id=name, tokens=tuple(prompt), max_tokens=tokens, params=GREEDY, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_takes_the_same_steps(ranks: int, lag: int) -> None:
    source = random.Random(ranks + 10 * lag)
    world = FakeWorld(LIMITS, ranks, lag=lag)
    asked = [submit(n, [source.randrange(9) for _ in range(source.randint(1, 30))], 12) for n in range(30)]
    for request in asked:
        world.step(request)
        if source.random() < 0.2:
            world.step(Cancel(source.randrange(30)), Stop(source.randrange(30)))
    world.run()
    assert not world.faults
    assert set(world.front.endings) == set(range(30))
    for request in asked:
        reply, ending = tuple(world.front.replies[request.id]), world.front.endings[request.id]
        alone, reason = solo(request, PICK)
        assert reply == alone[: len(reply)]
        if ending.reason == "length":
            assert (reply, ending.reason) == (alone, reason)
    world.leader.end()
    world.pump()
    world.leader.settle()
    assert {follower.stream.head for follower in world.followers.values()} == {world.stream.head}
    assert all(follower.left for follower in world.followers.values())


def test_an_idle_world_writes_nothing() -> None:
    world = FakeWorld(LIMITS, 2)
    world.run(submit(1))
    steps = world.stream.number
    assert world.followers[1].stream.number == steps
    assert world.rank.idle


def test_a_rank_that_computes_something_else_is_named_with_its_step_and_result() -> None:
    def other(ids: Sequence[int]) -> int:
        return PICK(ids) if len(ids) < 6 else (PICK(ids) + 1) % VOCAB

    world = FakeWorld(LIMITS, 3, picks={2: other})
    world.run(submit(7))
    expected = solo(submit(7), PICK)[0][3]
    fault = world.faults[0]
    assert fault.weight == FAILED
    assert fault.error.what == "rank 2 has diverged"
    assert "host2 process 2" in fault.error.where
    assert f"tokens=({(expected + 1) % VOCAB},)" in fault.error.found
    assert f"tokens=({expected},)" in fault.error.expected
    step = int(fault.error.where.partition("step ")[2])
    assert world.stream.number - step <= 1, "noticed in the next step"
    assert "diverged from rank 0" in world.errors[2].what
    assert 1 not in world.errors


def test_a_difference_in_the_last_step_is_found_by_a_heartbeat_and_at_the_end() -> None:
    def other(ids: Sequence[int]) -> int:
        return PICK(ids) if len(ids) < 8 else 5

    def diverged() -> FakeWorld:
        world = FakeWorld(LIMITS, 2, picks={1: other})
        world.run(submit(7))
        return world

    world = diverged()
    assert not world.faults, "no step followed the last one"
    world.followers[1].beat()
    world.pump()
    world.pump()
    *_, told = world.faults
    assert told.error.what == "rank 1 has diverged"
    assert "tokens=(5,)" in told.error.found
    world = diverged()
    world.leader.end()
    world.pump()
    assert "tokens=(5,)" in world.faults[0].error.found
    with pytest.raises(EngineError, match="rank 1 did not leave"):
        world.leader.settle()


def test_a_damaged_journal_is_named_by_the_rank_that_reads_it() -> None:
    def corrupt(rank: int, data: bytes) -> bytes:
        return data if rank != 1 or len(data) < 60 else data[:-1] + bytes([data[-1] ^ 4])

    world = FakeWorld(LIMITS, 3, corrupt=corrupt)
    world.step(submit(1, range(40)))
    assert "journal is damaged" in world.errors[1].what
    assert 2 not in world.errors


def test_a_grammar_is_waited_for_on_every_rank() -> None:
    grammar = Grammar(source=sources.regex("[0-9]{3}"), ends=(5,))
    world = FakeWorld(LIMITS, 3)
    world.paused = {2}
    world.step(submit(1, grammar=grammar))
    assert not world.rank.idle
    assert world.stream.at(1) is not None
    assert not world.stream.recent()[-1].operations, "the request has not begun"
    world.paused.clear()
    world.pump()
    world.run()
    assert world.front.endings[1].reason == "length"
    assert world.followers[2].stream.head == world.stream.head
