"""Matrix product of a linear layer, with a row's bits independent of the other rows.

A BLAS picks its algorithm by the number of rows, so the same row gives other bits alone than in a batch. On a CPU the
weight is therefore packed once for oneDNN, whose blocked kernel walks the reduction in one order for every row count
(verified for the weight's shape before it is trusted), and rows are padded to a multiple of `ROW_TILE`. Where that
kernel is missing or fails the check, rows go through the ordinary product one by one: slow, and the same call for
every row.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.formats.matrix import Matrix

ROW_TILE = 8
_PROBE_ROWS = (1, 3, 8, 17, 64, 200)


def pad_rows(x: Tensor, multiple: int = ROW_TILE) -> Tensor:
    """``x`` ``[M, K]`` with zero rows appended up to a multiple of ``multiple``."""
    missing = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class Product(Protocol):
    """A weight ``[N, K]`` on its device, ready to be multiplied with rows ``x`` ``[M, K]``.

    ``decode``: the rows are those of a decode step or of the output head (few, and each as exact as alone), not of a
    prefill chunk; a device may have a kernel for each.
    """

    def narrow(self, x: Tensor, decode: bool) -> Tensor:
        """``[M, N]`` in the dtype of ``x``, rounded once."""
        ...

    def wide(self, x: Tensor, decode: bool) -> Tensor:
        """float32 ``[M, N]``."""
        ...

    def partials(self, x: Tensor, decode: bool) -> Tensor:
        """float32 ``[S, M, N]``; the product is their sum in order."""
        ...


class WholeProduct:
    """A product that is computed in one piece, by `__call__` in float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """float32 ``[M, K]`` to float32 ``[M, N]``."""
        raise NotImplementedError

    def narrow(self, x: Tensor, decode: bool) -> Tensor:
        """See `Product`."""
        return self.wide(x, decode).to(x.dtype)

    def wide(self, x: Tensor, decode: bool) -> Tensor:
        """See `Product`."""
        return self(x.float())

    def partials(self, x: Tensor, decode: bool) -> Tensor:
        """See `Product`."""
        return self.wide(x, decode).unsqueeze(0)


class PackedWeight(WholeProduct):
    """A float32 ``[N, K]`` weight in oneDNN's blocked form."""

    def __init__(self, weight: Tensor) -> None:
        self.data = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_TILE)

    def __call__(self, x: Tensor) -> Tensor:
        padded = pad_rows(x)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.data, None, "none", [], "")
        return y[: x.shape[0]]


class RowWeight(WholeProduct):
    """Any weight, applied to one row a call: the same call for every row, so the same bits."""

    def __init__(self, weight: Tensor) -> None:
        self.data = weight

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.data.shape[0])
        return torch.cat([F.linear(row.clone().unsqueeze(0), self.data) for row in x])


class PlainWeight(WholeProduct):
    """A CUDA device's ordinary product; no promise about a row's bits."""

    def __init__(self, weight: Tensor) -> None:
        self.data = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.data.float())

    def narrow(self, x: Tensor, decode: bool) -> Tensor:
        """See `Product`."""
        return F.linear(x, self.data) if x.dtype == self.data.dtype else super().narrow(x, decode)

    def wide(self, x: Tensor, decode: bool) -> Tensor:
        """See `Product`."""
        if x.dtype == self.data.dtype == torch.bfloat16:
            return torch.mm(x, self.data.T, out_dtype=torch.float32)
        return super().wide(x, decode)


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


def dense(weight: Tensor | Matrix) -> Tensor:
    """``[N, K]`` as a tensor: float32 on a CPU; elsewhere a tensor as it is and a stored matrix in bfloat16."""
    values = weight if isinstance(weight, Tensor) else weight.dequantise()
    if values.device.type == "cpu":
        return values.float()
    return values if isinstance(weight, Tensor) else values.to(torch.bfloat16)


def make_product(weight: Tensor | Matrix) -> Product:
    """The product for a weight: by its device, and on a GPU by its format."""
    values = dense(weight)
    if values.device.type != "cpu":
        return PlainWeight(values)
    return PackedWeight(values) if packing_is_exact(*values.shape) else RowWeight(values)


class Linear:
    """``y = x @ weight.T``.

    Args:
        weight: ``[N, K]``, a tensor or a matrix in stored form; on a CPU it is computed with in float32, and freed by
            the caller once packed.
    """

    def __init__(self, weight: Tensor | Matrix) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._product = make_product(weight)

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, N]`` in the dtype of ``x``; ``decode`` as in `Product`."""
        return self._product.narrow(x, decode)

    def wide(self, x: Tensor, decode: bool = True) -> Tensor:
        """The same in float32, unrounded."""
        return self._product.wide(x, decode)

    def partials(self, x: Tensor, decode: bool = True) -> Tensor:
        """The same as float32 ``[S, M, N]``, to be added in order by whoever takes it."""
        return self._product.partials(x, decode)
