"""The rows before a step's own, for layers that look a fixed number of tokens back."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch


def with_history(batch: StepBatch, rows: Tensor, ring: Tensor, reach: int) -> list[Tensor]:
    """Put the last ``reach`` rows before each segment in front of its own, and write its own into the ring.

    Args:
        rows: the step's rows, ``[R, heads, width]``.
        ring: one layer's ring, ``[slots, heads, ring, width]``, of a `WindowGroup` with at least ``reach`` rows.

    Returns:
        ``[B, reach + n, heads, width]`` for each run of B segments of n rows, in order and in the ring's dtype: one run
        for a decode step, one a segment otherwise. Rows before position 0 are zero.
    """
    rows, runs, first = rows.to(ring.dtype), [], 0
    for segments, count in _runs(batch):
        size = segments.stop - segments.start
        own = rows[first : first + size * count].view(size, count, *rows.shape[1:])
        first += size * count
        runs.append(_extend(own, ring, batch.slots[segments].unsqueeze(1), batch.lengths[segments], reach))
    return runs


def _runs(batch: StepBatch) -> list[tuple[slice, int]]:
    """Segments that are taken together, and the rows of each."""
    if batch.keep_rows and batch.uniform is not None:
        return [(slice(0, len(batch.counts)), batch.uniform)]
    return [(slice(i, i + 1), count) for i, count in enumerate(batch.counts)]


def _extend(own: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, reach: int) -> Tensor:
    size, count, starts = ring.shape[2], own.shape[1], starts.unsqueeze(1)
    before = starts + torch.arange(-reach, 0, device=own.device)
    history = ring[slots, :, before % size].masked_fill((before < 0).view(*before.shape, 1, 1), 0)
    kept = min(count, size)
    places = (starts + torch.arange(count - kept, count, device=own.device)) % size
    ring[slots, :, places] = own[:, count - kept :]
    return torch.cat((history, own), dim=1)


def causal_convolution(rows: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """One filter a channel, over a row and those before it.

    Args:
        rows: ``[B, (K - 1) * dilation + n, C]``: n rows behind their history.
        weight: ``[C, K]``; the last tap is that of the row itself.

    Returns:
        ``[B, n, C]``, the taps added from the farthest to the nearest.
    """
    taps = weight.shape[1]
    n = rows.shape[1] - (taps - 1) * dilation
    total = rows[:, :n] * weight[:, 0]
    for tap in range(1, taps):
        total = total + rows[:, tap * dilation : tap * dilation + n] * weight[:, tap]
    return total
