"""Launching ahead of reading: the same results, bounds that become exact, and faults that come with their step."""

from collections.abc import Callable

import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release, StepResult
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.world import World

PROMPT = tuple(range(1, 21))
SEEDED = SamplingParams(temperature=0.9, seed=3)
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=2.0)


@pytest.fixture
def engine(make_world: Callable[..., World]) -> Engine:
    return make_world().engine


def tokens(results: list[StepResult]) -> list[int]:
    return [token for result in results for each in result.slots for token in each.tokens]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALISED])
def test_steps_launched_before_any_is_read_commit_what_steps_read_one_by_one_do(
    make_world: Callable[..., World], params: SamplingParams
) -> None:
    begin: list[Operation] = [Begin(0, 7, PROMPT, params, -1, (1, 2), 0), Prefill(0, 0, 20, True)]
    plain, ahead = make_world().engine, make_world().engine
    expected = [plain.execute(tick, [Decode((0,), 0)] if tick else begin) for tick in range(8)]
    pending = [ahead.launch(tick, [Decode((0,), 0)] if tick else begin) for tick in range(8)]
    assert [each.wait() for each in pending] == expected
    assert len(tokens(expected)) == 8


def test_the_bound_is_the_devices_length_once_everything_is_read(engine: Engine) -> None:
    engine.execute(0, [Begin(0, 7, PROMPT, GREEDY, -1, (1, 2), 0), Prefill(0, 0, 20, True)])
    first, second = engine.launch(1, [Decode((0,), 0)]), engine.launch(2, [Decode((0,), 0)])
    assert (second.wait().tick, first.wait().tick) == (2, 1)
    assert engine.slots[0].bound == int(engine.registers.lengths[0]) == 22


def test_a_step_read_after_its_slot_was_given_away_counts_for_nobody_else(engine: Engine) -> None:
    engine.execute(0, [Begin(0, 7, PROMPT, PENALISED, -1, (1, 2), 0), Prefill(0, 0, 20, True)])
    late = engine.launch(1, [Decode((0,), 0)])
    engine.launch(2, [Release(0), Begin(0, 8, PROMPT[::-1], PENALISED, -1, (3, 4), 0), Prefill(0, 0, 20, True)])
    assert late.wait().slots[0].request == 7
    counts = engine.sampler._state(0).counts
    assert counts is not None
    assert int(counts.sum()) == len(PROMPT), "a token of request 7 in the counts of request 8"
    assert engine.slots[0].bound == 20


def test_a_row_without_a_finite_logit_is_named_when_its_step_is_read(engine: Engine) -> None:
    engine.execute(0, [Begin(0, 7, PROMPT, GREEDY, -1, (1, 2), 0), Prefill(0, 0, 20, True)])
    honest, broken = engine.model.logits, torch.full((1, 512), torch.nan)
    first = engine.launch(1, [Decode((0,), 0)])
    engine.model.logits = lambda hidden: broken  # type: ignore[method-assign]
    second = engine.launch(2, [Decode((0,), 0)])
    engine.model.logits = honest  # type: ignore[method-assign]
    assert first.wait().slots[0].request == 7
    with pytest.raises(EngineError) as error:
        second.wait()
    assert error.value.where == "slot 0, position 22"
