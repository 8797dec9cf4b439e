"""Decode steps from static buffers, without capture: what a CUDA graph replays, on a CPU.

The model is the generated one: paged, window and recurrent state and a drafter.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from dgpp_core.api import ConfigError, StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.families import MOST_FAMILIES, family_sizes
from dgpp_core.engine.graphs import StaticRunner
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release
from dgpp_core.host.loading import LoadedModel
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.world import World

SETTINGS = EngineSettings(max_concurrency=8, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.01, mtp_depth=2)
PROMPTS = [
    torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 33, 16, 41, 1, 20)
]


def world(toy: LoadedModel, folder: Path, settings: EngineSettings = SETTINGS, lag: int = 0) -> World:
    return World.from_checkpoint(toy, folder, settings, lag=lag, static=True)


def test_families_leave_less_than_a_third_of_their_segments_inert() -> None:
    assert family_sizes(16) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert family_sizes(1) == [1]
    for slots in range(1, 100):
        sizes = family_sizes(slots)
        assert sizes[-1] == slots
        for live in range(1, slots + 1):
            size = next(size for size in sizes if size >= live)
            assert 3 * (size - live) < size


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lag", [0, 1])
def test_exactness_matrix(toy: LoadedModel, toy_checkpoint: Path, depth: int, lag: int) -> None:
    axes = Axes(chunks=(16,), depths=(depth,), lags=(lag,), company=(0, 2, 3), max_tokens=10)

    def make(settings: EngineSettings, wanted: int, world: int) -> World:
        oracle = settings.prefill_budget_tokens == 0
        return World.from_checkpoint(toy, toy_checkpoint, settings, lag=wanted, static=not oracle)

    report = exactness_matrix(make, PROMPTS, axes)
    assert not report.differences
    assert report.hits
    assert report.evictions
    assert bool(report.accepted) == bool(depth)


def test_inert_segments_leave_no_trace(toy: LoadedModel, toy_checkpoint: Path) -> None:
    """Five requests run in a family of six: what belongs to slot 0, which takes no part, is untouched."""
    engine = world(toy, toy_checkpoint).engine
    begin: list[Operation] = []
    for slot in range(6):
        blocks = tuple(range(1 + 4 * slot, 5 + 4 * slot))
        prompt = tuple(PROMPTS[slot])
        begin += [Begin(slot, slot, prompt, GREEDY, -1, blocks, 0), Prefill(slot, 0, len(prompt), True)]
    engine.execute(0, begin)
    held = engine.registers

    def bystander() -> list[torch.Tensor]:
        """Everything of slot 0, which takes part in no step."""
        parts = [held.lengths[0], held.candidates[0], held.last_tokens[0], held.drafts[0], held.tables[0]]
        for name, pool in engine.state.pools.items():
            parts.append(pool[:, 1:5] if name[0] in "kvdl" else pool[:, 0])
        return [part.clone() for part in parts]

    tokens: list[torch.Tensor] = []
    forward = engine.model.forward
    engine.model.forward = lambda batch, state: tokens.append(batch.tokens) or forward(batch, state)  # type: ignore
    before = bystander()
    for slots in ((1, 2, 3, 4, 5), (2,), (1, 2, 3, 4, 5)):
        engine.execute(1, [Decode(slots, 2)])
    assert all(torch.equal(a, b) for a, b in zip(before, bystander(), strict=True))
    assert not any(t[held.inert].any() for t in (held.lengths, held.candidates, held.last_tokens, held.tables))
    assert tokens[-1].shape == (6 * 3,)
    assert not tokens[-1][5 * 3 :].any(), "an inert row has another token than 0"


def test_a_step_takes_the_smallest_family_and_bounds_that_no_request_moves(
    toy: LoadedModel, toy_checkpoint: Path
) -> None:
    engine = world(toy, toy_checkpoint).engine
    batches: list[StepBatch] = []
    forward = engine.model.forward
    engine.model.forward = lambda batch, state: batches.append(batch) or forward(batch, state)  # type: ignore
    engine.execute(0, [Begin(3, 0, (1, 2, 3), GREEDY, -1, (1, 2), 0), Prefill(3, 0, 3, True)])
    del batches[:]
    for _ in range(3):
        engine.execute(0, [Decode((3,), 2)])
    assert [batch.counts for batch in batches] == [(3,)] * 3
    assert {batch.max_length for batch in batches} == {engine.geometry.context + 2 * engine.geometry.step_width}
    assert len({batch.slots.data_ptr() for batch in batches}) == 1
    engine.execute(1, [Release(3)])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_at_once_is_its_two_halves(toy: LoadedModel, toy_checkpoint: Path, static: bool, depth: int) -> None:
    """The same results and registers, in a family with a segment to spare."""
    engines = [World.from_checkpoint(toy, toy_checkpoint, SETTINGS, static=static).engine for _ in range(2)]
    slots, length = range(5), 64
    for engine in engines:
        if static:
            list(engine.use_graphs([depth]))
        begin: list[Operation] = []
        for slot in slots:
            blocks, prompt = tuple(range(1 + 4 * slot, 5 + 4 * slot)), tuple(PROMPTS[slot])
            begin += [Begin(slot, slot, prompt, GREEDY, -1, blocks, 0), Prefill(slot, 0, len(prompt), True)]
        engine.execute(0, begin)
    whole, halves = engines
    fields = ("lengths", "candidates", "last_tokens", "drafts")
    committed = []
    for _ in range(4):
        with torch.inference_mode():
            found = whole.runner.step(slots, depth, length, sampled=False).values()
            wanted = halves.runner.verify(slots, depth, length).commit(None).values()
        assert found == wanted
        assert [len(row) for row in found] == [depth + 1 + 3] * 5
        committed.append([row[: 1 + row[depth + 1]] for row in found])
        for field in fields:
            assert torch.equal(*(getattr(engine.registers, field)[:5] for engine in engines)), field
    for slot in slots:
        plain = World.from_checkpoint(toy, toy_checkpoint, SETTINGS).reply(PROMPTS[slot], 5).tokens[1:]
        assert [token for step in committed for token in step[slot]][:4] == plain


def test_greedy_and_sampled_requests_share_a_step(toy: LoadedModel, toy_checkpoint: Path) -> None:
    params = (
        GREEDY, SamplingParams(temperature=0.8, seed=4), SamplingParams(temperature=0.0, repetition_penalty=1.3),
    )  # fmt: skip
    alone = [
        World.from_checkpoint(toy, toy_checkpoint, SETTINGS).reply(prompt, 12, params=p, logprobs=lp)
        for prompt, p, lp in zip(PROMPTS, params, (-1, 3, -1), strict=False)
    ]
    together = world(toy, toy_checkpoint, lag=1)
    for prompt, p, lp in zip(PROMPTS, params, (-1, 3, -1), strict=False):
        together.submit(prompt, 12, params=p, logprobs=lp)
    for number, reply in together.run().items():
        assert (reply.tokens, reply.logprobs) == (alone[number].tokens, alone[number].logprobs)


def test_more_shapes_than_can_be_captured_are_refused(toy: LoadedModel, toy_checkpoint: Path) -> None:
    engine = world(toy, toy_checkpoint).engine
    with pytest.raises(ConfigError, match="too many decode shapes") as error:
        StaticRunner(engine.program, 1000, range(6), 100, engine.device)
    assert str(MOST_FAMILIES) in error.value.expected


@pytest.mark.parametrize("static", [False, True])
def test_a_depth_that_follows_what_stands_changes_no_token(
    toy: LoadedModel, toy_checkpoint: Path, static: bool
) -> None:
    plain = World.from_checkpoint(toy, toy_checkpoint, SETTINGS).reply(PROMPTS[1], 200).tokens
    settings = msgspec.structs.replace(SETTINGS, mtp_schedule=True, mtp_schedule_row_ms=100.0)
    adaptive = World.from_checkpoint(toy, toy_checkpoint, settings, lag=1, static=static)
    assert adaptive.reply(PROMPTS[1], 200).tokens == plain
    stats = adaptive.scheduler.stats()
    assert stats.drafted_at[0] > stats.drafted_at[1] > 0, "both depths were used"
