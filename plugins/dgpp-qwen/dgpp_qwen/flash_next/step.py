"""What every layer of a step needs."""

from __future__ import annotations

from typing import NamedTuple

from dgpp_core.api import State, StepBatch
from dgpp_core.layers.paged import PagedIndex


class Step(NamedTuple):
    """``decode``: its rows are a decode step's, not a prefill chunk's."""

    batch: StepBatch
    rows: PagedIndex
    state: State
    decode: bool

    @classmethod
    def of(cls, batch: StepBatch, state: State) -> Step:
        """Computed once a step."""
        return cls(batch, PagedIndex(batch, state["k"].shape[3]), state, batch.keep_rows)
