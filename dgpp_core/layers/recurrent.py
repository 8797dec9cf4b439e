"""Recurrent state of a step: read the committed candidate, run rows in order, write what may become committed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch


def scan(
    batch: StepBatch, pool: Tensor, inputs: tuple[Tensor, ...], step: Callable[..., tuple[Tensor, Tensor]]
) -> Tensor:
    """Run a recurrence over every segment of a step.

    Args:
        pool: one layer's states, ``[slots, candidates, *shape]``; written as `StepBatch.keep_rows` says.
        inputs: tensors ``[R, ...]``, one row each for ``step``.
        step: ``(state [B, *shape], *inputs [B, ...]) -> (new state, output [B, ...])``; elementwise in B.

    Returns:
        the outputs, ``[R, ...]``.
    """
    segments, outs = len(batch.counts), []
    if batch.uniform is not None and batch.keep_rows:
        n = batch.counts[0]
        state = pool[batch.slots, batch.candidates]
        rows = [x.view(segments, n, *x.shape[1:]) for x in inputs]
        for i in range(n):
            state, out = step(state, *(x[:, i] for x in rows))
            pool[batch.slots, i] = state
            outs.append(out)
        return torch.stack(outs, dim=1).flatten(0, 1)
    row = 0
    for segment, count in enumerate(batch.counts):
        where = batch.slots[segment : segment + 1]
        state = pool[where, batch.candidates[segment : segment + 1]]
        for i in range(row, row + count):
            state, out = step(state, *(x[i : i + 1] for x in inputs))
            outs.append(out)
        pool[where, 0] = state
        row += count
    return torch.cat(outs)
