"""What every stored matrix is: a frozen struct of tensors, and a few numbers that say how to read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec
import torch
from torch import Tensor


class StoredMatrix(msgspec.Struct, frozen=True, eq=False):
    """The part of `dgpp_core.formats.matrix.Matrix` that no format needs to write for itself."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that hold it, by field; a field that is None is left out."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Self:
        """The same matrix on ``device``."""
        return msgspec.structs.replace(self, **{name: value.to(device) for name, value in self.tensors().items()})


def take_columns(tensor: Tensor, start: int, count: int) -> Tensor:
    """Columns of a tensor, contiguous."""
    return tensor.narrow(1, start, count).contiguous()


def spread(scales: Tensor, group: int) -> Tensor:
    """Scales ``[N, K / group]`` repeated to ``[N, K]``."""
    return scales.repeat_interleave(group, dim=-1)
