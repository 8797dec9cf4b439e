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


@pytest.mark.parametrize("blocks", [8, 3])
def test_slots_and_queue_hold_so_many_and_no_more_whether_they_come_at_once_or_wait_for_blocks(blocks: int) -> None:
    together, apart = (world(slots=2, queue=3, blocks=blocks) for _ in range(2))
    for each in (together, apart):
        names = []
        for _ in range(7):
            names.append(each.submit([1, 2, 3], 8))
            if each is apart and len(names) < 3:
                each.tick()
        each.run()
        each.verify()
        assert [each.endings[name].reason for name in names] == ["length"] * 5 + ["error"] * 2
        assert each.endings[names[6]].error == "5 requests run or wait, which is the limit"
