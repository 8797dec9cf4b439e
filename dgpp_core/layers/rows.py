"""Tables of which a step looks some rows up, on the device or in the checkpoint's files."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api import Rows, Shard


class ResidentRows:
    """Implements `dgpp_core.api.Rows`: a table ``[N, width]`` on the device."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __getitem__(self, rows: Tensor) -> Tensor:
        """See `dgpp_core.api.Rows`; torch indexes no table in 8 bits, so that its bytes are."""
        if self._table.element_size() > 1:
            return self._table[rows]
        return self._table.view(torch.uint8)[rows].view(self._table.dtype)


def load_rows(shard: Shard, target: str) -> Rows:
    """The table ``target``, wherever the deployment keeps it; see `dgpp_core.api.BindingTable.lookups`."""
    return shard.tables[target] if target in shard.tables else ResidentRows(shard.weights.take(target))
