"""Ends of requests at every stage of their lives: one ending, and everything back."""

import random
from collections import Counter

import pytest

from dgpp_core.engine.operations import Begin, Decode, Prefill
from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld

FAMILIES = {
    "paged": {},
    "recurrent": {"snapshots": 3, "needs_snapshot": True},
    "uncached": {"prefix_cache": False},
}


def world(family: str, lag: int, **fields: object) -> SchedulerWorld:
    base = {"slots": 2, "blocks": 60, "block_tokens": 4, "max_context": 200, "prefill_budget": 8, "depth": 2}
    return SchedulerWorld(
        Limits(**(base | FAMILIES[family] | fields)), lag=lag, accept=lambda request, position: position % 3
    )


def stage(each: SchedulerWorld, name: int) -> str:
    """Where a request is in its life, from the operations alone."""
    if name in each.endings:
        return "ended"
    if name not in each.engine.slots_held.values():
        return "queued"
    if each.replies[name]:
        return "active"
    slot = next(slot for slot, request in each.engine.slots_held.items() if request == name)
    last = any(
        isinstance(done, Prefill) and done.slot == slot and done.last for done in each.outputs[-1].operations
    ) or any(isinstance(done, Decode) and slot in done.slots for done in each.outputs[-1].operations)
    return "unread" if last else "prefilling"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("how", ["cancel", "stop"])
def test_a_request_that_is_cut_at_any_tick_ends_once_and_gives_everything_back(family: str, lag: int, how: str) -> None:
    seen: Counter[str] = Counter()
    for tick in range(24):
        each = world(family, lag)
        first, second = each.submit(range(6), 14), each.submit(range(50, 60), 20)
        name = each.submit(range(100, 130), 9)
        for _ in range(tick):
            each.tick()
        seen[stage(each, name)] += 1
        ended = name in each.endings
        (each.cancel if how == "cancel" else each.stop)(name)
        if tick % 2:
            (each.cancel if how == "cancel" else each.stop)(name)
        output = each.tick()
        assert [ending.id for ending in output.endings].count(name) == (not ended)
        assert name not in each.engine.slots_held.values()
        each.run()
        each.verify()
        stats = each.scheduler.stats()
        assert (stats.active, stats.prefilling, stats.queued) == (0, 0, 0)
        assert stats.blocks_in_use == stats.blocks_cached
        assert each.endings[first].reason == each.endings[second].reason == "length"
        assert each.scheduler.idle
    assert {"queued", "prefilling", "active", "ended"} <= seen.keys()
    assert lag == 0 or "unread" in seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_freed_slot_is_taken_in_the_tick_of_the_cancel(family: str) -> None:
    each = world(family, 1)
    held = [each.submit([1], 50), each.submit([2], 50)]
    waiting = each.submit([3], 50)
    for _ in range(6):
        each.tick()
    each.cancel(*held)
    output = each.tick()
    assert any(isinstance(operation, Begin) and operation.request == waiting for operation in output.operations)
    each.run()
    each.verify()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("admission", ["full", "grow"])
def test_500_requests_of_which_30_percent_are_cancelled_at_random_stages(family: str, admission: str) -> None:
    rng = random.Random(f"{family} {admission}")
    each = world(family, 1, slots=8, blocks=64, queue=500, admission=admission, admission_window=4)
    doomed = {name: rng.choice(("queued", "prefilling", "active", "ended")) for name in rng.sample(range(500), 150)}
    hit: Counter[str] = Counter()
    while len(each.submits) < 500 or not each.scheduler.idle:
        for _ in range(min(rng.choice((0, 0, 0, 3)), 500 - len(each.submits))):
            each.submit([rng.randrange(20) for _ in range(rng.randint(1, 30))], rng.randint(1, 20))
        each.tick()
        for name in sorted(doomed.keys() & each.submits.keys()):
            if stage(each, name) in (doomed[name], "ended"):
                hit[stage(each, name)] += 1
                each.cancel(name)
                del doomed[name]
    each.tick()
    each.verify()
    reasons = Counter(ending.reason for ending in each.endings.values())
    assert sum(reasons.values()) == 500
    assert reasons["cancelled"] == 150 - hit["ended"]
    assert reasons["length"] == 350 + hit["ended"]
    assert min(hit[when] for when in ("queued", "prefilling", "active", "ended")) > 10
    stats = each.scheduler.stats()
    assert (stats.active, stats.prefilling, stats.queued) == (0, 0, 0)
    assert stats.blocks_in_use == stats.blocks_cached
    assert each.scheduler._live == {}
