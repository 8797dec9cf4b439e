"""Prompts whose last rows alone go through every layer: what of them may come from the prefix cache."""

from typing import Any

import pytest

from dgpp_core.engine.operations import Begin, Snapshot
from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld


def world(tail: int, *, snapshots: int = 0, **fields: Any) -> SchedulerWorld:
    values: dict[str, Any] = {"slots": 4, "blocks": 64, "block_tokens": 4, "max_context": 4096, "prefill_budget": 0}
    held = {"snapshots": snapshots, "needs_snapshot": snapshots > 0, "prefill_tail": tail}
    return SchedulerWorld(Limits(**(values | held | fields)))


def begun(seen: SchedulerWorld) -> list[Begin]:
    return [each for output in seen.outputs for each in output.operations if isinstance(each, Begin)]


@pytest.mark.parametrize("snapshots", [0, 8])
@pytest.mark.parametrize(("tail", "cached"), [(0, 28), (1, 28), (8, 24), (10, 20), (32, 0), (99, 0)])
def test_a_prompt_that_comes_again(snapshots: int, tail: int, cached: int) -> None:
    """All full blocks before its tail, and a snapshot just there."""
    seen = world(tail, snapshots=snapshots)
    for _ in range(2):
        seen.submit(range(32), 4)
        seen.run()
    seen.verify()
    assert [each.cached for each in begun(seen)] == [0, cached]
    taken = {each for output in seen.outputs for each in output.operations if isinstance(each, Snapshot)}
    assert bool(taken) == bool(snapshots and cached)


def test_a_reply_does_not_move_the_tail_of_a_prompt_that_was_preempted() -> None:
    """It comes back with its reply behind it, and its floor is where it was."""
    seen = world(8, blocks=14, admission="grow", admission_window=4)
    for first in (0, 50):
        seen.submit(range(first, first + 12), 24)
    seen.run()
    seen.verify()
    again = [each for each in begun(seen) if each.replied]
    assert again
    assert all(each.cached <= 12 - 8 for each in again)
