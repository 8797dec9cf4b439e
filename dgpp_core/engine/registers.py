"""What the device knows of every slot between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.engine.geometry import Geometry
from dgpp_core.sampling.device import table as sampling_table


class Registers:
    """Device tensors, int64, one row a slot and one more, row `inert`, for the segments that fill up a decode shape.

    The inert row always reads length 0, token 0 and block table 0, whatever was drafted for it: its rows of state go to
    block 0, which no request has, and to the window and recurrent state of slot `inert`.

    Attributes:
        lengths: ``[slots + 1]``, tokens in the state.
        candidates: ``[slots + 1]``, which recurrent candidate is the committed one.
        last_tokens: ``[slots + 1]``, the newest token, whose row the next step writes.
        drafts: ``[slots + 1, depth]``, proposals for the tokens after it.
        tables: ``[slots + 1, table_width]``, block ids.
        places: where rotary embeddings see positions, for models that place images in a grid; see `StepBatch.places`.
        ways: ``[slots + 1, 8]``, how to pick (`dgpp_core.sampling.device`); all greedy where the host picks.
    """

    def __init__(self, geometry: Geometry, depth: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows = geometry.slots + 1
        self.inert = geometry.slots
        self.places: Tensor | None = None
        self.lengths, self.candidates, self.last_tokens = zeros(rows), zeros(rows), zeros(rows)
        self.ways = sampling_table(geometry.slots, device)
        self.drafts, self.tables = zeros(rows, depth), zeros(rows, geometry.table_width)

    def begin(self, slot: int, length: int) -> None:
        """A slot's request starts with ``length`` tokens in its state."""
        self.lengths[slot].fill_(length)  # assigning a number would wait for all that the device has queued
        self.candidates[slot].zero_()

    def extend(self, slot: int, at: int, blocks: Tensor) -> None:
        """Blocks of a slot's table from entry ``at`` on."""
        self.tables[slot, at : at + len(blocks)] = blocks

    def release(self, slot: int) -> None:
        """Nothing of the slot's table is followed any more."""
        self.tables[slot].zero_()
        self.ways[slot].zero_()
