"""Depths that follow the drafter's confidence: replies are those of plain decoding, and rows are saved."""

from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Decode, StepResult
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World

PLAIN = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, mtp=False)
DEEPEST = msgspec.structs.replace(PLAIN, mtp=True, mtp_depth=5)
SCHEDULED = msgspec.structs.replace(DEEPEST, mtp_schedule=True, mtp_schedule_lambda=0.08, mtp_schedule_row_ms=8.0)
SEEDED = SamplingParams(temperature=0.8, seed=3)


def replies(world: World, ways: tuple[SamplingParams, ...]) -> list[list[int]]:
    source = torch.Generator().manual_seed(8)
    asked = [
        world.submit(torch.randint(512, (length,), generator=source).tolist(), 10, params=params)
        for length, params in zip((21, 3, 40), ways, strict=False)
    ]
    found = world.run()
    return [found[request].tokens for request in asked]


def depths(world: World) -> list[int]:
    """Of the steps that the world launches from now on."""
    found: list[int] = []
    launch = world.engine.launch

    def noted(tick, operations):  # type: ignore[no-untyped-def]
        found.extend(op.depth for op in operations if isinstance(op, Decode))
        return launch(tick, operations)

    world.engine.launch = noted  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("ways", "static"), [((GREEDY,), False), ((GREEDY,) * 3, True), ((GREEDY, SEEDED), True)],
    ids=["alone", "together", "seeded"],
)  # fmt: skip
def test_no_token_depends_on_the_depths_that_confidence_chose(
    served: LoadedModel, checkpoint: Path, ways: tuple[SamplingParams, ...], static: bool
) -> None:
    plain = replies(World.from_checkpoint(served, checkpoint, PLAIN), ways)
    world = World.from_checkpoint(served, checkpoint, SCHEDULED, static=static)
    chosen = depths(world)
    assert replies(world, ways) == plain
    assert {5} < set(chosen) <= {1, 2, 4, 5}
    assert chosen[0] == 5, "nothing is known of the first drafts"


def test_ranks_choose_the_same_depths(served: LoadedModel, checkpoint: Path) -> None:
    """Every tick compares operations and results, confidence included, to the bit."""
    plain = replies(TensorParallelWorld.load(served, checkpoint, PLAIN, 2), (GREEDY,) * 2)
    world = TensorParallelWorld.load(served, checkpoint, SCHEDULED, 2)
    assert replies(world, (GREEDY,) * 2) == plain
    stats = world.scheduler.stats()
    assert stats.drafted_at[0] > stats.drafted_at[4] > 0


def test_results_say_what_the_head_says_of_the_drafts_that_come_next(served: LoadedModel, checkpoint: Path) -> None:
    """To the bit, of each request in a step of several."""
    world = World.from_checkpoint(served, checkpoint, SCHEDULED)
    drafter, execute = world.engine.drafter, world.engine.launch
    assert drafter is not None
    said: list[torch.Tensor] = []
    pairs: list[tuple[StepResult, torch.Tensor]] = []
    drafted = drafter.drafted  # type: ignore[attr-defined]

    def noted(*arguments):  # type: ignore[no-untyped-def]
        drafts, sure = drafted(*arguments)
        said.append(sure)
        return drafts, sure

    def launched(tick, operations):  # type: ignore[no-untyped-def]
        pending = execute(tick, operations)
        if operations and isinstance(operations[-1], Decode):
            pairs.append((pending.wait(), said[-1]))
        return pending

    drafter.drafted = noted  # type: ignore[attr-defined]
    world.engine.launch = launched  # type: ignore[method-assign]
    replies(world, (GREEDY,) * 2)
    assert len(pairs) > 5
    for result, sure in pairs:
        found = [answer.confidence for answer in result.slots if answer.drafted]
        assert found == [tuple(row) for row in sure.tolist()]
