"""What the layers of a step share, and what they hand to each other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from dgpp_core.api import Bus, State, StepBatch
from dgpp_core.layers.history import with_history
from dgpp_core.layers.paged import CHUNK_ROWS, PagedIndex, Selection
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.rope import RotaryTable, rotate_pairs, yarn_frequencies
from dgpp_deepseek.deepseek41.config import Deepseek41Config

Angles = tuple[Tensor, Tensor]


class Ropes:
    """Rotary tables: ``plain`` where a layer sees its window alone, ``compressed`` where it sees entries."""

    def __init__(self, config: Deepseek41Config, device: torch.device) -> None:
        frequencies, theta, yarn = None, config.compress_rope_theta, config.yarn
        if yarn is not None:
            frequencies = yarn_frequencies(config.rope, theta, yarn.factor, yarn.length, yarn.fast, yarn.slow)
        self.plain = RotaryTable(config.rope, config.max_positions, config.rope_theta, device)
        self.compressed = RotaryTable(config.rope, config.max_positions, theta, device, frequencies)


def turned(x: Tensor, angles: Angles, *, back: bool = False) -> Tensor:
    """``[R, heads, width]`` with its last dimensions turned, neighbouring pairs; ``back``: the other way round."""
    cos, sin = angles
    width = 2 * cos.shape[-1]
    pairs = rotate_pairs(x[..., -width:], cos, -sin if back else sin)
    return pairs if width == x.shape[-1] else torch.cat((x[..., :-width], pairs), dim=-1)


def summed(linear: Linear, bus: Bus, x: Tensor, decode: bool) -> Tensor:
    """float32 ``[R, N]``: a product whose inputs are divided among the ranks."""
    if bus.world == 1:
        return linear.wide(x, decode).to(x.dtype).float()
    return bus.all_reduce(linear(x, decode)).float()


class Step:
    """Of one forward over ``batch``.

    Attributes:
        chosen: the entries that each row attends to, since the last layer that chose; by `groups`.
        kept_blocks: the entries of the blocks that the block source kept.
        published: the entries of the last source are written already, for more rows than these.
    """

    def __init__(self, batch: StepBatch, state: State, ropes: Ropes, *, published: bool = False) -> None:
        self.batch, self.state, self.ropes, self.decode = batch, state, ropes, batch.keep_rows
        self.published = published
        paged = next(name for name in ("entries_1", "entries_2") if name in state)
        self.paged = PagedIndex(batch, state[paged].shape[3])
        self.chosen: Selection = ()
        self.kept_blocks: Selection = ()

    @functools.cached_property
    def plain(self) -> Angles:
        """Of the rows, for layers that see their window alone."""
        return self.ropes.plain.at(self.batch.positions)

    @functools.cached_property
    def compressed(self) -> Angles:
        """Of the rows, for the others."""
        return self.ropes.compressed.at(self.batch.positions)

    @functools.cached_property
    def floors(self) -> list[int]:
        """For each of `groups` the position below which its rows see no row of a window."""
        if not self.batch.floors:
            return [0] * len(self.paged.groups)
        segments = zip(self.batch.floors, self.batch.counts, strict=True)
        return [floor for floor, count in segments for _ in range(0, count, CHUNK_ROWS)]

    def visible(self, ratio: int) -> Iterator[Tensor]:
        """For each of `groups` which entries exist at each row, bool ``[B, tiles, n, block_tokens / ratio]``.

        An entry exists from the last of its tokens on.
        """
        return (visible[..., ratio - 1 :: ratio] for _, _, visible in self.paged.groups)

    def windows(self, rows: Tensor, ring: Tensor, window: int) -> Iterator[Tensor]:
        """For each of `groups` its rows behind the ``window - 1`` before them, ``[B, window - 1 + n, width]``.

        Args:
            rows: the step's own as they are kept, ``[R, width]``; written into the ring.
            ring: one layer's, ``[slots, 1, ring, width]``.
        """
        reach = window - 1
        for run in with_history(self.batch, rows.unsqueeze(1), ring, reach):
            count = run.shape[1] - reach
            for first in range(0, count, CHUNK_ROWS):
                yield run[:, first : first + reach + min(CHUNK_ROWS, count - first), 0]


def tail_of(batch: StepBatch) -> tuple[StepBatch, Tensor]:
    """The rows of a prefill that lie at or above their segment's floor, as a batch, and which rows those are.

    Reads the segments' starts on the host. There may be no such row, and then the batch has no segment.
    """
    starts, firsts = batch.lengths.tolist(), itertools.accumulate(batch.counts, initial=0)
    below = [
        min(count, max(0, floor - start))
        for floor, count, start in zip(batch.floors, batch.counts, starts, strict=True)
    ]  # fmt: skip
    kept = [number for number, count in enumerate(batch.counts) if below[number] < count]
    rows = [row for at, skip, n in zip(firsts, below, batch.counts, strict=False) for row in range(at + skip, at + n)]

    def indices(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=batch.tokens.device)

    at, segments = indices(rows), indices(kept)
    tail = msgspec.structs.replace(
        batch, tokens=batch.tokens[at], positions=batch.positions[at], slots=batch.slots[segments],
        counts=tuple(batch.counts[number] - below[number] for number in kept),
        lengths=batch.lengths[segments] + indices([below[number] for number in kept]),
        block_tables=batch.block_tables[segments], candidates=batch.candidates[segments],
        floors=tuple(batch.floors[number] for number in kept),
    )  # fmt: skip
    return tail, at


def tiles_of(window: Tensor, starts: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Rows of a window in tiles at multiples of ``span`` of the absolute position.

    Args:
        window: ``[B, m, width]``: rows of successive positions.
        starts: int64 ``[B]``, the position of each one's first row; may be below zero.

    Returns:
        rows ``[B, tiles * span, width]`` and their positions ``[B, tiles * span]``; a position outside of the window
        has some row of it.
    """
    count = window.shape[1]
    base = torch.div(starts.clamp(min=0), span, rounding_mode="floor") * span
    tiles = -(-count // span) + 1
    positions = base.unsqueeze(1) + torch.arange(tiles * span, device=window.device)
    at = (positions - starts.unsqueeze(1)).clamp(0, count - 1)
    segments = torch.arange(len(window), device=window.device).unsqueeze(1)
    return window[segments, at], positions
