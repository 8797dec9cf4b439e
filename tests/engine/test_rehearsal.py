"""What is run before READY."""

from collections.abc import Callable

from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.rehearsal import warm
from dgpp_core.testing.world import World


def test_warming_meets_every_kind_of_row_count_and_leaves_the_engine_empty(make_world: Callable[..., World]) -> None:
    engine = make_world(EngineSettings(max_concurrency=2, kv_capacity=128, block_tokens=16)).engine
    counts: list[int] = []
    forward = engine.model.forward

    def watched(batch, state):  # type: ignore[no-untyped-def]
        if not batch.keep_rows:
            counts.extend(batch.counts)
        return forward(batch, state)

    engine.model.forward = watched  # type: ignore[method-assign]
    warm(engine, 40)
    assert sorted(set(counts)) == [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 40]
    assert not engine.slots
    warm(engine, 100_000)
    assert max(counts) == engine.geometry.context
