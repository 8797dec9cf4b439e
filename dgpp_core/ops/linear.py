"""Matrix product of a linear layer, with a row's bits independent of the other rows.

A BLAS picks its algorithm by the number of rows, so the same row gives other bits alone than in a batch. On a CPU the
weight is therefore packed once for oneDNN, whose blocked kernel walks the reduction in one order for every row count
(verified for the weight's shape before it is trusted), and rows are padded to a multiple of `ROW_TILE`. Where that
kernel is missing or fails the check, rows go through the ordinary product one by one: slow, and the same call for
every row. On a GPU the products are `dgpp_core.ops.kernels.dense`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api.model import Shard
from dgpp_core.formats.codec import convert
from dgpp_core.formats.matrix import Matrix

ROW_TILE = 8
_RECODED_ROWS = 1 << 11
"""Rows that are recoded at once: tens of megabytes in float32."""
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


class WholeProduct(ABC):
    """A product that is computed in one piece, by `__call__` in float32."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """float32 ``[M, K]`` to float32 ``[M, N]``."""

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


def device_of(weight: Tensor | Matrix) -> torch.device:
    """Where a weight is."""
    return weight.device if isinstance(weight, Tensor) else next(iter(weight.tensors().values())).device


def make_product(weight: Tensor | Matrix) -> Product:
    """The product for a weight: by its device, and on a GPU by its format."""
    if (device := device_of(weight)).type != "cpu":
        from dgpp_core.ops.kernels.dense import CudaLinear

        return CudaLinear(weight, device)
    values = (weight if isinstance(weight, Tensor) else weight.dequantise()).float()
    return PackedWeight(values) if packing_is_exact(*values.shape) else RowWeight(values)


def load_product(shard: Shard, target: str, matrix: Matrix) -> Product:
    """The product for the checkpoint's matrix ``target``; a GPU's form of it is kept in the resident image."""
    if shard.device.type == "cpu":
        return make_product(matrix)
    from dgpp_core.ops.kernels.dense import CudaLinear

    def make() -> Mapping[str, Tensor]:
        return CudaLinear(matrix, shard.device, target, shard.bf16_form, consume=True).prepared()

    return CudaLinear.from_prepared(shard.weights.prepared(target, f"product {shard.bf16_form}", make))


class Linear:
    """``y = x @ weight.T``.

    Args:
        weight: ``[N, K]``, a tensor or a matrix in stored form; on a CPU it is computed with in float32, and freed by
            the caller once packed.
        product: ready for the weight; by default made of it.
    """

    def __init__(self, weight: Tensor | Matrix, product: Product | None = None) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._product = product or make_product(weight)

    @classmethod
    def load(cls, shard: Shard, target: str) -> Self:
        """The linear layer of the checkpoint's matrix ``target``."""
        matrix = shard.weights.matrix(target)
        return cls(matrix, load_product(shard, target, matrix))

    def __call__(self, x: Tensor, decode: bool = True) -> Tensor:
        """``[M, K]`` to ``[M, N]`` in the dtype of ``x``; ``decode`` as in `Product`."""
        return self._product.narrow(x, decode)

    def wide(self, x: Tensor, decode: bool = True) -> Tensor:
        """The same in float32, unrounded."""
        return self._product.wide(x, decode)

    def partials(self, x: Tensor, decode: bool = True) -> Tensor:
        """The same as float32 ``[S, M, N]``, to be added in order by whoever takes it."""
        return self._product.partials(x, decode)


def load_recoded(shard: Shard, target: str, storage: str) -> tuple[Linear, Linear]:
    """A linear layer and its like with weights rounded to ``storage``, which a GPU reads faster: one for both on a CPU.

    The binding table names such a target in `BindingTable.recoded`, for the plan.
    """
    matrix = shard.weights.matrix(target)
    if shard.device.type == "cpu":
        exact = Linear(matrix)
        return exact, exact
    from dgpp_core.ops.kernels.dense import CudaLinear

    def make() -> Mapping[str, Tensor]:
        form, device = shard.bf16_form, shard.device
        forms = {
            "near/": CudaLinear(_recoded(matrix, storage), device, target, consume=True).prepared(),
            "exact/": CudaLinear(matrix, device, target, form, consume=True).prepared(),
        }
        return {kind + name: tensor for kind, made in forms.items() for name, tensor in made.items()}

    made = shard.weights.prepared(target, f"product {shard.bf16_form} and {storage}", make)

    def part(kind: str) -> Linear:
        own = {name.removeprefix(kind): tensor for name, tensor in made.items() if name.startswith(kind)}
        return Linear(matrix, CudaLinear.from_prepared(own))

    return part("exact/"), part("near/")


def _recoded(matrix: Matrix, storage: str) -> Matrix:
    """``matrix`` in another storage, some rows at a time: a large one has no room in float32."""
    starts = range(0, matrix.shape[0], _RECODED_ROWS)
    parts = [convert(matrix.rows(at, min(_RECODED_ROWS, matrix.shape[0] - at)), storage) for at in starts]
    return type(parts[0]).stack(parts)
