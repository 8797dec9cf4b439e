"""Rows of earlier positions: the same whether they come from the step or from the ring of earlier ones."""

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.layers.history import delayed_batch, delayed_rows, keep_newest, newest_rows, with_history

LENGTH, HEADS, WIDTH, DELAY, STEP = 40, 2, 3, 2, 4
ROWS = torch.randn(3, LENGTH, HEADS, WIDTH, generator=torch.Generator().manual_seed(4))


def batch(starts: dict[int, int], counts: tuple[int, ...], *, keep: bool) -> StepBatch:
    """Rows of some slots, by slot the first position."""
    places = [torch.arange(a, a + n) for a, n in zip(starts.values(), counts, strict=True)]
    positions = torch.cat(places)
    return StepBatch(
        tokens=positions, positions=positions, counts=counts, slots=torch.tensor(list(starts)),
        lengths=torch.tensor(list(starts.values())), block_tables=torch.zeros(len(counts), 1, dtype=torch.int64),
        candidates=torch.zeros(len(counts), dtype=torch.int64), keep_rows=keep, max_length=LENGTH,
    )  # fmt: skip


def own(step: StepBatch) -> Tensor:
    parts = zip(step.slots.tolist(), step.lengths.tolist(), step.counts, strict=True)
    return torch.cat([ROWS[slot, start : start + n] for slot, start, n in parts])


def fresh_ring() -> Tensor:
    return torch.full((3, HEADS, DELAY + 1 + STEP, WIDTH), 7.0)


def check(step: StepBatch, found: Tensor, delay: int) -> None:
    row = 0
    for slot, start, n in zip(step.slots.tolist(), step.lengths.tolist(), step.counts, strict=True):
        for position in range(start, start + n):
            wanted = ROWS[slot, position - delay] if position >= delay else torch.zeros(HEADS, WIDTH)
            assert torch.equal(found[row], wanted)
            row += 1


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_rows_of_chunks_and_of_verify_steps(delay: int) -> None:
    ring, starts = fresh_ring(), {0: 0, 2: 0}
    for counts in ((1, 2), (1, 1), (17, 1), (3, 5)):
        step = batch(starts, counts, keep=False)
        check(step, delayed_rows(step, own(step), ring, delay), delay)
        keep_newest(step, own(step), ring)
        starts = {slot: start + n for (slot, start), n in zip(starts.items(), counts, strict=True)}
    for accepted in (1, STEP, 2, 1, 3):
        step = batch(starts, (STEP, STEP), keep=True)
        rows = own(step).view(2, STEP, HEADS, WIDTH).clone()
        check(step, delayed_rows(step, rows.flatten(0, 1), ring, delay), delay)
        rows[:, accepted:] = 99.0  # rejected rows lie in the ring until they are overwritten
        keep_newest(step, rows.flatten(0, 1), ring)
        starts = {slot: start + accepted for slot, start in starts.items()}


@pytest.mark.parametrize("reach", [1, DELAY, DELAY + 1])
def test_the_history_of_chunks_and_of_verify_steps(reach: int) -> None:
    ring, starts = fresh_ring(), {0: 0, 2: 0}
    steps = [(counts, False, counts) for counts in ((1, 2), (1, 1), (17, 1), (3, 5))]
    steps += [((STEP, STEP), True, (accepted, accepted)) for accepted in (1, STEP, 2, 1, 3)]
    padded = torch.cat((torch.zeros(3, reach, HEADS, WIDTH), ROWS), dim=1)
    for counts, keep, accepted in steps:
        rows = [ROWS[slot, start : start + n].clone() for (slot, start), n in zip(starts.items(), counts, strict=True)]
        for own, kept in zip(rows, accepted, strict=True):
            own[kept:] = 99.0  # rejected rows lie in the ring until they are overwritten
        runs = with_history(batch(starts, counts, keep=keep), torch.cat(rows), ring, reach)
        assert len(runs) == (1 if keep else 2)
        found = [segment for run in runs for segment in run]
        for (slot, start), own, segment in zip(starts.items(), rows, found, strict=True):
            assert torch.equal(segment, torch.cat((padded[slot, start : start + reach], own)))
        starts = {slot: start + n for (slot, start), n in zip(starts.items(), accepted, strict=True)}


def test_a_delayed_batch_begins_below_zero() -> None:
    step = delayed_batch(batch({1: 0}, (3,), keep=False), DELAY)
    assert step.positions.tolist() == [-2, -1, 0]
    assert step.lengths.tolist() == [-2]


def test_the_newest_rows_of_each_segment() -> None:
    ring = fresh_ring()
    keep_newest(step := batch({0: 0, 1: 0}, (20, 9), keep=False), own(step), ring)
    tail = batch({0: 19, 1: 8}, (1, 1), keep=True)
    newest, rows = newest_rows(tail, ring, 3)
    assert newest.counts == (3, 3)
    assert newest.positions.tolist() == [17, 18, 19, 6, 7, 8]
    assert newest.lengths.tolist() == [17, 6]
    assert torch.equal(rows, torch.cat((ROWS[0, 17:20], ROWS[1, 6:9])))
