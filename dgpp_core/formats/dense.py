"""A matrix of floating-point weights, as it is."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.formats.stored import StoredMatrix, take_columns


class DenseMatrix(StoredMatrix, frozen=True, eq=False):
    """Attributes:
    weight: ``[N, K]`` bfloat16, float16 or float32.
    """

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.weight.shape[0], self.weight.shape[1]

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        return self.weight.to(torch.float32)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, a view."""
        return type(self)(self.weight.narrow(0, start, count))

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, a copy."""
        return type(self)(take_columns(self.weight, start, count))

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K and dtype below each other."""
        return cls(torch.cat([part.weight for part in parts]))
