import pytest

from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld


def world(**fields: object) -> SchedulerWorld:
    return SchedulerWorld(Limits(**({"slots": 1, "blocks": 8, "block_tokens": 4, "max_context": 64} | fields)))


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "says"),
    [
        ([], 4, "no tokens"),
        ([1], 0, "max_tokens is 0"),
        ([1], -3, "max_tokens is -3"),
        ([1] * 40, 25, "40 prompt tokens and 25 to generate exceed the context of 64"),
        ([1] * 30, 4, "need 9 KV blocks; the pool has 8"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_changes_nothing_else(
    tokens: list[int], max_tokens: int, says: str
) -> None:
    each = world()
    bad, good = each.submit(tokens, max_tokens), each.submit([1, 2, 3], 4)
    each.run()
    assert each.endings[bad].reason == "error"
    assert says in each.endings[bad].error
    assert each.endings[good].reason == "length"
    each.verify()
    assert each.scheduler.stats().requests_finished == 1


def test_the_largest_request_that_fits_is_served() -> None:
    each = world()
    each.submit([1] * 29, 4)
    each.run()
    each.verify()
    assert each.endings[0].reason == "length"


def test_the_queue_holds_so_many_and_no_more() -> None:
    each = world(queue=3)
    names = [each.submit([1, 2, 3], 4) for _ in range(5)]
    each.run()
    each.verify()
    assert [each.endings[name].reason for name in names] == ["length"] * 3 + ["error"] * 2
    assert each.endings[names[4]].error == "the queue of 3 requests is full"
