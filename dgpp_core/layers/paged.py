"""Paged key/value rows: where a step's rows go, and attention over all rows of a request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dgpp_core.api.model import StepBatch
from dgpp_core.ops.tile_attention import tile_attention

Selection = tuple[Tensor, ...]
"""Which keys each row attends to: for each of `PagedIndex.groups` bool ``[B, tiles, n, block_tokens]``, causal."""

Read = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From block ids ``[B, tiles]`` to keys and values, ``[B, tiles, kv heads, block_tokens, width]``."""


class PagedIndex:
    """What every paged layer of one step needs to know, computed once a step.

    Args:
        batch: the step's rows.
        block_tokens: tokens a block, a multiple of nothing but the tile it is: a block is one tile of keys.
    """

    def __init__(self, batch: StepBatch, block_tokens: int) -> None:
        self.batch, self.block_tokens = batch, block_tokens

    @functools.cached_property
    def block(self) -> Tensor:
        """int64 ``[R]``, the block of each row."""
        positions = torch.div(self.batch.positions, self.block_tokens, rounding_mode="floor")
        return self.batch.block_tables[row_segments(self.batch), positions]

    @functools.cached_property
    def offset(self) -> Tensor:
        """int64 ``[R]``, each row's place in its block."""
        return self.batch.positions % self.block_tokens

    @functools.cached_property
    def groups(self) -> list[tuple[slice, Tensor, Tensor]]:
        """The runs of rows that share one product; see `_groups`."""
        return list(_groups(self.batch, self.block_tokens))

    def write(self, pool: Tensor, rows: Tensor) -> None:
        """Put ``rows`` ``[R, heads, width]`` into one layer's pool ``[blocks, heads, block_tokens, width]``."""
        pool[self.block, :, self.offset] = rows.to(pool.dtype)

    def attend(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, scale: float, chosen: Selection | None = None
    ) -> Tensor:
        """Causal attention of ``q`` ``[R, query heads, D]`` over each request's rows; the step's own are written.

        ``chosen`` narrows what each row sees; a row must see one key at least.
        """
        return self.attend_read(q, lambda blocks: (k_pool[blocks], v_pool[blocks]), scale, chosen)

    def attend_read(self, q: Tensor, read: Read, scale: float, chosen: Selection | None = None) -> Tensor:
        """`attend` to rows that are not stored as they are used."""
        parts = []
        for number, (rows, blocks, causal) in enumerate(self.groups):
            visible, count = causal if chosen is None else chosen[number], len(blocks)
            queries, (k, v) = q[rows].view(count, -1, *q.shape[1:]), read(blocks)
            parts.append(tile_attention(queries, k, v, visible, scale).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def row_segments(batch: StepBatch) -> Tensor:
    """int64 ``[R]``, the segment of each row; of equal segments without a copy from the host, as a graph needs it."""
    rows, device = sum(batch.counts), batch.tokens.device
    if batch.uniform is not None:
        return torch.div(torch.arange(rows, device=device), batch.uniform, rounding_mode="floor")
    counts = torch.tensor(batch.counts, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    segments = torch.arange(len(batch.counts), device=device)
    return torch.repeat_interleave(segments, counts, output_size=rows)


CHUNK_ROWS = 128
"""Most prefill rows that share one product: fewer skip more of the tiles past their own end, more fill the cores."""


def _groups(batch: StepBatch, block_tokens: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Row range, block ids ``[B, tiles]`` and visibility of the runs of rows that share one product.

    Decode steps are one run. Prefill chunks are taken one by one: padding them to a common length costs more.
    """
    if batch.keep_rows and batch.uniform is not None:
        rows = slice(0, sum(batch.counts))
        yield rows, *_tiles(batch, slice(0, len(batch.counts)), rows, batch.max_length, block_tokens)
        return
    row = 0
    for segment, count in enumerate(batch.counts):
        for first in range(row, row + count, CHUNK_ROWS):
            rows = slice(first, min(first + CHUNK_ROWS, row + count))
            limit = int(batch.positions[rows.stop - 1]) + 1
            yield rows, *_tiles(batch, slice(segment, segment + 1), rows, limit, block_tokens)
        row += count


def _tiles(batch: StepBatch, segments: slice, rows: slice, limit: int, block_tokens: int) -> tuple[Tensor, Tensor]:
    """Block ids ``[B, tiles]`` up to ``limit``, and which keys each row sees, ``[B, tiles, n, block_tokens]``."""
    tiles = -(-limit // block_tokens)
    keys = torch.arange(tiles * block_tokens, device=batch.tokens.device).view(1, tiles, 1, block_tokens)
    positions = batch.positions[rows].view(segments.stop - segments.start, 1, -1, 1)
    return batch.block_tables[segments, :tiles], keys <= positions
