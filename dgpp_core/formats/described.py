"""The shapes of a stored matrix without its values: enough to rebuild it around other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from dgpp_core.formats.codebook import CodebookMatrix
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.fp8 import Fp8BlockMatrix, Fp8ChannelMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.mxfp4 import Mxfp4Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.formats.packed_int import PackedIntMatrix

FORMATS: Mapping[str, Any] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            CodebookMatrix,
            DenseMatrix,
            Fp8BlockMatrix,
            Fp8ChannelMatrix,
            Mxfp4Matrix,
            Nvfp4Matrix,
            PackedIntMatrix,
        )
    }
)
"""Every format that a loaded matrix may have, by class name."""


class Description(msgspec.Struct, frozen=True):
    """A matrix without its values.

    Attributes:
        format: a name of `FORMATS`.
        tensors: shape and dtype of each tensor by field.
        numbers: the other fields, such as a block or a group.
    """

    format: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    numbers: Mapping[str, int | tuple[int, ...] | None]

    @classmethod
    def of(cls, matrix: Matrix) -> Description:
        """The description of a matrix."""
        fields = msgspec.structs.asdict(cast("msgspec.Struct", matrix))
        shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in matrix.tensors().items()}
        numbers = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
        return cls(type(matrix).__name__, shapes, numbers)

    def matrix(self, tensors: Mapping[str, Tensor] | None = None) -> Matrix:
        """The matrix around ``tensors``; without them one that has shapes only, on the ``meta`` device."""
        held = self.blanks() if tensors is None else tensors
        return cast("Matrix", FORMATS[self.format](**held, **self.numbers))

    def blanks(self) -> dict[str, Tensor]:
        """Tensors without values."""
        return {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, (shape, dtype) in self.tensors.items()
        }
