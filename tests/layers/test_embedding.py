"""Token vectors from a table that ranks share."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm as rms_norm_of

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_draft_layer_is_given_both_norms_side_by_side(ranks: int) -> None:
    source = torch.Generator().manual_seed(5)
    table, hidden = torch.randn(64, 24, generator=source), torch.randn(len(TOKENS), 24, generator=source)
    weight, hidden_weight = torch.randn(2, 24, generator=source)
    halves = ((table[TOKENS], weight), (hidden, hidden_weight))
    wanted = torch.cat([rms_norm_of(x.double(), [24], by.double(), 1e-5) for x, by in halves], dim=1)

    def mixed(bus: LoopbackBus) -> torch.Tensor:
        embed = Embedding(table.chunk(ranks)[bus.rank], bus, 64)
        return embed.beside(TOKENS, hidden, weight, hidden_weight, 1e-5, torch.float32)

    alone = Embedding(table, SoloBus(), 64).beside(TOKENS, hidden, weight, hidden_weight, 1e-5, torch.float32)
    assert torch.allclose(alone.double(), wanted, rtol=1e-5, atol=1e-6)
    for found in LoopbackWorld(ranks).run(mixed):
        assert torch.equal(found, alone)
