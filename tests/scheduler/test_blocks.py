import pytest

from dgpp_core.api.errors import EngineError
from dgpp_core.scheduler.blocks import BlockPool


def test_blocks_start_at_one_and_come_back() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [1, 2, 3]
    assert (pool.free, pool.in_use) == (1, 3)
    pool.give([2])
    assert pool.take(2) == [2, 4]


def test_a_block_freed_twice_is_an_error() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.give([1])
    with pytest.raises(EngineError, match="freed twice"):
        pool.give([1])
    with pytest.raises(EngineError, match="freed twice"):
        pool.give([2])
