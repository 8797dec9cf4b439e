"""The table of token vectors, whole on every rank or divided among them by rows."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.api import Bus, Shard
from dgpp_core.ops.residual import draft_input, embed_norm


class Embedding:
    """Looks tokens up. A rank that has some of the rows gives zeros for the others, and the ranks add theirs up.

    Of each row one rank's part alone is not zero, so that nothing is rounded.

    Args:
        table: ``[vocabulary, H]``, or this rank's equal share of its rows.
    """

    def __init__(self, table: Tensor, bus: Bus, vocabulary: int) -> None:
        self.table, self.bus = table, bus
        self.divided, self._first = len(table) < vocabulary, bus.rank * len(table)

    @classmethod
    def load(cls, shard: Shard, target: str, vocabulary: int) -> Self:
        """The table of ``target``; how many rows of it there are says whether it is divided."""
        return cls(shard.weights.take(target), shard.bus, vocabulary)

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """Rows ``[M, H]`` of int64 ``[M]`` tokens, in the table's dtype."""
        if not self.divided:
            return self.table[tokens]
        places = tokens - self._first
        here = (places >= 0) & (places < len(self.table))
        rows = self.table[places.clamp(0, len(self.table) - 1)]
        return self.bus.all_reduce(torch.where(here.unsqueeze(1), rows, torch.zeros_like(rows)))

    def normed(self, tokens: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The residual stream's beginning and its norm: see `dgpp_core.ops.residual.embed_norm`."""
        return embed_norm(*self._whole(tokens), weight, eps, dtype)

    def beside(
        self, tokens: Tensor, hidden: Tensor, weight: Tensor, hidden_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """Normed vectors of int64 ``[M]`` ``tokens`` beside normed ``hidden`` ``[M, H]``, as ``[M, 2 H]``.

        See `dgpp_core.ops.residual.draft_input`.
        """
        return draft_input(*self._whole(tokens), hidden, weight, hidden_weight, eps, dtype)

    def _whole(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """A table that has all of the tokens' vectors, and int64 ``[M]``, in which of its rows."""
        if not self.divided:
            return self.table, tokens
        rows = self[tokens]
        return rows, torch.arange(len(rows), device=rows.device)
