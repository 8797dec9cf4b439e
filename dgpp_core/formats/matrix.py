"""Weight matrices in the form their checkpoint stores them.

Every format is a frozen struct of tensors on one device with the same few operations, so that a loader can cut and
concatenate a matrix, and an operation can take it, without knowing the format. ``[N, K]``: N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor


class Matrix(Protocol):
    """A stored weight matrix ``[N, K]``."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)`` of the matrix that is stored, not of the tensors that hold it."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that hold it, by field."""
        ...

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``, exact; of a format in another basis, rounded once."""
        ...

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count`` as a matrix of their own; raises `CheckpointError` off a scale's boundary."""
        ...

    def columns(self, start: int, count: int) -> Self:
        """The same for input columns."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same matrix on ``device``."""
        ...

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other, each with its own scales."""
        ...
