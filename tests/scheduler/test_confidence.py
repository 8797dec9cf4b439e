"""The depth of a step follows how sure the drafter is: against every depth tried, and a mean taken in fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgpp_core.engine.operations import Decode, SlotResult
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.confidence import SHARE, ConfidentDepth, survivals
from dgpp_core.scheduler.limits import Limits
from dgpp_core.testing.scheduler_world import SchedulerWorld

BASE, ROW = 28.0, 8.0
LOGITS = st.floats(-12, 12, width=32)


def fates(*confidences: Sequence[float]) -> list[list[float]]:
    """The survivals of each request's drafts."""
    return [survivals(each) for each in confidences]


def best(confidences: list[list[float]], worth: float, deepest: int, scales: Sequence[float] = (1.0,)) -> int:
    """The depth whose drafts are worth most beyond their time, the shallower of equals, by trying all."""
    probabilities = torch.tensor(confidences, dtype=torch.float64).sigmoid()
    standing = (probabilities * torch.tensor(scales, dtype=torch.float64).unsqueeze(1)).cumprod(1)

    def gain(depth: int) -> float:
        return float(standing[:, :depth].sum()) - worth * ROW * len(confidences) * depth

    return max(range(deepest + 1), key=lambda depth: (gain(depth), -depth))


@given(st.lists(st.lists(LOGITS, min_size=5, max_size=5), min_size=1, max_size=6), st.floats(0.005, 0.12))
def test_no_other_depth_is_worth_more(confidences: list[list[float]], worth: float) -> None:
    every = ConfidentDepth(range(6), BASE, ROW, worth, adapt=False)
    chosen, wanted = every.choose(fates(*confidences)), best(confidences, worth, 5)
    if chosen != wanted:  # no more than rounding apart: a tie
        standing = torch.tensor(confidences, dtype=torch.float64).sigmoid().cumprod(1).mean(0)
        between = standing[min(chosen, wanted) : max(chosen, wanted)]
        assert torch.allclose(between, torch.full_like(between, worth * ROW), rtol=1e-12)
    rungs = ConfidentDepth((2, 4, 5), BASE, ROW, worth, adapt=False)
    assert rungs.choose(fates(*confidences)) == min(rung for rung in (2, 4, 5) if rung >= chosen)


def test_survival_of_the_released_heads_extremes() -> None:
    assert survivals([0.0, 0.0]) == [0.5, 0.25]
    assert survivals([3e38, -3e38, 3e38]) == [1.0, 0.0, 0.0]
    assert survivals([]) == []
    assert survivals([0.0, 0.0, 3e38], 0.5) == [0.25, 0.0625, 0.03125]


def test_the_rule_by_hand() -> None:
    """One draft in two of the first, one in four of the second: worth 0.36 and 0.36 tokens a row at 0.045 a ms."""
    depth = ConfidentDepth((1, 2, 3, 4), BASE, ROW, 0.045, adapt=False)
    assert depth.choose(fates([0.0, 0.0, 9.0, 9.0])) == 1
    assert depth.choose(fates([0.0, 4.0, -1.0, 9.0])) == 2
    assert depth.choose(fates([-9.0, 9.0, 9.0, 9.0])) == 1, "never below the least"
    assert depth.choose(fates([0.0, 0.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0])) == 4, "the mean of both"
    assert depth.choose(fates([-9.0, 0.0, 9.0, 9.0], ())) == 4, "nothing is known of one"
    nothing = ConfidentDepth((1, 2, 3, 4), BASE, ROW, 0.0, adapt=False)
    assert nothing.worth == 1 / 36


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=200), st.sampled_from([0.0, 0.045]))
def test_the_worth_of_time_follows_what_steps_commit(steps: list[tuple[int, int]], worth: float) -> None:
    depth = ConfidentDepth((1, 2), BASE, ROW, worth, adapt=True)
    least = value = Fraction(worth) if worth else 1 / (Fraction(BASE) + Fraction(ROW))
    for committed, rows in steps:
        depth.note(committed, rows)
        value = max(least, (63 * value + committed / (Fraction(BASE) + rows * Fraction(ROW))) / 64)
        assert depth.worth == pytest.approx(float(value), rel=1e-12)
    fixed = ConfidentDepth((1, 2), BASE, ROW, worth, adapt=False)
    fixed.note(30, 30)
    assert fixed.worth == float(least)
    assert SHARE == 1 / 64


def limits(**fields: object) -> Limits:
    held = {"slots": 3, "blocks": 400, "block_tokens": 4, "max_context": 500, "prefix_cache": False}
    chosen = {"depth": 4, "ladder": (1, 2, 3, 4), "confident": True, "worth": 0.03}
    return Limits(**(held | chosen | fields))  # type: ignore[arg-type]


def run(bounds: Limits, lag: int = 0, temperatures: tuple[float, ...] = (0.0,) * 4) -> SchedulerWorld:
    """Replies of 120 tokens, and of 30 where they are drawn."""
    world = SchedulerWorld(bounds, lag=lag, accept=lambda request, position: position // 50 % 4)
    for number, temperature in enumerate(temperatures):
        params = SamplingParams(temperature=temperature)
        world.submit(range(number, number + 5), 30 if temperature else 120, params=params)
    world.run()
    world.verify()
    return world


def depths(world: SchedulerWorld) -> list[int]:
    return [each.depth for output in world.outputs for each in output.operations if isinstance(each, Decode)]


def replayed(world: SchedulerWorld, scales: Mapping[int, float] = MappingProxyType({})) -> list[int]:
    """The depths that follow from the recorded results, by trying every depth at every step; scales by request."""
    known: dict[int, SlotResult] = {}
    value, found = 0.03, []
    for inputs, output in zip(world.inputs, world.outputs, strict=True):
        for result in inputs.results:
            known |= {answer.request: answer for answer in result.slots}
            if drafted := [answer for answer in result.slots if answer.drafted]:
                rows, tokens = sum(1 + a.drafted for a in drafted), sum(len(a.tokens) for a in drafted)
                value = max(0.03, value + (tokens / (BASE + rows * ROW) - value) / 64)
        holders = {answer.slot: answer for answer in known.values()}
        for step in output.operations:
            if isinstance(step, Decode):
                sure = [list(holders[slot].confidence) for slot in step.slots]
                factors = [scales.get(holders[slot].request, 1.0) for slot in step.slots]
                found.append(max(1, best(sure, value, 4, factors)) if all(sure) else 4)
    return found


def test_steps_have_the_depths_that_their_results_ask_for_and_replies_do_not_depend_on_them() -> None:
    world = run(limits())
    assert depths(world) == replayed(world)
    assert set(depths(world)) == {1, 2, 3, 4}
    assert world.scheduler.digest == run(limits()).scheduler.digest
    rows = [sum(depths(each)) for each in (world, run(limits(ladder=())))]
    assert rows[0] < rows[1]


def test_what_is_said_to_have_no_effect_has_none() -> None:
    """See `dgpp_core.scheduler.sizing.idle_schedule`; the others of each pair show that the runs could tell."""

    def chosen(**fields: object) -> list[int]:
        return depths(run(limits(**fields)))

    assert chosen(confident=False, worth=9.0, adapt=False) == chosen(confident=False, worth=0.0)
    assert chosen(worth=9.0) != chosen(worth=0.0)
    assert chosen(adapt=False, base_ms=1.0) == chosen(adapt=False)
    assert chosen(base_ms=1.0) != chosen()


def test_what_is_said_of_drafts_counts_less_where_a_reply_draws_its_tokens() -> None:
    """The head speaks of the likeliest tokens."""
    rows = []
    for scale in (1.0, 0.7, 0.4):
        world = run(limits(sampled_scale=scale), temperatures=(0.7, 0.0))
        drawn = next(answer.request for inputs in world.inputs for result in inputs.results for answer in result.slots)
        assert depths(world) == replayed(world, {drawn: scale})
        steps = [each for output in world.outputs for each in output.operations if isinstance(each, Decode)]
        rows.append(sum(step.depth for step in steps if len(step.slots) == 2) / sum(len(s.slots) == 2 for s in steps))
    assert rows[0] > rows[1] > rows[2]


def test_a_step_that_is_planned_before_the_last_one_was_read_takes_all() -> None:
    """What was said of its drafts is not known yet, so an engine that goes by it reads first."""
    assert limits().reads_first
    assert not limits(confident=False).reads_first
    assert not limits(ladder=()).reads_first
    assert not limits(ladder=(4,)).reads_first, "there is nothing to choose"
    assert depths(run(limits(ladder=(4,)), lag=1)) == depths(run(limits(ladder=()), lag=1))
    assert set(depths(run(limits(), lag=1, temperatures=(0.0,)))[:-1]) == {4}
