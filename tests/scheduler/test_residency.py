"""Admission, growth, preemption and reuse of prefixes, seen through whole runs on a fake engine."""

import random

import pytest

from dgpp_core.api.errors import EngineError
from dgpp_core.engine.operations import Begin, Extend, Snapshot
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import MISS_REASONS
from dgpp_core.scheduler.scheduler import BYPASS
from dgpp_core.testing.fake_engine import hashed_pick
from dgpp_core.testing.scheduler_world import SchedulerWorld


def limits(**fields: object) -> Limits:
    return Limits(**({"slots": 4, "blocks": 64, "block_tokens": 4, "max_context": 4096, "prefill_budget": 0} | fields))


def begun(world: SchedulerWorld) -> list[Begin]:
    return [each for output in world.outputs for each in output.operations if isinstance(each, Begin)]


def snapshots(world: SchedulerWorld) -> list[Snapshot]:
    return [each for output in world.outputs for each in output.operations if isinstance(each, Snapshot)]


class TestReservation:
    def test_full_reserves_everything_and_never_grows(self) -> None:
        world = SchedulerWorld(limits(prefix_cache=False))
        world.submit(range(10), 20)
        world.run()
        world.verify()
        assert len(begun(world)[0].blocks) == 8
        assert not any(isinstance(each, Extend) for output in world.outputs for each in output.operations)

    def test_grow_reserves_a_window_at_a_time(self) -> None:
        world = SchedulerWorld(limits(admission="grow", admission_window=8, prefix_cache=False))
        world.submit(range(10), 30)
        world.run()
        world.verify()
        extends = [each for output in world.outputs for each in output.operations if isinstance(each, Extend)]
        assert len(begun(world)[0].blocks) == 5
        assert [len(each.blocks) for each in extends] == [2, 2, 1]

    def test_grow_asks_for_no_more_than_it_needs_when_blocks_are_scarce(self) -> None:
        fields = {"admission": "grow", "admission_window": 8, "prefix_cache": False, "blocks": 11}
        world = SchedulerWorld(limits(**fields))
        world.submit(range(10), 30)
        world.submit(range(50, 60), 3)
        world.run()
        world.verify()
        assert world.scheduler.stats().requests_preempted == 0


class TestPreemption:
    @pytest.mark.parametrize("lag", [0, 1])
    @pytest.mark.parametrize("depth", [0, 2])
    @pytest.mark.parametrize("cache", [True, False])
    @pytest.mark.parametrize("snapshots", [None, 4])
    def test_a_pool_for_one_and_a_half_requests_finishes_both_as_if_alone(
        self, lag: int, depth: int, cache: bool, snapshots: int | None
    ) -> None:
        each = limits(
            blocks=14, admission="grow", admission_window=4, depth=depth, prefix_cache=cache,
            snapshots=snapshots or 0, needs_snapshot=snapshots is not None,
        )  # fmt: skip
        world = SchedulerWorld(each, lag=lag, accept=lambda request, position: position % 3)
        older = world.submit(range(12), 24)
        younger = world.submit(range(50, 62), 24)
        world.run()
        world.verify()
        assert world.scheduler.stats().requests_preempted > 0
        assert [begin.request for begin in begun(world)].count(older) == 1, "the oldest is never preempted"
        assert [begin.request for begin in begun(world)].count(younger) > 1
        assert list(world.endings) == [older, younger]

    def test_the_victim_is_the_youngest_that_holds_a_slot(self) -> None:
        world = SchedulerWorld(limits(blocks=12, admission="grow", admission_window=4, prefix_cache=False))
        for name in range(3):
            world.submit(range(name * 50, name * 50 + 8), 24)
        world.run()
        world.verify()
        assert [begin.request for begin in begun(world)].count(0) == 1
        assert list(world.endings) == [0, 1, 2]

    def test_the_youngest_is_the_last_to_arrive_not_the_last_admitted(self) -> None:
        world = SchedulerWorld(limits(blocks=12, admission="grow", admission_window=4, prefix_cache=False))
        first = world.submit(range(16), 4)
        world.tick()
        older = world.submit(range(50, 78), 20)
        younger = world.submit(range(80, 84), 40)
        world.run()
        world.verify()
        order = [begin.request for begin in begun(world)]
        assert order[:3] == [first, younger, older]
        assert world.scheduler.stats().requests_preempted > 0
        assert order.count(older) == 1

    def test_a_preempted_request_takes_no_place_in_the_queue(self) -> None:
        each = limits(blocks=14, admission="grow", admission_window=4, prefix_cache=False, queue=2)
        world = SchedulerWorld(each)
        world.submit(range(12), 24)
        world.submit(range(50, 62), 24)
        while not world.scheduler.stats().requests_preempted:
            world.tick()
        for more in range(each.slots + each.queue - 2):
            world.submit([more], 1)
        refused = world.submit([9], 1)
        world.run()
        world.verify()
        assert [name for name, ending in world.endings.items() if ending.reason == "error"] == [refused]

    def test_a_preempted_request_is_passed_by_nobody(self) -> None:
        world = SchedulerWorld(limits(blocks=12, admission="grow", admission_window=4, prefix_cache=False))
        world.submit(range(8), 30)
        victim = world.submit(range(50, 66), 30)
        for _ in range(20):
            world.tick()
        assert world.scheduler.stats().requests_preempted == 1
        small = world.submit([1], 1)
        world.run()
        world.verify()
        order = [begin.request for begin in begun(world)]
        assert order.index(small) > max(at for at, request in enumerate(order) if request == victim)

    def test_cached_tokens_are_those_of_the_first_admission(self) -> None:
        world = SchedulerWorld(limits(blocks=14, admission="grow", admission_window=4))
        world.submit(range(12), 24)
        world.submit(range(50, 62), 24)
        world.run()
        again = [begin for begin in begun(world) if begin.request == 1]
        assert again[-1].cached > 0
        assert world.endings[1].cached_tokens == 0
        assert world.scheduler.stats().cache_hits == 0


class TestQueue:
    def test_a_large_request_lets_small_ones_pass_and_then_holds_them(self) -> None:
        world = SchedulerWorld(limits(blocks=16, queue=1000))
        running = [world.submit([name], 4) for name in range(3)]
        world.tick()
        large = world.submit(range(60), 4)
        small = [world.submit([name], 4) for name in range(100, 300)]
        world.run()
        world.verify()
        order = [begin.request for begin in begun(world)]
        assert order[:3] == running
        assert order.index(large) == 3 + BYPASS
        assert order[4 + BYPASS :] == small[BYPASS:]

    def test_every_large_request_in_an_endless_stream_of_small_ones_is_served(self) -> None:
        rng = random.Random(3)
        world = SchedulerWorld(limits(blocks=30, queue=1000, admission="grow", admission_window=4))
        large: list[int] = []
        for tick in range(1500):
            if tick % 100 == 50:
                large.append(world.submit([rng.randrange(99) for _ in range(100)], 12))
            if len(world.submits) - len(world.endings) < 20:
                world.submit([rng.randrange(99) for _ in range(9)], rng.randint(1, 9))
            world.tick()
        order = [begin.request for begin in begun(world)]
        for name in large[:-1]:
            younger = sum(request > name for request in order[: order.index(name)])
            assert younger <= BYPASS
        world.run()
        world.verify()

    def test_a_pool_that_lost_its_blocks_is_an_error_and_no_hang(self) -> None:
        world = SchedulerWorld(limits(blocks=4))
        world.scheduler._held.pool.take(4)
        world.submit([1], 4)
        with pytest.raises(EngineError, match="admission deadlock") as caught:
            world.tick()
        assert caught.value.found == "0 of 4 blocks free"


class TestPrefixes:
    @pytest.mark.parametrize("seed", range(40))
    def test_a_prompt_attaches_to_all_that_earlier_ones_left(self, seed: int) -> None:
        """Against a brute-force search over the texts of earlier requests, which ran one at a time in a large pool."""
        rng = random.Random(seed)
        recurrent = seed % 2 == 1
        depth = rng.randint(0, 2)
        world = SchedulerWorld(
            limits(blocks=2000, snapshots=500 if recurrent else 0, needs_snapshot=recurrent, depth=depth),
            # A boundary that comes while the one before it is not known to be passed yet gets no snapshot.
            lag=0 if recurrent and depth == 2 else rng.randint(0, 1),
            pick=hashed_pick(3),
            accept=lambda request, position: position % 2,
        )
        left: list[list[int]] = []
        for _ in range(25):
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            if left and rng.random() < 0.7:
                source = rng.choice(left)
                tokens = source[: rng.randint(0, len(source))] + tokens
            name = world.submit(tokens, rng.randint(1, 12))
            world.run()
            limit = (len(tokens) - 1) // 4 * 4
            shared = [
                _common(tokens, text) // 4 * 4
                for text in left
                if not recurrent or _common(tokens[:limit], text) == len(text)
            ]
            assert world.endings[name].cached_tokens == min(limit, max(shared, default=0))
            rows = [*tokens, *world.replies[name]][:-1]
            passed = len(rows) // 4 * 4
            left += [tokens[:limit], rows[: passed if passed > len(tokens) else 0]] if recurrent else [rows]
        world.verify()

    def test_no_snapshot_no_reuse_although_the_pages_are_there(self) -> None:
        world = SchedulerWorld(limits(snapshots=1, needs_snapshot=True))
        for tokens in (range(10), range(50, 60), range(10)):
            world.submit(tokens, 2)
            world.run()
        world.verify()
        assert [begin.cached for begin in begun(world)] == [0, 0, 0]
        assert [miss.reason for miss in world.scheduler.last_misses] == [
            "never seen", "never seen", "snapshot evicted",
        ]  # fmt: skip

    def test_a_model_with_recurrent_state_and_no_arena_caches_nothing(self) -> None:
        world = SchedulerWorld(limits(needs_snapshot=True))
        for _ in range(2):
            world.submit(range(10), 2)
            world.run()
        world.verify()
        stats = world.scheduler.stats()
        assert (stats.cache_hits, stats.cache_misses, stats.blocks_in_use) == (0, 0, 0)

    def test_two_turns_of_an_agent_with_drafts_and_recurrent_state_are_exact(self) -> None:
        for cache in (True, False):
            each = limits(snapshots=8, needs_snapshot=True, depth=3, blocks=400, prefix_cache=cache)
            world = SchedulerWorld(each, lag=1, accept=lambda request, position: position % 4)
            text = list(range(40))
            for turn in range(4):
                name = world.submit(text, 17)
                world.run()
                assert (world.endings[name].cached_tokens > 0) == (cache and turn > 0)
                text = [*text, *world.replies[name], turn]
            world.verify()

    def test_snapshots_lie_at_the_deepest_cut_and_in_the_body_of_long_prompts(self) -> None:
        world = SchedulerWorld(limits(snapshots=8, needs_snapshot=True, blocks=4000, block_tokens=64))
        world.submit([token % 97 for token in range(2500)], 1)
        world.run()
        starts = [each.start for output in world.outputs for each in output.operations if hasattr(each, "start")]
        assert starts == [0, 3 * 512, 39 * 64]
        assert len(snapshots(world)) == 2
        other = world.submit([token % 97 for token in range(2400)] + [5] * 100, 1)
        world.run()
        world.verify()
        assert world.endings[other].cached_tokens == 3 * 512

    @pytest.mark.parametrize("recurrent", [False, True])
    @pytest.mark.parametrize("budget", [0, 8, 1])
    def test_choices_of_one_request_compute_their_prompt_once(self, recurrent: bool, budget: int) -> None:
        world = SchedulerWorld(limits(snapshots=4, needs_snapshot=recurrent, prefill_budget=budget, blocks=200))
        names = [world.submit(range(41), 50) for _ in range(4)]
        while not any(world.endings):
            world.tick()
        assert [begin.request for begin in begun(world)] == names, "they run together"
        world.run()
        world.verify()
        stats = world.scheduler.stats()
        assert stats.prompt_tokens_computed == 41 + 3
        assert (stats.cache_hits, stats.cache_misses) == (3, 1)

    def test_a_prefix_is_not_reused_in_the_tick_that_computes_it(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(41), 5)
        world.submit(range(41), 5)
        assert [type(each).__name__ for each in world.tick().operations] == ["Begin", "Prefill"]
        assert [type(each).__name__ for each in world.tick().operations] == ["Begin", "Prefill", "Decode"]

    def test_a_request_waits_for_no_prefix_that_it_may_not_use(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(41), 5)
        world.submit(range(41), 5, use_cache=False)
        assert [type(each).__name__ for each in world.tick().operations] == ["Begin", "Prefill"] * 2

    def test_nobody_waits_for_a_prefix_that_will_not_be_published(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(41), 5, use_cache=False)
        world.submit(range(41), 5)
        assert [type(each).__name__ for each in world.tick().operations] == ["Begin", "Prefill"] * 2

    @pytest.mark.parametrize(
        ("recurrent", "known", "first", "second"),
        [
            (False, [], [1, 1, 1, 1, 1], [1, 1, 1, 1]),
            (False, [1, 1, 1, 1, 7], [2, 2, 2, 2, 5, 5, 5, 5, 9], [1, 1, 1, 1, 5, 5, 5, 5, 9]),
            (True, [*range(9)], [*range(6)], [*range(9)]),
        ],
        ids=["no token would be left", "the same block after another prefix", "a longer prefix is known"],
    )
    def test_nobody_waits_for_a_prefix_of_no_use(
        self, recurrent: bool, known: list[int], first: list[int], second: list[int]
    ) -> None:
        world = SchedulerWorld(limits(snapshots=9, needs_snapshot=recurrent))
        if known:
            world.submit(known, 1)
            world.run()
        world.submit(first, 5)
        world.submit(second, 5)
        assert [type(each).__name__ for each in world.tick().operations].count("Begin") == 2

    def test_nobody_waits_for_more_than_the_common_part(self) -> None:
        world = SchedulerWorld(limits(prefill_budget=8))
        world.submit(range(12), 5)
        world.submit([*range(4), *range(50, 54)], 5)
        world.tick()
        world.tick()
        assert [begin.cached for begin in begun(world)] == [0, 4]

    def test_who_opts_out_neither_attaches_nor_leaves_anything(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(10), 4, use_cache=False)
        world.run()
        assert world.scheduler.stats().blocks_in_use == 0
        world.submit(range(10), 4)
        world.run()
        world.submit(range(10), 4, use_cache=False)
        world.run()
        world.verify()
        assert [world.endings[name].cached_tokens for name in range(3)] == [0, 0, 0]

    def test_each_miss_says_why(self) -> None:
        world = SchedulerWorld(limits(blocks=5))
        for tokens in (range(90, 94), range(10), range(50, 62), range(10)):
            world.submit(tokens, 8)
            world.run()
        world.verify()
        reasons = [(miss.request, miss.reason) for miss in world.scheduler.last_misses]
        assert reasons == [(0, "below a block"), (1, "never seen"), (2, "never seen"), (3, "evicted")]
        assert world.scheduler.stats().cache_misses == 4

    def test_cancelled_and_shed_snapshots_free_their_arena(self) -> None:
        world = SchedulerWorld(limits(snapshots=2, needs_snapshot=True))
        world.submit(range(9), 2)
        world.run()
        held = world.scheduler.stats().snapshots_in_use
        world.submit(range(9), 30)
        world.tick()
        world.cancel(1)
        world.run()
        world.verify()
        assert world.scheduler.stats().snapshots_in_use == held == 1

    def test_the_snapshot_of_a_cancelled_prompt_frees_its_arena(self) -> None:
        """Another request's block stands for the first tokens, so that the snapshot has no node to belong to yet."""
        for ends in ("cancelled", "length"):
            world = SchedulerWorld(limits(snapshots=2, needs_snapshot=True))
            world.submit(range(9), 2)
            world.run()
            name = world.submit([*range(4), *range(50, 59)], 5)
            world.tick()
            assert world.scheduler.stats().snapshots_in_use == 2
            if ends == "cancelled":
                world.cancel(name)
            world.run()
            world.verify()
            assert world.endings[name].reason == ends
            assert world.scheduler.stats().snapshots_in_use == (1 if ends == "cancelled" else 2)

    @pytest.mark.parametrize(("match", "cached"), [(True, 16), (False, 8)])
    def test_decoded_rows_are_kept_only_where_a_prefill_would_have_given_the_same(
        self, match: bool, cached: int
    ) -> None:
        world = SchedulerWorld(limits(decode_rows_match_prefill=match))
        first = world.submit(range(10), 9)
        world.run()
        turn = [*range(10), *world.replies[first], 7, 7, 7]
        world.submit(turn, 2)
        world.run()
        assert begun(world)[1].cached == cached
        world.submit([*turn, 8], 2)
        world.run()
        assert begun(world)[2].cached == 20, "the second prompt was prefilled, the first reply within it too"
        world.verify()

    def test_a_preempted_reply_comes_back_as_a_prompt_and_may_be_kept(self) -> None:
        each = limits(blocks=12, admission="grow", admission_window=4, decode_rows_match_prefill=False)
        world = SchedulerWorld(each, lag=1)
        for start in range(3):
            world.submit(range(start, start + 9), 20)
        world.run()
        assert world.scheduler.stats().requests_preempted
        world.verify()

    def test_a_cancelled_reply_is_not_kept_and_its_prompt_is(self) -> None:
        world = SchedulerWorld(limits())
        world.submit(range(9), 40)
        for _ in range(20):
            world.tick()
        world.cancel(0)
        world.run()
        assert world.scheduler.stats().blocks_in_use == 2

    def test_the_memory_of_misses_is_bounded(self) -> None:
        world = SchedulerWorld(limits())
        for name in range(100):
            world.submit([name], 1)
            world.run()
        assert [miss.request for miss in world.scheduler.last_misses] == list(range(36, 100))


class TestTurns:
    """Where a conversation with window or recurrent state goes on from."""

    def world(self, **fields: object) -> SchedulerWorld:
        each = limits(**({"blocks": 4000, "block_tokens": 8, "snapshots": 64, "needs_snapshot": True} | fields))
        return SchedulerWorld(each, lag=1, accept=lambda request, position: position % (each.depth + 1))

    @pytest.mark.parametrize("depth", [0, 1, 3])
    def test_the_next_turn_finds_the_state_behind_the_reply(self, depth: int) -> None:
        world = self.world(depth=depth, block_tokens=16)
        first = world.submit(range(100), 60)
        world.run()
        second = world.submit([*range(100), *world.replies[first], 7, 7], 4)
        world.run()
        world.verify()
        assert world.endings[second].cached_tokens == 144
        assert world.scheduler.stats().snapshots_in_use <= 5

    @pytest.mark.parametrize(
        "fields",
        [{"decode_rows_match_prefill": False}, {"snapshots": 15}],
        ids=["decoded state has other bits", "an arena that replies would fill"],
    )
    def test_a_reply_that_may_not_be_kept_leaves_the_state_of_its_prompt(self, fields: dict[str, object]) -> None:
        world = self.world(**fields)
        first = world.submit(range(100), 60)
        world.run()
        second = world.submit([*range(100), *world.replies[first], 7, 7], 4)
        world.run()
        world.verify()
        assert world.endings[second].cached_tokens == 96

    def test_a_reply_holds_two_snapshots_at_most(self) -> None:
        world = self.world()
        for start in range(4):
            world.submit(range(100 * start, 100 * start + 9), 200)
        most = 0
        while not world.scheduler.idle or not world.outputs:
            world.tick()
            most = max(most, world.scheduler.stats().snapshots_in_use)
        world.verify()
        assert most <= 4 * (1 + 2)

    def test_a_template_that_begins_the_reply_otherwise_finds_the_end_of_the_question(self) -> None:
        """The prompt ends in an opener of a few tokens that the history does not have; a block's end lies within."""
        world = self.world(decode_rows_match_prefill=False)
        question, opener = list(range(62)), [90, 91, 92]
        first = world.submit([*question, *opener], 5, turns=(30, 62))
        world.run()
        second = world.submit([*question, 95, *world.replies[first], 96, 7, 7, *opener], 4, turns=(30, 62, 69))
        world.run()
        world.verify()
        assert world.endings[second].cached_tokens == 56

    def test_other_conversations_share_the_first_message(self) -> None:
        for heads, cached in ((True, 40), (False, 0)):
            world = self.world(snapshot_heads=heads)
            for start in (100, 200):
                name = world.submit([*range(45), *range(start, start + 60)], 2, turns=(45, 80))
                world.run()
            world.verify()
            assert world.endings[name].cached_tokens == cached

    def test_no_snapshot_below_the_minimum(self) -> None:
        world = self.world(snapshot_least=50)
        for _ in range(2):
            world.submit(range(49), 30, turns=(20,))
            world.run()
        world.verify()
        assert [ending.miss for ending in world.endings.values()] == ["below the minimum"] * 2
        assert not [each for each in snapshots(world) if each.position < 0]
        longer = [*range(45), *range(100, 145)]
        for tokens in (longer, longer):
            name = world.submit(tokens, 2, turns=(20, 60))
            world.run()
        assert world.endings[name].cached_tokens == 88

    def test_what_is_wanted_most_is_kept_where_the_arena_is_small(self) -> None:
        world = self.world(snapshots=1, snapshot_heads=True)
        for tokens in ([*range(100)], [*range(100)]):
            name = world.submit(tokens, 2, turns=(30, 60))
            world.run()
        world.verify()
        assert world.endings[name].cached_tokens == 96


class TestMisses:
    def ending(self, world: SchedulerWorld, tokens: list[int], **fields: object) -> tuple[str, int, int]:
        name = world.submit(tokens, 2, **fields)
        world.run()
        ending = world.endings[name]
        return ending.miss, ending.cached_tokens, ending.known_tokens

    def test_an_ending_says_why_nothing_was_reused(self) -> None:
        world = SchedulerWorld(limits(snapshots=1, needs_snapshot=True, blocks=200))
        assert self.ending(world, [*range(3)]) == ("below a block", 0, 0)
        assert self.ending(world, [*range(20)]) == ("never seen", 0, 0)
        assert self.ending(world, [*range(20)]) == ("", 16, 16)
        assert self.ending(world, [*range(10), *range(50, 60)]) == ("no snapshot", 0, 8)
        assert self.ending(world, [*range(20)]) == ("snapshot evicted", 0, 16)
        assert self.ending(world, [*range(20)], use_cache=False) == ("opted out", 0, 0)
        stats = world.scheduler.stats()
        assert dict(zip(MISS_REASONS, stats.cache_misses_by, strict=True)) == {
            "below a block": 1, "below the minimum": 0, "never seen": 1, "evicted": 0, "no snapshot": 1,
            "snapshot evicted": 1,
        }  # fmt: skip
        assert (stats.cache_hits, stats.cache_misses, stats.cache_unasked) == (1, 4, 1)

    def test_a_cache_that_is_off_says_so(self) -> None:
        assert self.ending(SchedulerWorld(limits(prefix_cache=False)), [*range(20)]) == ("off", 0, 0)

    def test_how_far_rows_were_known_is_told_where_their_state_was_not(self) -> None:
        world = SchedulerWorld(limits(snapshots=8, needs_snapshot=True, blocks=200, slots=1))
        self.ending(world, [*range(40)], turns=(10,))
        assert self.ending(world, [*range(30), *range(50, 60)]) == ("", 8, 28)


def _common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, (one, two) in enumerate(zip(left, right, strict=False)) if one != two), min(len(left), len(right))
    )
