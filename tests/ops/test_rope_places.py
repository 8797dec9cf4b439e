"""Turning by time, row and column: without images the bits of plain positions, in ragged and uniform steps."""

import pytest
import torch

from dgpp_core.api import StepBatch
from dgpp_core.ops.rope import RotaryTable

AXES = (0, 1, 2, 0, 1, 2, 0, 1)


@pytest.mark.parametrize("counts", [(3, 3), (1, 4)])
def test_places_of_rows(counts: tuple[int, ...]) -> None:
    table = RotaryTable(16, 64, 10_000.0, torch.device("cpu"), axes=AXES)
    slots = torch.tensor([2, 0])
    positions = torch.cat([torch.arange(5, 5 + counts[0]), torch.arange(9, 9 + counts[1])])
    own = torch.arange(40, dtype=torch.int32).expand(3, 3, 40).contiguous()
    batch = StepBatch(
        tokens=positions, positions=positions, counts=counts, slots=slots, lengths=slots, block_tables=slots,
        candidates=slots, keep_rows=False, max_length=40, places=own,
    )  # fmt: skip
    for found, plain in zip(table.of(batch, positions), table.at(positions), strict=True):
        assert torch.equal(found, plain)
    own[2, 1] += 7
    own[0, 2] += 11
    cos, _ = table.of(batch, positions)
    for row, position in enumerate(positions.tolist()):
        first = row < counts[0]
        shift = (0, 7, 0) if first else (0, 0, 11)
        wanted = [table.cos[position + shift[axis], lane] for lane, axis in enumerate(AXES)]
        assert cos[row, 0].tolist() == [value.item() for value in wanted]
