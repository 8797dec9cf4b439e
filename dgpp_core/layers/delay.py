"""Rows of some steps ago: a layer that lags behind its inputs reads them from a ring of the newest ones."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.layers.paged import row_segments


def delayed_batch(batch: StepBatch, delay: int) -> StepBatch:
    """The same rows ``delay`` positions earlier; those before the first have positions below zero."""
    return msgspec.structs.replace(batch, positions=batch.positions - delay, lengths=batch.lengths - delay)


def delayed_rows(batch: StepBatch, rows: Tensor, ring: Tensor, delay: int) -> Tensor:
    """What ``rows`` was ``delay`` positions before each row.

    Args:
        rows: the step's own, ``[R, width]``.
        ring: one layer of a window group of ``window >= delay`` rows and one head, ``[slots, 1, ring, width]``, in
            which `keep_newest` has put the rows of earlier steps and not yet those of this one.

    Returns:
        ``[R, width]``; of a position below zero some finite row.
    """
    if not delay:
        return rows
    segments = row_segments(batch)
    places = (batch.positions - delay) % ring.shape[2]
    earlier = ring[batch.slots[segments], 0, places].to(rows.dtype)
    inside = batch.positions - batch.lengths[segments] >= delay
    return torch.where(inside.unsqueeze(1), rows.roll(delay, 0), earlier)


def keep_newest(batch: StepBatch, rows: Tensor, ring: Tensor) -> None:
    """Put the step's rows ``[R, width]`` into the ring, of a chunk that is longer the last ones."""
    size, segments, positions = ring.shape[2], row_segments(batch), batch.positions
    if max(batch.counts) > size:
        ends = [end + 1 for end in batch.last_rows()]
        kept = [at for end, n in zip(ends, batch.counts, strict=True) for at in range(end - min(n, size), end)]
        chosen = torch.tensor(kept, device=rows.device)
        rows, segments, positions = rows[chosen], segments[chosen], positions[chosen]
    ring[batch.slots[segments], 0, positions % size] = rows.to(ring.dtype)


def newest_rows(tail: StepBatch, ring: Tensor, count: int) -> tuple[StepBatch, Tensor]:
    """The last ``count`` rows of each segment, up to the one that ``tail`` has of it.

    Args:
        tail: one row a segment.
        ring: as `delayed_rows` has it, the tail's rows among its own.

    Returns:
        a batch of ``count`` rows a segment, and those rows ``[B * count, width]``.
    """
    back = torch.arange(1 - count, 1, device=tail.positions.device)
    positions = (tail.positions.unsqueeze(1) + back).flatten()
    batch = msgspec.structs.replace(
        tail,
        tokens=tail.tokens.repeat_interleave(count),
        positions=positions,
        counts=tuple(count for _ in tail.counts),
        lengths=tail.positions - count + 1,
        keep_rows=True,
    )
    return batch, ring[tail.slots.repeat_interleave(count), 0, positions % ring.shape[2]]
