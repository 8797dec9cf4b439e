"""A draft layer that drafts noise is reported once."""

from dgpp_core.scheduler.draft_watch import FLOOR, WINDOW, DraftWatch
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Stats
from dgpp_core.testing.scheduler_world import SchedulerWorld


def stats(drafted: int, accepted: int) -> Stats:
    return Stats(drafted_at=(drafted, drafted), accepted_at=(accepted, 0))


def test_a_window_below_the_floor_is_reported_with_the_models_name_and_only_once() -> None:
    watch = DraftWatch("glm47")
    assert watch.note(Stats()) == ""
    assert watch.note(stats(WINDOW - 1, 0)) == "", "the window is not full"
    warning = watch.note(stats(WINDOW, 10))
    assert "glm47" in warning
    assert f"10 of the last {WINDOW}" in warning
    assert watch.note(stats(2 * WINDOW, 20)) == "", "said already"
    assert watch.note(stats(3 * WINDOW, 20 + WINDOW)) == "", "well again"
    assert watch.note(stats(4 * WINDOW, 25 + WINDOW))


def test_drafts_at_the_floor_pass() -> None:
    assert DraftWatch("m").note(stats(WINDOW, int(FLOOR * WINDOW))) == ""


def test_the_first_place_alone_is_judged() -> None:
    world = SchedulerWorld(
        Limits(slots=2, blocks=400, block_tokens=4, max_context=1000, depth=3, prefix_cache=False),
        accept=lambda request, position: int(position % 3 == 0),
    )
    world.submit([1, 2, 3], 400)
    world.run()
    found = world.scheduler.stats()
    assert found.accepted_at[1:] == (0, 0)
    assert 0.3 < found.accepted_at[0] / found.drafted_at[0] < 0.6
