"""Token vectors from a table that ranks share."""

from __future__ import annotations

import pytest
import torch

from dgpp_core.bus.loopback import LoopbackBus, LoopbackWorld
from dgpp_core.bus.solo import SoloBus
from dgpp_core.layers.embedding import Embedding
from dgpp_core.ops.norm import rms_norm

TOKENS = torch.tensor([0, 63, 17, 16, 15, 47, 48, 17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_look_up_what_the_whole_table_has(ranks: int, dtype: torch.dtype) -> None:
    table = torch.randn(64, 24, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight = 1 + torch.arange(24) / 10

    def look_up(bus: LoopbackBus) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embed = Embedding(table.chunk(ranks)[bus.rank], bus, 64)
        assert embed.divided
        return embed[TOKENS], *embed.normed(TOKENS, weight, 1e-5, dtype)

    alone = Embedding(table, SoloBus(), 64)
    assert not alone.divided
    stream = table[TOKENS].float()
    for rows, residual, normed in LoopbackWorld(ranks).run(look_up):
        assert torch.equal(rows, table[TOKENS])
        assert rows.dtype == dtype
        assert torch.equal(residual, stream)
        assert torch.equal(normed, rms_norm(stream, weight, 1e-5, dtype))
        assert torch.equal(normed, alone.normed(TOKENS, weight, 1e-5, dtype)[1])
