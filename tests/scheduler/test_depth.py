"""The depth of a step follows how many drafts stand, and nothing that is committed depends on it."""

from __future__ import annotations

import pytest

from dgpp_core.engine.families import depth_ladder
from dgpp_core.engine.operations import Decode
from dgpp_core.scheduler.depth import PROBE, DepthLadder
from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld


def learned(accepted: int, requests: int = 1, row_ms: float = 8.0) -> int:
    """The depth chosen after many rounds in which so many of four drafts stood."""
    ladder = DepthLadder((1, 2, 4), 28.0, row_ms)
    for _ in range(1000):
        ladder.note(4, accepted)
    return ladder.choose(requests)


def test_rungs() -> None:
    assert depth_ladder(5, 1) == (1, 2, 4, 5)
    assert depth_ladder(5, 2) == (2, 4, 5)
    assert depth_ladder(4, 3) == (4,)
    assert depth_ladder(1, 1) == (1,)


def test_depth_follows_what_stands() -> None:
    assert DepthLadder((1, 2, 4), 28.0, 8.0).choose(1) == 4, "nothing is known yet"
    assert [learned(accepted) for accepted in (0, 1, 2, 4)] == [1, 1, 2, 4]


def test_more_requests_and_dearer_rows_verify_less() -> None:
    def half(requests: int, row_ms: float) -> int:
        ladder = DepthLadder((1, 2, 4), 28.0, row_ms)
        for round_number in range(2000):
            ladder.note(4, (0, 1, 2, 4)[round_number % 4])
        return ladder.choose(requests)

    assert half(1, 0.1) == 4
    assert half(200, 0.1) < 4
    assert half(1, 50.0) == 1


def test_the_deepest_is_tried_now_and_then() -> None:
    ladder = DepthLadder((1, 4), 28.0, 8.0)
    for _ in range(1000):
        ladder.note(4, 0)
    assert [ladder.choose(1) for _ in range(2 * PROBE)].count(4) == 2


@pytest.mark.parametrize("lag", [0, 1])
def test_replies_do_not_depend_on_it_and_every_run_chooses_alike(lag: int) -> None:
    def run() -> tuple[int, list[int]]:
        limits = Limits(
            slots=3, blocks=400, block_tokens=4, max_context=500, depth=4, ladder=(1, 2, 4), prefix_cache=False
        )
        world = SchedulerWorld(limits, lag=lag, accept=lambda request, position: position // 100 % 3)
        for number in range(4):
            world.submit(range(number, number + 5), 300)
        world.run()
        world.verify()
        steps = [each for output in world.outputs for each in output.operations if isinstance(each, Decode)]
        return world.scheduler.digest, [step.depth for step in steps]

    digest, depths = run()
    assert (digest, depths) == run()
    assert set(depths) == {1, 2, 4}
