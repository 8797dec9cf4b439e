"""The engine's contract with the scheduler: what it refuses, and what a step leaves behind."""

from collections.abc import Callable

import pytest
import torch

from dgpp_core.api import EngineError
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.operations import Begin, Decode, Extend, Operation, Prefill, Release, Snapshot
from dgpp_core.engine.rehearsal import rehearse
from dgpp_core.sampling.params import GREEDY
from dgpp_core.testing.world import World

PROMPT = tuple(range(1, 21))
BEGIN = Begin(0, 7, PROMPT, GREEDY, -1, (1, 2), 0)


@pytest.fixture
def engine(make_world: Callable[..., World]) -> Engine:
    return make_world().engine


@pytest.mark.parametrize(
    ("operations", "what"),
    [
        ([Prefill(0, 0, 4, False)], "slot 0 holds no request"),
        ([Decode((0,), 0)], "slot 0 holds no request"),
        ([Snapshot(2, 0)], "slot 2 holds no request"),
        ([BEGIN, BEGIN], "slot 0 is taken"),
        ([BEGIN, Prefill(0, 3, 4, False)], "prefill of slot 0 at 3"),
        ([BEGIN, Prefill(0, 0, 21, False)], "prefill of slot 0 at 0"),
        ([Begin(0, 7, PROMPT, GREEDY, -1, (1,), 0), Prefill(0, 0, 20, True)], "slot 0 would write rows up to 20"),
        ([BEGIN, Prefill(0, 0, 20, True), Decode((0,), 3)], "a step of depth 3"),
        ([BEGIN, Extend(0, tuple(range(3, 90)))], "slot 0 would have 89 blocks"),
    ],
)  # fmt: skip
def test_an_operation_that_breaks_the_contract_is_named(engine: Engine, operations: list[Operation], what: str) -> None:
    with pytest.raises(EngineError) as error:
        engine.execute(0, operations)
    assert what in str(error.value)


def test_rows_stop_at_the_end_of_the_block_table(engine: Engine) -> None:
    engine.execute(0, [BEGIN, Prefill(0, 0, 20, True)])
    for _ in range(12):
        engine.execute(0, [Decode((0,), 0)])
    with pytest.raises(EngineError, match="rows up to 33"):
        engine.execute(0, [Decode((0,), 0)])
    assert engine.execute(0, [Extend(0, (3,)), Decode((0,), 0)]).slots[0].request == 7


def test_a_released_slot_serves_the_next_request_as_if_fresh(engine: Engine) -> None:
    def reply(request: int, prompt: tuple[int, ...]) -> list[int]:
        operations: list[Operation] = [Begin(0, request, prompt, GREEDY, -1, (1, 2, 3), 0)]
        operations.append(Prefill(0, 0, len(prompt), True))
        tokens: list[int] = []
        for _ in range(6):
            tokens += engine.execute(0, operations).slots[0].tokens
            operations = [Decode((0,), 0)]
        engine.execute(0, [Release(0)])
        return tokens

    first = reply(1, PROMPT)
    assert reply(2, PROMPT[::-1]) != first
    assert reply(3, PROMPT) == first


def test_the_rehearsal_sees_a_model_whose_rows_depend_on_their_neighbours(engine: Engine) -> None:
    assert rehearse(engine, 60, 512)
    honest = engine.model.forward
    engine.model.forward = lambda batch, state: honest(batch, state) * (1 + 1e-6 * len(batch.counts))  # type: ignore[method-assign]
    assert not rehearse(engine, 60, 512)
    assert not engine.slots


def test_logits_that_are_not_finite_end_the_engine_by_name(engine: Engine) -> None:
    engine.model.logits = lambda hidden: torch.full((hidden.shape[0], 512), torch.nan)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="slot 0"):
        engine.execute(0, [BEGIN, Prefill(0, 0, 20, True)])
