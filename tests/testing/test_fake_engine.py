"""The fake engine notices each way in which a scheduler could break its promises."""

from collections.abc import Sequence

import pytest

from dgpp_core.engine.operations import Begin, Decode, Extend, Operation, Prefill, Release, Snapshot
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit
from dgpp_core.testing.fake_engine import FakeEngine, ViolationError, hashed_pick, solo

PROMPT = (5, 6, 7, 8, 9)


def engine(**fields: object) -> FakeEngine:
    lag = fields.pop("lag", 0)
    base = {"slots": 2, "blocks": 9, "block_tokens": 2, "max_context": 64, "snapshots": 2, "needs_snapshot": True}
    return FakeEngine(Limits(**(base | fields)), lag=lag, accept=lambda request, position: 9)


def begin(slot: int = 0, blocks: Sequence[int] = (1, 2, 3, 4), **fields: object) -> Begin:
    base = {"slot": slot, "request": slot, "prompt": PROMPT, "params": GREEDY, "logprobs": -1, "cached": 0}
    return Begin(**(base | {"blocks": tuple(blocks)} | fields))


COLD = (begin(), Prefill(0, 0, 4, False), Snapshot(0, 1), Prefill(0, 4, 1, True))


def test_a_prefill_and_steps_give_the_lone_reply_at_any_depth() -> None:
    expected, reason = solo(Submit(id=0, tokens=PROMPT, max_tokens=4, params=GREEDY), hashed_pick(1000))
    assert reason == "length"
    for depth in (0, 2):
        each = engine(depth=depth)
        cold = (begin(blocks=(1, 2, 3, 4, 5)), *COLD[1:])
        tokens: list[int] = []
        for tick, operations in enumerate((cold, *[(Decode((0,), depth),)] * (3 if depth == 0 else 1)), 1):
            (result,) = each.execute(tick, operations)
            assert result.tick == tick
            tokens.extend(result.slots[0].tokens)
        assert tuple(tokens) == expected


def test_a_prefix_is_reused_after_release() -> None:
    each = engine()
    (cold,) = each.execute(1, COLD)
    (warm,) = each.execute(2, (Release(0), begin(1, (1, 2, 5, 6), cached=4, arena=1), Prefill(1, 4, 1, True)))
    assert warm.slots[0].tokens == cold.slots[0].tokens
    assert each.slots_held == {1: 1}
    assert each.blocks_held == {1, 2, 5, 6}


def test_lag_hands_results_out_a_tick_later() -> None:
    each = engine(lag=1)
    assert each.execute(1, COLD) == ()
    assert each.results_due
    assert [result.tick for result in each.execute(2, ())] == [1]
    assert each.execute(3, ()) == ()
    assert not each.results_due


def test_middle_chunks_give_an_empty_result() -> None:
    (result,) = engine().execute(1, COLD[:2])
    assert result.slots == ()


def test_eos_ends_the_lone_reply() -> None:
    pick = hashed_pick(1000)
    submit = Submit(id=0, tokens=PROMPT, max_tokens=9, params=GREEDY)
    reply, _ = solo(submit, pick)
    cut = Submit(id=0, tokens=PROMPT, max_tokens=9, params=GREEDY, eos_ids=(reply[3],))
    assert solo(cut, pick) == (reply[:4], "eos")


STEPS = [Decode((0,), 0)] * 4


@pytest.mark.parametrize(
    ("operations", "says"),
    [
        ([Prefill(0, 0, 1, False)], "slot 0 is used without a request"),
        ([*COLD, Release(0), Release(0)], "slot 0 is used without a request"),
        ([*COLD, Release(0), *STEPS], "slot 0 is used without a request"),
        ([*COLD, begin()], "slot 0 is free"),
        ([begin(7)], "slot 7 exists"),
        ([begin(blocks=(0, 1, 2))], "block 0 exists"),
        ([begin(blocks=(1, 2, 10))], "block 10 exists"),
        ([begin(blocks=(1, 2, 2))], "names a block once"),
        ([*COLD, begin(1, (4, 5, 6))], "block 4 is free"),
        ([*COLD, Extend(0, (3,))], "block 3 is free"),
        ([*COLD, *STEPS], "row 8 of request 0 has a block"),
        ([begin(), Prefill(0, 1, 2, False)], "goes on where it was"),
        ([begin(), Prefill(0, 0, 6, True)], "goes on where it was"),
        ([begin(), Prefill(0, 0, 5, False)], "the last chunk is the one marked"),
        ([begin(), Prefill(0, 0, 4, True)], "the last chunk is the one marked"),
        ([begin(), Decode((0,), 0)], "a step follows the prompt"),
        ([*COLD, Decode((0,), 1)], "the configured depth"),
        ([*COLD, Decode((1, 0), 0)], "decode slots ascend"),
        ([begin(cached=3)], "whole blocks"),
        ([begin(cached=4, prompt=PROMPT[:4])], "whole blocks and a rest"),
        ([begin(cached=4, arena=1)], "cached row 0 of request 0 holds its prompt"),
        ([*COLD, begin(1, (1, 2, 5), cached=4, arena=1, prompt=(5, 6, 7, 1, 9))], "cached row 3 of request 1"),
        ([*COLD, begin(1, (2, 1, 5), cached=4, arena=1)], "cached row 0 of request 1"),
        ([*COLD, begin(1, (1, 2, 5), cached=4, arena=0)], "the snapshot is of the cached prefix"),
        ([*COLD, begin(1, (1, 5, 6), cached=2, arena=1)], "the snapshot is of the cached prefix"),
        ([*COLD, begin(1, (1, 2, 5), cached=4)], "the snapshot is of the cached prefix"),
        ([*COLD, Snapshot(0, 2)], "arena slot 2 exists"),
        ([*COLD, Snapshot(0, 0)], "a snapshot lies on a block boundary"),
        ([*COLD, Release(0), begin(1, (2, 3)), begin(0, (1, 2, 5), cached=4, arena=1)], "cached row 2 of request 0"),
        ([begin(), Prefill(0, 0, 2, False), begin(1, (1, 2, 5), cached=2, arena=0)], "block 2 is free"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_named(operations: list[Operation], says: str) -> None:
    with pytest.raises(ViolationError, match=says):
        engine().execute(1, operations)


def test_a_shared_block_is_never_written_by_whoever_else_reads_it() -> None:
    each = engine(needs_snapshot=False, snapshots=0)
    each.execute(1, (begin(prompt=PROMPT[:3], blocks=(1, 2)), Prefill(0, 0, 3, True), Decode((0,), 0)))
    text = [*PROMPT[:3], *(solo(Submit(id=0, tokens=PROMPT[:3], max_tokens=2, params=GREEDY), hashed_pick(1000))[0])]
    each.execute(2, (begin(1, (1, 2, 3), prompt=tuple(text), cached=4), Prefill(1, 4, 1, True)))
    with pytest.raises(ViolationError, match="row 4 of request 0 has a block"):
        each.execute(3, (Decode((0,), 0),))


def test_rejected_and_provisional_rows_need_blocks_too() -> None:
    each = FakeEngine(Limits(slots=1, blocks=9, block_tokens=2, max_context=64, depth=2))
    each.execute(1, (begin(blocks=(1, 2, 3)), Prefill(0, 0, 5, True)))
    with pytest.raises(ViolationError, match="row 6 of request 0 has a block"):
        each.execute(2, (Decode((0,), 2),))
