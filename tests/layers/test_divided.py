"""Blocks divided among ranks: what each reads is what was written, whoever holds it."""

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Bus, PagedGroup, StepBatch
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.engine.geometry import Geometry, pool_shape
from dgpp_core.layers.divided import DividedBlocks
from dgpp_core.layers.paged import PagedIndex

GEOMETRY = Geometry(slots=2, blocks=13, block_tokens=4, snapshots=0, step_width=2, context=24)
TABLES = torch.tensor([[3, 7, 1, 12, 5, 13], [2, 9, 4, 11, 8, 6]])
WIDTH = 3


def step(starts: tuple[int, int], counts: tuple[int, int], *, keep: bool) -> PagedIndex:
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
    batch = StepBatch(
        tokens=positions, positions=positions, counts=counts, slots=torch.tensor([0, 1]), lengths=torch.tensor(starts),
        block_tables=TABLES, candidates=torch.zeros(2, dtype=torch.int64), keep_rows=keep, max_length=24,
    )  # fmt: skip
    return PagedIndex(batch, GEOMETRY.block_tokens)


def pool_of(ranks: int) -> Tensor:
    group = PagedGroup(name="latent", layers=1, heads=1, width=WIDTH, ranks=ranks)
    return torch.zeros(pool_shape(group, GEOMETRY))[0]


@pytest.mark.parametrize(("world", "ranks"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_every_rank_reads_what_was_written(world: int, ranks: int) -> None:
    source = torch.Generator().manual_seed(3)
    steps = [
        (index, torch.randn(sum(index.batch.counts), 1, WIDTH, generator=source))
        for index in (step((0, 0), (9, 14), keep=False), *(step((9 + n, 14 + n), (2, 2), keep=True) for n in range(8)))
    ]
    whole = pool_of(1)
    for index, rows in steps:
        index.write(whole, rows)

    def read(bus: Bus) -> tuple[Tensor, Tensor]:
        blocks, pool = DividedBlocks(bus, ranks), pool_of(ranks)
        for index, rows in steps:
            blocks.write(index, pool, rows)
        return blocks.read(pool, TABLES), pool

    for rank, (found, pool) in enumerate(LoopbackWorld(world).run(read)):
        assert torch.equal(found, whole[TABLES])
        held = range(rank % ranks, len(whole), ranks)
        assert torch.equal(pool[: len(held)], whole[held.start :: ranks]), "a rank holds its own blocks and no others"
    assert len(pool_of(4)) == 5, "14 blocks and one for the rows of others, of 4 ranks"
