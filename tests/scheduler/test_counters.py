from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld


def test_counters_of_a_drafted_run() -> None:
    limits = Limits(slots=2, blocks=40, block_tokens=4, max_context=64, depth=2, prefix_cache=False)
    world = SchedulerWorld(limits, accept=lambda request, position: 1)
    world.submit([1, 2, 3, 4, 5], 6)
    world.submit([9, 9], 1)
    world.run()
    stats = world.scheduler.stats()
    assert (stats.requests_finished, stats.requests_cancelled, stats.tokens_generated) == (2, 0, 7)
    assert (stats.prompts_prefilled, stats.prompt_tokens, stats.prompt_tokens_computed) == (2, 7, 7)
    # 5 tokens after the first: steps of 2, 2 and 2, the last one cut to 1
    assert (stats.decode_steps, stats.decode_rows) == (3, 9)
    assert (stats.draft_rounds, stats.draft_tokens, stats.draft_accepted) == (3, 6, 3)
    assert (stats.drafted_at, stats.accepted_at) == ((3, 3), (3, 0))
    assert (stats.active, stats.prefilling, stats.queued, stats.blocks_in_use) == (0, 0, 0, 0)


def test_gauges_follow_a_prompt() -> None:
    limits = Limits(slots=1, blocks=40, block_tokens=4, max_context=64, prefill_budget=3)
    world = SchedulerWorld(limits)
    name = world.submit(range(8), 4)
    world.submit([1], 4)
    world.tick()
    stats = world.scheduler.stats()
    assert (stats.active, stats.prefilling, stats.queued, stats.blocks_in_use) == (0, 1, 1, 3)
    (progress,) = stats.prefills
    assert (progress.id, progress.slot, progress.prompt_tokens, progress.processed_tokens) == (name, 0, 8, 3)
    world.tick()
    world.tick()
    stats = world.scheduler.stats()
    assert (stats.active, stats.prefilling, stats.queued, stats.prefills) == (1, 0, 1, ())


def test_preempted_work_is_counted_once_as_a_prompt() -> None:
    limits = Limits(slots=2, blocks=10, block_tokens=2, max_context=64, admission="grow", admission_window=2)
    world = SchedulerWorld(limits)
    world.submit([1, 2, 3, 4], 12)
    world.submit([5, 6, 7, 8], 12)
    world.run()
    world.verify()
    stats = world.scheduler.stats()
    assert stats.requests_preempted > 0
    assert (stats.prompts_prefilled, stats.prompt_tokens, stats.requests_finished) == (2, 8, 2)
