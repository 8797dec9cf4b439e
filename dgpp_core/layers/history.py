"""Rows of earlier positions, out of a ring of each slot's newest ones.

Some layers look a fixed number of tokens back (short convolutions, n-grams, pooled keys), and some lag behind their
inputs. Both read what lay before a step's own rows from a `dgpp_core.api.WindowGroup`: of one layer a ring
``[slots, heads, ring, width]`` in which the row of position p lies at ``p % ring``.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch


def with_history(batch: StepBatch, rows: Tensor, ring: Tensor, reach: int) -> list[Tensor]:
    """Put the last ``reach`` rows before each segment in front of its own, and write its own into the ring.

    Args:
        rows: the step's rows, ``[R, heads, width]``.
        ring: of ``reach`` rows at least.

    Returns:
        ``[B, reach + n, heads, width]`` for each run of B segments of n rows, in order and in the ring's dtype: one run
        for a decode step, one a segment otherwise. Rows before position 0 are zero.
    """
    runs = []
    for segments, own in _runs(batch, rows.to(ring.dtype)):
        slots, starts = _places(batch, segments)
        runs.append(_behind(own, ring, slots, starts, reach))
        _write(own, ring, slots, starts)
    return runs


def delayed_rows(batch: StepBatch, rows: Tensor, ring: Tensor, delay: int) -> Tensor:
    """What ``rows`` was ``delay`` positions before each row.

    Args:
        rows: the step's own, ``[R, heads, width]``.
        ring: of ``delay`` rows at least, in which `keep_newest` has put the rows of earlier steps and not yet those of
            this one.

    Returns:
        the same shape, in the ring's dtype; zero before position 0.
    """
    parts = [
        _behind(own, ring, *_places(batch, segments), delay)[:, : own.shape[1]].flatten(0, 1)
        for segments, own in _runs(batch, rows.to(ring.dtype))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def keep_newest(batch: StepBatch, rows: Tensor, ring: Tensor) -> None:
    """Put the step's rows ``[R, heads, width]`` into the ring, of a chunk that is longer the last ones."""
    for segments, own in _runs(batch, rows.to(ring.dtype)):
        _write(own, ring, *_places(batch, segments))


def newest_rows(tail: StepBatch, ring: Tensor, count: int) -> tuple[StepBatch, Tensor]:
    """The last ``count`` rows of each segment, up to the one that ``tail`` has of it.

    Args:
        tail: one row a segment.
        ring: of ``count`` rows at least, the tail's among them.

    Returns:
        a batch of ``count`` rows a segment, and those rows ``[B * count, heads, width]``.
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
    return batch, ring[tail.slots.repeat_interleave(count), :, positions % ring.shape[2]]


def delayed_batch(batch: StepBatch, delay: int) -> StepBatch:
    """The same rows ``delay`` positions earlier; those before the first have positions below zero."""
    return msgspec.structs.replace(batch, positions=batch.positions - delay, lengths=batch.lengths - delay)


def _runs(batch: StepBatch, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Segments that are taken together, and their rows ``[B, n, heads, width]``."""
    if batch.keep_rows and batch.uniform is not None:
        yield slice(0, len(batch.counts)), rows.view(-1, batch.uniform, *rows.shape[1:])
        return
    for number, own in enumerate(torch.split(rows, list(batch.counts))):
        yield slice(number, number + 1), own.unsqueeze(0)


def _places(batch: StepBatch, segments: slice) -> tuple[Tensor, Tensor]:
    """Slots and first positions, ``[B, 1]``."""
    return batch.slots[segments].unsqueeze(1), batch.lengths[segments].unsqueeze(1)


def _behind(own: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, reach: int) -> Tensor:
    before = starts + torch.arange(-reach, 0, device=own.device)
    history = ring[slots, :, before % ring.shape[2]].masked_fill((before < 0).view(*before.shape, 1, 1), 0)
    return torch.cat((history, own), dim=1)


def _write(own: Tensor, ring: Tensor, slots: Tensor, starts: Tensor) -> None:
    size, count = ring.shape[2], own.shape[1]
    kept = min(count, size)
    places = (starts + torch.arange(count - kept, count, device=own.device)) % size
    ring[slots, :, places] = own[:, count - kept :]
