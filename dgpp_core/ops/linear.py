"""Matrix product of a linear layer, with a row's bits independent of the other rows.

A BLAS picks its algorithm by the number of rows, so the same row gives other bits alone than in a batch. On a CPU the
weight is therefore packed once for oneDNN, whose blocked kernel walks the reduction in one order for every row count
(verified for the weight's shape before it is trusted), and rows are padded to a multiple of `ROW_TILE`. Where that
kernel is missing or fails the check, rows go through the ordinary product one by one: slow, and the same call for
every row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_TILE = 8
_PROBE_ROWS = (1, 3, 8, 17, 64, 200)


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """``x`` ``[M, K]`` with zero rows appended up to a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class PackedWeight:
    """A float32 ``[N, K]`` weight in oneDNN's blocked form."""

    def __init__(self, weight: Tensor) -> None:
        self.data = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_TILE)

    def __call__(self, x: Tensor) -> Tensor:
        padded = pad_rows(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.data, None, "none", [], "")
        return y[: x.shape[0]]


class RowWeight:
    """Any weight, applied to one row a call: the same call for every row, so the same bits."""

    def __init__(self, weight: Tensor) -> None:
        self.data = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(row.clone().unsqueeze(0), self.data) for row in x])


class PlainWeight:
    """The device's ordinary product; no promise about a row's bits."""

    def __init__(self, weight: Tensor) -> None:
        self.data = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data)


def rows_agree(product: PackedWeight | RowWeight, columns: int) -> bool:
    """Whether each row of a product has the same bits in every row count and position tried."""
    x = torch.randn(_PROBE_ROWS[-1], columns, generator=torch.Generator().manual_seed(1))
    whole = product(x)
    shifted = product(x.roll(3, 0)).roll(-3, 0)
    return torch.equal(whole, shifted) and all(torch.equal(product(x[:m]), whole[:m]) for m in _PROBE_ROWS)


@functools.cache
def packing_is_exact(rows: int, columns: int) -> bool:
    """Whether oneDNN's packed product is there and row-exact for weights of this shape."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    try:
        return rows_agree(PackedWeight(weight), columns)
    except (AttributeError, RuntimeError):
        return False


class Linear:
    """``y = x @ weight.T``.

    Args:
        weight: ``[N, K]``; on a CPU float32, and freed by the caller once packed.
    """

    def __init__(self, weight: Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._product: PackedWeight | RowWeight | PlainWeight
        if weight.device.type != "cpu":
            self._product = PlainWeight(weight)
        elif weight.dtype == torch.float32 and packing_is_exact(*self.shape):
            self._product = PackedWeight(weight)
        else:
            self._product = RowWeight(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """``[M, K]`` to ``[M, N]``."""
        return self._product(x)
