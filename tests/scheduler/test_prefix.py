from array import array

import pytest

from dgpp_core.scheduler.blocks import BlockPool
from dgpp_core.scheduler.prefix import Node, PrefixIndex

SIZE = 2


def ids(*tokens: int) -> "array[int]":
    return array("q", tokens)


class Fixture:
    """An index with helpers that play one request."""

    def __init__(self, blocks: int = 20, arenas: int = 0, needs_snapshot: bool = False) -> None:
        self.pool = BlockPool(blocks)
        self.index = PrefixIndex(self.pool, SIZE, arenas, needs_snapshot)

    def leave(self, *tokens: int) -> list[Node]:
        """A request that computed ``tokens`` alone and ended."""
        blocks = self.pool.take(-(-len(tokens) // SIZE))
        return self.index.leave(ids(*tokens), blocks, [], len(tokens) // SIZE)

    def known(self, *tokens: int) -> int:
        """Tokens of a prompt that are known."""
        return len(self.match(*tokens)) * SIZE

    def match(self, *tokens: int) -> list[Node]:
        """The known chain of a prompt."""
        chain: list[Node] = []
        self.index.match(ids(*tokens), len(tokens), chain)
        return chain


def test_only_whole_blocks_of_exactly_these_ids_match() -> None:
    world = Fixture()
    world.leave(1, 2, 3, 4, 5)
    assert world.known(1, 2, 3, 4, 5, 6) == 4
    assert world.known(1, 2, 3, 9) == 2
    assert world.known(3, 4) == 0, "the same block after another prefix is another node"
    assert world.known(1, 2, 3) == 2
    assert world.pool.in_use == world.index.size == 2, "the partial block is not kept"


def test_ids_that_differ_by_a_multiple_of_a_word_do_not_match() -> None:
    world = Fixture()
    world.leave(1, 2)
    assert world.known(1 + 2**32, 2) == 0
    assert world.known(2, 1) == 0


def test_known_blocks_left_again_are_freed() -> None:
    world = Fixture()
    world.leave(1, 2, 3, 4)
    world.leave(1, 2, 3, 4, 5, 6)
    assert world.pool.in_use == world.index.size == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    world = Fixture(blocks=6)
    world.leave(1, 2, 3, 4)
    world.leave(5, 6, 7, 8)
    world.leave(1, 2, 9, 9)
    assert world.pool.free == 1
    gone = []
    for wanted in range(2, 7):
        assert world.index.reclaim(wanted)
        chains = {"1234": world.known(1, 2, 3, 4), "5678": world.known(5, 6, 7, 8), "1299": world.known(1, 2, 9, 9)}
        gone.append(chains)
    assert gone == [
        {"1234": 2, "5678": 4, "1299": 4},
        {"1234": 2, "5678": 2, "1299": 4},
        {"1234": 2, "5678": 0, "1299": 4},
        {"1234": 2, "5678": 0, "1299": 2},
        {"1234": 0, "5678": 0, "1299": 0},
    ]
    assert world.index.evictions == 5
    assert world.index.was_evicted(ids(1, 2))
    assert not world.index.was_evicted(ids(3, 4))


def test_what_a_request_uses_is_not_evicted() -> None:
    world = Fixture(blocks=4)
    world.leave(1, 2, 3, 4)
    world.leave(5, 6)
    chain = world.match(1, 2, 3, 4)
    world.index.attach(chain)
    assert not world.index.reclaim(3)
    assert world.index.reclaim(2)
    assert (world.known(1, 2, 3, 4), world.known(5, 6)) == (4, 0)
    world.index.leave(ids(1, 2, 3, 4), [node.block for node in chain], chain, 2)
    assert world.index.reclaim(4)
    assert world.pool.in_use == 0


def test_a_running_request_adopts_its_blocks_until_anothers_stand_for_the_same_tokens() -> None:
    world = Fixture()
    world.leave(1, 2, 3, 4)
    blocks, chain = world.pool.take(3), []
    world.index.adopt(ids(1, 2, 3, 4, 5, 6), blocks, chain, 3)
    assert chain == []
    assert world.known(1, 2, 3, 4, 5, 6) == 4
    assert len(world.index.leave(ids(1, 2, 3, 4, 5, 6), blocks, chain, 3)) == 3
    assert world.known(1, 2, 3, 4, 5, 6) == 6
    assert world.pool.in_use == world.index.size == 3


def test_reuse_is_the_minimum_over_groups_down_to_nothing() -> None:
    world = Fixture(arenas=2, needs_snapshot=True)
    path = world.leave(1, 2, 3, 4, 5, 6)
    assert world.known(1, 2, 3, 4, 5, 6) == 6
    assert world.index.usable(world.match(1, 2, 3, 4, 5, 6)) == []
    world.index.pin_snapshot(path[1], world.index.take_arena())
    assert world.index.usable(world.match(1, 2, 3, 4, 5, 6)) == path[:2]
    assert world.index.usable(world.match(1, 2, 3, 9)) == []


def test_a_snapshot_dies_with_its_node() -> None:
    world = Fixture(blocks=2, arenas=1, needs_snapshot=True)
    path = world.leave(1, 2)
    world.index.pin_snapshot(path[0], world.index.take_arena())
    assert world.index.arenas_in_use == 1
    world.index.reclaim(2)
    assert world.index.arenas_in_use == 0
    assert world.index.take_arena() == 0


def test_the_least_recently_used_snapshot_makes_room() -> None:
    world = Fixture(arenas=2, needs_snapshot=True)
    first, second = world.leave(1, 2), world.leave(3, 4)
    for path in (first, second):
        world.index.pin_snapshot(path[-1], world.index.take_arena())
    world.index.attach(first)
    freed = second[-1].arena
    assert world.index.take_arena() == freed
    assert world.index.usable(second) == []
    assert world.index.usable(first) == first


def test_an_arena_full_of_unfinished_snapshots_gives_none() -> None:
    world = Fixture(arenas=1, needs_snapshot=True)
    assert world.index.take_arena() == 0
    assert world.index.take_arena() == -1
    world.index.give_arena(0)
    assert world.index.take_arena() == 0


def test_a_second_snapshot_of_the_same_state_is_freed() -> None:
    world = Fixture(arenas=2, needs_snapshot=True)
    path = world.leave(1, 2)
    world.index.pin_snapshot(path[0], world.index.take_arena())
    world.index.pin_snapshot(path[0], world.index.take_arena())
    assert world.index.arenas_in_use == 1


@pytest.mark.parametrize("count", [300])
def test_the_memory_of_evictions_is_bounded(count: int) -> None:
    world = Fixture(blocks=1)
    for token in range(count):
        world.index.reclaim(1)
        world.leave(token, token)
    assert world.index.was_evicted(ids(count - 2, count - 2))
    assert not world.index.was_evicted(ids(0, 0))


def test_a_chain_matched_before_follows_what_was_evicted_and_added_since() -> None:
    world = Fixture(blocks=5)
    world.leave(1, 2, 3, 4)
    prompt, chain = ids(1, 2, 3, 4, 5, 6), []
    world.index.match(prompt, 6, chain)
    assert len(chain) == 2
    world.leave(1, 2, 3, 4, 5, 6)
    world.index.match(prompt, 6, chain)
    assert chain == world.match(*prompt)
    assert len(chain) == 3
    for wanted, left in ((3, 2), (4, 1), (5, 0)):
        world.index.reclaim(wanted)
        world.index.match(prompt, 6, chain)
        assert chain == world.match(*prompt)
        assert len(chain) == left
    world.leave(1, 2)
    world.index.match(prompt, 6, chain)
    assert chain == world.match(1, 2)


def test_the_idle_end_of_a_chain_is_counted() -> None:
    world = Fixture()
    world.leave(1, 2, 3, 4, 5, 6)
    chain = world.match(1, 2, 3, 4, 5, 6)
    assert world.index.idle_in(chain) == 3
    world.index.attach(chain[:2])
    assert (world.index.idle_in(chain), world.index.idle_in(chain[:2]), world.index.idle_in([])) == (1, 0, 0)
