"""A paged pool whose blocks are divided among ranks (decode context parallelism).

Ranks that divide heads keep the same latents. Instead of a copy each they may keep a part each, and show each other
what they attend to: the pool is as many times longer. Rows are gathered as they are stored and then attended to as if
they had been here, so that results have the bits of an undivided pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.model import Bus
from dgpp_core.layers.paged import PagedIndex


class DividedBlocks:
    """Which blocks this rank holds, and how it gets the others.

    Rank r holds block b where ``b % ranks == r % ranks``, as its block ``b // ranks``. A pool has one block more, the
    last one, for rows that this rank does not hold.

    Args:
        bus: of a world of a multiple of ``ranks``; each run of so many ranks holds the whole pool.
        ranks: as in `dgpp_core.api.PagedGroup.ranks`; 1 is a pool that every rank holds.
    """

    def __init__(self, bus: Bus, ranks: int) -> None:
        self.bus, self.ranks, self.own = bus, ranks, bus.rank % ranks

    def write(self, index: PagedIndex, pool: Tensor, rows: Tensor) -> None:
        """As `PagedIndex.write`: those rows that are this rank's to hold."""
        if self.ranks == 1:
            index.write(pool, rows)
            return
        held = index.block % self.ranks == self.own
        place = torch.where(held, self._place(index.block), pool.shape[0] - 1)
        pool[place, :, index.offset] = rows.to(pool.dtype)

    def read(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """Blocks ``[B, tiles]`` of one layer, ``[B, tiles, heads, block_tokens, width]``; all ranks read the same."""
        if self.ranks == 1:
            return pool[blocks]
        every = self.bus.all_gather(pool[self._place(blocks)].unsqueeze(0), 0)
        holder = self.bus.rank - self.own + blocks % self.ranks
        segments = torch.arange(blocks.shape[0], device=blocks.device).unsqueeze(1)
        return every[holder, segments, torch.arange(blocks.shape[1], device=blocks.device)]

    def _place(self, blocks: Tensor) -> Tensor:
        return torch.div(blocks, self.ranks, rounding_mode="floor")
